"""`python -m tests.hostile --many 100000 --out benchmarks/results/trust.json`: many files, and a row for each kind."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.trust import commit, record

from sightline.datasets.toy import write_toy
from sightline.train import train

from ..small_runs import small
from .fuzz import fuzz
from .readers import kinds

COSTS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=100_000, help="number of files in all")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the changes")
    parser.add_argument("--only", nargs="*", help="kinds of files. Default: all")
    parser.add_argument("--out", type=Path, help="JSON file for the rows of the result")
    options = parser.parse_args()
    commit()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        toy = write_toy(Path(folder, "toy"), train=16, val=8, test=8, size=32)
        run = train(small(toy, Path(folder, "run"), epochs=1))
        every = kinds(Path(folder, "files"), run)
        found = {name: every[name] for name in options.only or every}
        costly = sum(kind.costly for kind in found.values())
        for name, kind in found.items():
            began = time.monotonic()
            count = count_for(kind.costly, len(found), costly, options.many)
            outcome = fuzz(kind, count, Path(folder, "files"), options.seed)
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


def count_for(costly: bool, kinds: int, costly_kinds: int, many: int) -> int:
    """Files of one kind, of so many in all. Files whose reader builds a model are a fifth as many as others."""
    share = many / (kinds - costly_kinds + costly_kinds / COSTS)
    return max(1, round(share / COSTS if costly else share))


if __name__ == "__main__":
    sys.exit(main())
