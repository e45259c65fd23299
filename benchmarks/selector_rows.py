"""iFAM as it is today on rebuilt Waterbirds, from the predictions per image in selector.tar.xz: rows like those of
wbr_ti_*.json, with intervals over images and seeds.

    python benchmarks/selector_rows.py --out benchmarks/results/selector_wbr.json
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from record import record
from sightline.metrics.groups import evaluate_seeds
from sightline.metrics.predictions import Predictions

RESULTS = Path(__file__).parent / "results"
DATASET, FOLDER = "WB-R", "wbr"


@dataclass(frozen=True)
class SelectorRows:
    out: Path
    """Result file."""
    archive: Path = RESULTS / "selector.tar.xz"
    """Predictions of every run."""
    runs: Path = RESULTS / "selector.json"
    """What is known of these runs."""


def rows_of(folder: Path, runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for every number of parts."""
    for parts in sorted({run["parts"] for run in runs}):
        own = sorted((run for run in runs if run["parts"] == parts), key=lambda run: run["seed"])
        files = [folder / FOLDER / f"ifam-k-{parts}-{run['seed']}" / "predictions" / "test.csv" for run in own]
        metrics = evaluate_seeds([Predictions.load_csv(file, split="test") for file in files])
        yield {
            "row": f"iFAM K={parts}, clusters",
            "command": f"ifam --parts {parts} --epochs {own[0]['epochs']}",
            "seeds": [run["seed"] for run in own],
            "metrics": {"test": {name: asdict(getattr(metrics, name)) for name in ("mean_of_groups", "worst_group")}},
            "pixel_iou": [run["pixel_iou"] for run in own],
            "commit": own[0]["commit"],
        }


def main(config: SelectorRows) -> None:
    runs = [run for run in json.loads(config.runs.read_text(encoding="utf-8"))["runs"] if run["dataset"] == DATASET]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(config.archive) as archive:
        archive.extractall(folder, filter="data")
        rows = list(rows_of(Path(folder), runs))
    record(config.out, "cpu", {"n": rows[0]["metrics"]["test"]["mean_of_groups"]["n"], "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(SelectorRows))
