"""The tables of docs/methods/ifam.md on stage 1 by clustering, from benchmarks/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from birds_tables import read, table

TRAINED = {  # and what is shown of each number of parts
    "Waterbirds v1.0": ("worst group", "worst_group"),
    "WB-R": ("worst group", "worst_group"),
    "scenes one-to-one": ("worst group", "worst_group"),
    "CUB photographs, land or water": ("worst class", "worst_group"),
    "CUB photographs, 200 classes": ("accuracy, 4 epochs", "accuracy"),
}


def trained(results: Path) -> str:
    """A figure for each seed."""
    runs = read(results, "selector.json")["runs"]
    parts = sorted({run["parts"] for run in runs})
    head = ["ViT-Ti, 10 epochs", "starts", "pixel IoU", "coverage / area", *(f"K = {k}" for k in parts)]
    lines = []
    for name, (words, key) in TRAINED.items():
        own = sorted((run for run in runs if run["dataset"] == name), key=lambda run: run["seed"])
        ious = [run["pixel_iou"] for run in own]
        shares = [run["coverage"] / run["object_area"] for run in own]
        figures = [", ".join(f"{100 * run[key]:.1f}" for run in own if run["parts"] == k) for k in parts]
        title = f"{name.replace('WB-R', 'Waterbirds rebuilt')}: {words}"
        lines.append([title, str(own[0]["starts"]), between(ious), between(shares), *figures])
    return table(head, lines)


def between(values: list[float]) -> str:
    low, high = (f"{value:.2f}".removeprefix("0") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


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


def shrinking(results: Path) -> str:
    """Of learned parts as in the published code: every seed's coverage and IoU."""
    content = read(results, "shrinking.json")
    head = ["augmentation", "weight of the total variation", "coverage", "patch IoU"]
    names = [f"{name}, K = {parts}" for parts in (4, 8) for name in head[2:]]
    lines = []
    for augmentation in dict.fromkeys(run["augmentation"] for run in content["runs"]):
        for grid, weight in ((0, "as published"), (37, "that of 37 patches per side")):
            line = [f"`{augmentation}`", weight]
            for parts in (4, 8):
                own = [
                    run
                    for run in content["runs"]
                    if (run["augmentation"], run["total_variation_grid"], run["parts"]) == (augmentation, grid, parts)
                ]
                line += [by_seed(own, "coverage"), by_seed(own, "patch_iou")]
            lines.append(line)
    return table([*head[:2], *names], lines)


TABLES = {"trained": trained, "kinds": kinds, "shrinking": shrinking}
