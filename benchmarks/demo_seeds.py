"""The demo with several seeds: accuracy, worst group and sight of all its methods, trained as `sightline demo` does.

    python benchmarks/demo_seeds.py --out benchmarks/results/demo_seeds.json     # all seeds, one after the other
    python benchmarks/demo_seeds.py --seeds 3 4 --out runs/demo-seeds-3-4.json   # some of them, on another machine
    python benchmarks/demo_seeds.py --seeds --parts runs/demo-seeds-*.json --out benchmarks/results/demo_seeds.json

A seed changes the images, the selector and the training. Every run that was begun is in the file.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from record import commit, record
from sightline import demo
from sightline.config import Demo
from sightline.load import load_as_trained
from sightline.metrics.estimates import Metrics, read_metrics
from sightline.train import train

LOOKED_AT = 200  # further images whose sight is compared with the true masks
CHUNK = 50


@dataclass(frozen=True)
class DemoSeeds:
    out: Path
    """Result file."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    methods: tuple[str, ...] = tuple(demo.METHODS)
    """Methods to train, by their folder."""
    parts: tuple[Path, ...] = ()
    """Files of earlier calls, whose rows are taken over."""


def rows_of_seed(seed: int, methods: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """One row for every method, as soon as it is trained."""
    command = Demo(folder, seed=seed)
    data = demo.draw_images(folder / "toy", seed)
    for name in methods:
        kind, title, _, settings = demo.METHODS[name]
        began = time.process_time()
        train(demo.configured(command, data, kind, name, settings))
        content = read_metrics(folder / name / "metrics.json")
        metrics, seen = Metrics.from_dict(content["splits"]["test"]), content.get("sight", {}).get("test")
        assert metrics.worst_group is not None
        yield {
            "seed": seed, "method": name, "name": title, "n": metrics.n,
            "accuracy": round(metrics.accuracy.value, 4),
            "worst_group": round(metrics.worst_group.value, 4),
            "interval": [round(metrics.worst_group.low, 4), round(metrics.worst_group.high, 4)],
            "coverage": 1.0 if seen is None else round(seen["coverage"]["value"], 4),
            "pixel_iou": pixel_overlap(folder / name, command.seed),
            "cpu_seconds": round(time.process_time() - began),
            "commit": commit(),
        }  # fmt: skip


def pixel_overlap(run: Path, seed: int) -> float | None:
    """Mean intersection over union of the sight and the true masks; None for a method that chooses no pixels."""
    method = load_as_trained(run).method
    if method.needs_masks or method.sees_everything:
        return None
    number = torch.arange(LOOKED_AT)
    toy = demo.further_images(seed + 7, number % 2, number // 2 % 2)
    overlaps = []
    for images, masks in zip(toy.images.split(CHUNK), toy.masks.split(CHUNK), strict=True):
        sight = method.look(images.float() / 255)
        if sight.keep_pixels is None:
            return None
        both, either = (sight.keep_pixels & masks).sum((1, 2)), (sight.keep_pixels | masks).sum((1, 2))
        overlaps.append(both / either.clamp(min=1))
    return round(float(torch.cat(overlaps).mean()), 4)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over the seeds, of every method."""
    found = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        found[name] = {
            figure: round(statistics.median(row[figure] for row in own), 4)
            for figure in ("accuracy", "worst_group", "coverage")
        } | {"lowest_worst_group": min(row["worst_group"] for row in own), "seeds": len(own)}
    return found


def main(config: DemoSeeds) -> None:
    rows = [row for part in config.parts for row in json.loads(part.read_text(encoding="utf-8"))["rows"]]
    write(config.out, rows)
    for seed in config.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of_seed(seed, config.methods, Path(folder)):
                rows.append(row)
                write(config.out, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    rows.sort(key=lambda one: (list(demo.METHODS).index(one["method"]), one["seed"]))
    record(path, "cpu", {"median": medians(rows), "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(DemoSeeds))
