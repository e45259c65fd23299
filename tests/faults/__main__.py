"""`python -m tests.faults --many 5000 --out benchmarks/results/trust.json`: many faults, and the row of the result."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.trust import commit, record

from .session import Session
from .workspace import make_workspace

ROW = "faults"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=5000, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the faults")
    parser.add_argument("--slow", type=float, default=0.2, help="how often slow commands are drawn, relative to others")
    parser.add_argument("--out", type=Path, help="JSON file for the row of the result")
    options = parser.parse_args()
    commit()
    failed, kinds, began = 0, Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        session = Session(make_workspace(Path(folder, "base")), Path(folder), options.seed, slow=options.slow)
        for number, trial in enumerate(session.trials(options.many), start=1):
            kinds[trial.damage or trial.fault.kind] += 1
            if (failure := session.run(trial)) is not None:
                failed += 1
                print(f"FAILED {failure.trial}: {failure.reason}", flush=True)
            if number % 100 == 0:
                print(f"{number:,} faults, {failed:,} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))
    if options.out is not None:
        record(options.out, ROW, options.many, failed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
