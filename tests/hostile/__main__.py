"""`python -m tests.hostile --many 100000 --out benchmarks/results/trust.json`: many files, and a row for each kind."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.trust import record

from sightline.datasets.toy import write_toy
from sightline.train import train

from ..small_runs import small
from .fuzz import fuzz
from .readers import kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=100_000, help="number of files in all")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the changes")
    parser.add_argument("--only", nargs="*", help="kinds of files. Default: all")
    parser.add_argument("--out", type=Path, help="JSON file for the rows of the result")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        toy = write_toy(Path(folder, "toy"), train=16, val=8, test=8, size=32)
        run = train(small(toy, Path(folder, "run"), epochs=1))
        every = kinds(Path(folder, "files"), run)
        found = {name: every[name] for name in options.only or every}
        for name, kind in found.items():
            began = time.monotonic()
            outcome = fuzz(kind, count_for(kind.costly, len(found), options.many), Path(folder, "files"), options.seed)
            distinct = sorted({failure.partition(" for b")[0] for failure in outcome.failures})
            print(
                f"{name}: {outcome.tried:,} files, {outcome.read:,} read, {outcome.refused:,} refused, "
                f"{len(outcome.failures):,} failed, {time.monotonic() - began:.0f} s",
                *distinct[:20], sep="\n  ", flush=True,
            )  # fmt: skip
            failed += len(outcome.failures)
            if options.out is not None:
                record(options.out, f"hostile files: {name}", outcome.tried, len(outcome.failures))
    return int(failed > 0)


def count_for(costly: bool, kinds: int, many: int) -> int:
    """Files whose reader builds a model are a fifth as many."""
    return max(1, many // kinds // (5 if costly else 1))


if __name__ == "__main__":
    sys.exit(main())
