"""The toy pictures as a data set on disk, with a shortcut to fall for."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from PIL import Image

from .toy import make_toy

SPLIT_SEEDS = {"train": 1, "val": 2, "test": 3}


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
) -> Path:
    """Storks and ducks in meadows and on water: the place goes with the class in training, and not in val and test.

    Writes pictures, masks and rows.csv. In val and test all four groups are equally large.
    """
    lines = [["image", "label", "group_place", "mask", "split"]]
    for split, count in (("train", train), ("val", val), ("test", test)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / "masks" / split).mkdir(parents=True, exist_ok=True)
        numbers = torch.arange(count)
        free = split == "train"
        toy = make_toy(
            count,
            size=size,
            seed=1000 * seed + SPLIT_SEEDS[split],
            correlation=correlation,
            displacement=displacement,
            labels=None if free else numbers % 2,
            places=None if free else numbers // 2 % 2,
        )
        for i in range(count):
            name = f"{split}/{i:05d}.png"
            Image.fromarray(toy.images[i].permute(1, 2, 0).numpy()).save(folder / name, compress_level=1)
            Image.fromarray(toy.masks[i].numpy()).save(folder / "masks" / name)
            label, place = toy.CLASS_NAMES[toy.labels[i]], toy.PLACE_NAMES[toy.places[i]]
            lines.append([name, label, place, f"masks/{name}", split])
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return folder
