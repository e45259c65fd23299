"""CelebA faces: is the hair blond? Among the blond, men are rare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, VAL, Rows
from ..errors import UserError
from .cub import check_missing, choice, locate, read_columns

ATTRIBUTES, PARTITION, PICTURES = "list_attr_celeba.csv", "list_eval_partition.csv", "img_align_celeba"
CLASSES = ("not blond", "blond")
SEXES = ("woman", "man")
SIGNS = {"-1": 0, "1": 1}
SPLIT_NUMBERS = {"0": TRAIN, "1": VAL, "2": TEST}


def read_celeba(root: Path) -> Rows:
    """Label Blond_Hair, attribute Male, the published three splits."""
    folder = locate(root, "CelebA", (ATTRIBUTES, PARTITION, PICTURES), inside=("celeba", "CelebA"))
    pictures = f"{PICTURES}/{PICTURES}" if (folder / PICTURES / PICTURES).is_dir() else PICTURES
    table = folder / PARTITION
    split_of = {
        name: choice(f"{table}:{line}", "partition", split, SPLIT_NUMBERS)
        for line, (name, split) in read_columns(table, ("image_id", "partition"))
    }
    table = folder / ATTRIBUTES
    lines, images, labels, sexes, splits = [], [], [], [], []
    for line, (name, blond, male) in read_columns(table, ("image_id", "Blond_Hair", "Male")):
        where = f"{table}:{line}"
        if name not in split_of:
            raise UserError(f"{where}: {name} is in no split of {PARTITION}")
        lines.append(line)
        images.append(f"{pictures}/{name}")
        labels.append(choice(where, "Blond_Hair", blond, SIGNS))
        sexes.append(choice(where, "Male", male, SIGNS))
        splits.append(split_of[name])
    if not images:
        raise UserError(f"{table}: has no rows")
    check_missing(folder, images, table, lines)
    return Rows(
        "celeba",
        folder,
        images,
        np.array(labels, np.int64),
        CLASSES,
        np.array(splits, np.int8),
        groups=2 * np.array(labels, np.int64) + np.array(sexes, np.int64),
        group_names=tuple(f"{hair}/{sex}" for hair in CLASSES for sex in SEXES),
        notes=("the attributes are annotators' impressions, as published",),
    )
