"""The toy pictures as a data set on disk, with a shortcut to fall for."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from PIL import Image

from ..config import Toy
from ..console.terminal import counted
from ..errors import UserError
from .pool import in_processes
from .toy_images import BLOCK, make_toy

SPLIT_SEEDS = {"train": 1, "val": 2, "test": 3}
CHUNK = 8 * BLOCK  # pictures that a process draws at a time


def write_toy(
    folder: Path,
    *,
    train: int = 1200,
    val: int = 400,
    test: int = 800,
    size: int = 64,
    correlation: float = 0.9,
    displacement: float = 0.15,
    seed: int = 0,
    workers: int = 1,
) -> Path:
    """Storks and ducks in meadows and on water: the place goes with the class in training, and not in val and test.

    Writes pictures, masks and rows.csv. In val and test all four groups are equally large. `workers` processes draw.
    """
    counts = {"train": train, "val": val, "test": test}
    for split in counts:
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / "masks" / split).mkdir(parents=True, exist_ok=True)
    paint = _Painter(folder, size, correlation, displacement, seed)
    chunks = [
        (split, first, min(first + CHUNK, count)) for split, count in counts.items() for first in range(0, count, CHUNK)
    ]
    lines = [["image", "label", "group_place", "mask", "split"]]
    for some in in_processes(paint, chunks, workers) if workers > 1 else map(paint, chunks):
        lines += some
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return folder


@dataclass(frozen=True)
class _Painter:
    """Draws and writes some pictures of a split; gives their rows."""

    folder: Path
    size: int
    correlation: float
    displacement: float
    seed: int

    def __call__(self, chunk: tuple[str, int, int]) -> list[list[str]]:
        split, first, end = chunk
        numbers, free = torch.arange(end), split == "train"
        toy = make_toy(
            end,
            size=self.size,
            seed=1000 * self.seed + SPLIT_SEEDS[split],
            correlation=self.correlation,
            displacement=self.displacement,
            labels=None if free else numbers % 2,
            places=None if free else numbers // 2 % 2,
            first=first,
        )
        lines = []
        for i, name in enumerate(f"{split}/{number:05d}.png" for number in range(first, end)):
            Image.fromarray(toy.images[i].permute(1, 2, 0).numpy()).save(self.folder / name, compress_level=1)
            Image.fromarray(toy.masks[i].numpy()).save(self.folder / "masks" / name)
            label, place = toy.CLASS_NAMES[toy.labels[i]], toy.PLACE_NAMES[toy.places[i]]
            lines.append([name, label, place, f"masks/{name}", split])
        return lines


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Toy) -> int:
    if command.out.exists():
        raise UserError(f"{command.out}: is there already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    count = command.train + command.val + command.test
    print(f"{write_toy(command.out, **settings)}: {counted(count)} and rows.csv")
    return 0
