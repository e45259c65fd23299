"""The sets of the relevance benchmark as rows of its own: few pictures validate, and half of ImageNet teaches."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

IMAGENET_TRAINS, IMAGENET_TESTS = 420, 500


def lines_of(source: Path, home: Path) -> list[dict[str, str]]:
    """The rows of a set, their paths as seen from here: two files in one folder call pictures by the same names."""
    file = source / "rows.csv" if source.is_dir() else source
    with file.open(newline="", encoding="utf-8") as opened:
        lines = list(csv.DictReader(opened))
    kept = [k for k in lines[0] if k in ("image", "label", "split", "mask") or k.startswith("group")]
    return [
        {k: from_here(file.parent / line[k], home) if k in ("image", "mask") else line[k] for k in kept}
        for line in lines
    ]


def imagenet_lines(source: Path, home: Path) -> list[dict[str, str]]:
    """Classes are called by their wnids, which sort as the head's outputs do; which half teaches is drawn once."""
    with (source / "samples.csv").open(newline="", encoding="utf-8") as opened:
        lines = list(csv.DictReader(opened))
    order, split = np.random.default_rng(0).permutation(len(lines)), {}
    tests = IMAGENET_TESTS if len(lines) > IMAGENET_TESTS + IMAGENET_TRAINS else len(lines) // 2
    trains = IMAGENET_TRAINS if len(lines) > tests + IMAGENET_TRAINS else len(lines) // 4
    for place, i in enumerate(order):
        split[i] = "test" if place < tests else "train" if place < tests + trains else "val"
    return [
        {"image": from_here(source / line["path"], home), "label": line["wnid"], "split": split[i]}
        for i, line in enumerate(lines)
    ]


def from_here(path: Path, home: Path) -> str:
    return Path(os.path.relpath(path.resolve(), home.resolve())).as_posix()


def few_to_validate(lines: Sequence[dict[str, str]], count: int) -> list[dict[str, str]]:
    """With so many validation pictures, the classes in turn; the other splits are as they were."""
    generator = np.random.default_rng(0)
    val = [i for i in generator.permutation(len(lines)).tolist() if lines[i]["split"] == "val"]
    turns: dict[str, int] = {}
    turn = {}
    for i in val:
        turn[i] = turns[lines[i]["label"]] = turns.get(lines[i]["label"], -1) + 1
    kept = set(sorted(val, key=lambda i: turn[i])[:count])
    return [line for i, line in enumerate(lines) if line["split"] != "val" or i in kept]


def write_lines(path: Path, lines: Sequence[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if not path.exists() or path.read_text(encoding="utf-8") != text.getvalue():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.getvalue(), encoding="utf-8")
