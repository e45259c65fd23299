"""`sightline toy`: the toy images as a dataset on disk, with the background as a shortcut."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from PIL import Image

from ..config import Toy
from ..console.terminal import counted
from ..errors import UserError
from .pool import map_in_processes
from .toy_images import BACKGROUND_NAMES, BLOCK, CLASS_NAMES, make_toy

SPLIT_SEEDS = {"train": 1, "val": 2, "test": 3}
CHUNK = 8 * BLOCK  # images that a process draws at a time


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
    """Storks and ducks on meadows and water: class and background are correlated in training, not in val and test.

    Writes images, masks and rows.csv. In val and test the four groups are equally large. `workers` processes draw.
    """
    counts = {"train": train, "val": val, "test": test}
    for split in counts:
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / "masks" / split).mkdir(parents=True, exist_ok=True)
    draw = _ChunkWriter(folder, size, correlation, displacement, seed)
    chunks = [
        (split, first, min(first + CHUNK, count)) for split, count in counts.items() for first in range(0, count, CHUNK)
    ]
    lines = [["image", "label", "group_place", "mask", "split"]]
    for chunk_lines in map_in_processes(draw, chunks, workers) if workers > 1 else map(draw, chunks):
        lines += chunk_lines
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return folder


@dataclass(frozen=True)
class _ChunkWriter:
    """Draws and writes consecutive images of a split, and returns their rows."""

    folder: Path
    size: int
    correlation: float
    displacement: float
    seed: int

    def __call__(self, chunk: tuple[str, int, int]) -> list[list[str]]:
        split, first, end = chunk
        numbers, correlated = torch.arange(end), split == "train"
        toy = make_toy(
            end,
            size=self.size,
            seed=1000 * self.seed + SPLIT_SEEDS[split],
            correlation=self.correlation,
            displacement=self.displacement,
            labels=None if correlated else numbers % 2,
            backgrounds=None if correlated else numbers // 2 % 2,
            first=first,
        )
        lines = []
        for i, name in enumerate(f"{split}/{number:05d}.png" for number in range(first, end)):
            Image.fromarray(toy.images[i].permute(1, 2, 0).numpy()).save(self.folder / name, compress_level=1)
            Image.fromarray(toy.masks[i].numpy()).save(self.folder / "masks" / name)
            label, background = CLASS_NAMES[toy.labels[i]], BACKGROUND_NAMES[toy.backgrounds[i]]
            lines.append([name, label, background, f"masks/{name}", split])
        return lines


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Toy) -> int:
    if command.out.exists():
        raise UserError(f"{command.out}: exists already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    count = command.train + command.val + command.test
    print(f"{write_toy(command.out, **settings)}: {counted(count)} and rows.csv")
    return 0
