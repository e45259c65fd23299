"""`sightline toy`: the toy images as a dataset on disk, with the background as a shortcut."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from PIL import Image

from ..config import Toy
from ..console.files import as_csv, save_image, write
from ..console.terminal import counted
from ..errors import UserError
from .pool import map_in_processes
from .toy_images import BACKGROUND_NAMES, BLOCK, CLASS_NAMES, make_toy

SPLIT_SEEDS = {"train": 1, "val": 2, "test": 3}
COLUMNS = ("image", "label", "group_place", "mask", "split")
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

    Writes images, masks and rows.csv; the folder appears when it is complete.
    In val and test the four groups are equally large. `workers` processes draw.
    """
    counts = {"train": train, "val": val, "test": test}
    unfinished = folder.with_name(f"{folder.name}.sightline.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    draw = _ChunkWriter(unfinished, size, correlation, displacement, seed)
    chunks = [
        (split, first, min(first + CHUNK, count)) for split, count in counts.items() for first in range(0, count, CHUNK)
    ]
    lines: list[dict[str, str]] = []
    for chunk_lines in map_in_processes(draw, chunks, workers) if workers > 1 else map(draw, chunks):
        lines += chunk_lines
    write(unfinished / "rows.csv", as_csv(COLUMNS, lines))
    try:
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    return folder


@dataclass(frozen=True)
class _ChunkWriter:
    """Draws and writes consecutive images of a split, and returns their rows."""

    folder: Path
    size: int
    correlation: float
    displacement: float
    seed: int

    def __call__(self, chunk: tuple[str, int, int]) -> list[dict[str, str]]:
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
            image, mask = (Image.fromarray(pixels.numpy()) for pixels in (toy.images[i].permute(1, 2, 0), toy.masks[i]))
            save_image(self.folder / name, image, sync=False, marked=False, compress_level=1)
            save_image(self.folder / "masks" / name, mask, sync=False, marked=False)
            label, background = CLASS_NAMES[toy.labels[i]], BACKGROUND_NAMES[toy.backgrounds[i]]
            lines.append(dict(zip(COLUMNS, (name, label, background, f"masks/{name}", split), strict=True)))
        return lines


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Toy) -> int:
    if command.out.exists():
        raise UserError(f"{command.out}: exists already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    count = command.train + command.val + command.test
    print(f"{write_toy(command.out, **settings)}: {counted(count)} and rows.csv")
    return 0
