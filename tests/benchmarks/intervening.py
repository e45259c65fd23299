"""Runs with known outcomes under interventions, as benchmarks/run.py leaves them."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from evidence import TEST
from packing import as_csv
from rows import folder_of

EACH = 400


def add(runs: Path, kind: str, row: str, seed: int = 0, **mistakes: tuple[int, int]) -> Path:
    """A run with so many mistakes among 400 images of each of two attributes, by intervention."""
    path = folder_of(runs / kind, row, seed)
    path.mkdir(parents=True)
    facts = {"speed": {"images_per_second": 100.0}, "benchmark": {"cost": {"gflops": 2.0}}}
    (path / "run.json").write_text(json.dumps(facts))
    (path / "metrics.json").write_text("{}")
    attributes = {"mixed": ("same", "rand")}.get(kind, ("original", "swapped"))
    images = [f"i/{a}/{i}.jpg" for a in attributes for i in range(EACH)]
    groups = [f"tern/{a}" for a in attributes for _ in range(EACH)]
    right = {how: [int(i >= wrong) for wrong in some for i in range(EACH)] for how, some in mistakes.items()}
    (path / TEST).parent.mkdir()
    (path / TEST).write_text(as_csv({"image": images, "group": groups} | right))
    return path
