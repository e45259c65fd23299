"""The table of docs/methods/ifam.md on other kinds of images, from benchmarks/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from birds_tables import read, table


def kinds(results: Path) -> str:
    """Every seed's pixel IoU and coverage, and the pixel IoU with one start of k-means."""
    runs = read(results, "selector_kinds.json")["runs"]
    head = ["images", "area of the objects", "pixel IoU", "with one start", "coverage / area"]
    lines = []
    for name in dict.fromkeys(run["dataset"] for run in runs):
        own = [run for run in runs if run["dataset"] == name]
        area = f"{100 * sum(run['object_area'] for run in own) / len(own):.0f} %"
        keys = ("pixel_iou", "one_start_pixel_iou", "coverage_per_area")
        lines.append([name, area, *(by_seed(own, key) for key in keys)])
    return table(head, lines)


def by_seed(runs: list[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{run[key]:.2f}".removeprefix("0") for run in runs)


TABLES = {"kinds": kinds}
