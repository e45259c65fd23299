"""Waterbirds: CUB's birds pasted on land and water; water goes with waterbirds in 95 % of the training pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, VAL, Rows
from ..errors import UserError
from .cub import PARTS, TABLES, WATERBIRDS, Birds, check_missing, choice, locate, read_birds, read_columns

CLASSES = ("landbird", "waterbird")
PLACES = ("land", "water")
BINARY = {"0": 0, "1": 1}
SPLIT_NUMBERS = {"0": TRAIN, "1": VAL, "2": TEST}
NAMED_BY_MISTAKE = ("Eastern_Towhee", "Western_Meadowlark", "Western_Wood_Pewee")  # "tern" is in eastern and western


def read_waterbirds(root: Path) -> Rows:
    """The published folder with metadata.csv; masks, boxes and key points too where it lies inside CUB's folder."""
    folder = locate(root, "Waterbirds", ("metadata.csv",), inside=(WATERBIRDS, f"CUB_200_2011/{WATERBIRDS}"))
    table = folder / "metadata.csv"
    lines, ids, names, labels, splits, places = [], [], [], [], [], []
    for line, (bird, name, y, split, place) in read_columns(table, ("img_id", "img_filename", "y", "split", "place")):
        where = f"{table}:{line}"
        lines.append(line)
        ids.append(bird)
        names.append(name)
        labels.append(choice(where, "y", y, BINARY))
        splits.append(choice(where, "split", split, SPLIT_NUMBERS))
        places.append(choice(where, "place", place, BINARY))
    if not names:
        raise UserError(f"{table}: has no rows")
    check_missing(folder, names, table, lines)
    rows = Rows(
        "waterbirds",
        folder,
        names,
        np.array(labels, np.int64),
        CLASSES,
        np.array(splits, np.int8),
        groups=2 * np.array(labels, np.int64) + np.array(places, np.int64),
        group_names=tuple(f"{bird}/{place}" for bird in CLASSES for place in PLACES),
        notes=tuple(_known_noise(names, labels)),
    )
    around = folder.resolve().parent
    if all((around / file).exists() for file in (*TABLES, *PARTS)):
        return _with_cub(rows, ids, lines, folder.resolve(), read_birds(around))
    return rows


def _with_cub(rows: Rows, ids: list[str], lines: list[int], folder: Path, birds: Birds) -> Rows:
    """The pictures have the size of CUB's photographs, so what CUB knows about them holds unchanged."""
    row_of = {str(number): row for row, number in enumerate(birds.ids)}
    for number, name, line in zip(ids, rows.images, lines, strict=True):
        if number not in row_of or birds.names[row_of[number]] != name:
            known = birds.names[row_of[number]] if number in row_of else "no image"
            raise UserError(f"{folder / 'metadata.csv'}:{line}: image {number} is {name}, but {known} in images.txt")
    order = [row_of[number] for number in ids]
    masks = birds.masks
    return replace(
        rows,
        root=birds.root,
        images=[f"{folder.name}/{name}" for name in rows.images],
        masks=None if masks is None else [masks[row] for row in order],
        boxes=list(birds.boxes[order][:, None]),
        keypoints=birds.keypoints[order],
        keypoint_names=birds.keypoint_names,
        notes=(
            *rows.notes,
            f"boxes and key points{'' if masks is None else ' and masks'} are CUB's, from {birds.root}",
        ),
    )


def _known_noise(names: list[str], labels: list[int]) -> list[str]:
    mistaken = sum(
        label == 1 and any(bird in name for bird in NAMED_BY_MISTAKE) for name, label in zip(names, labels, strict=True)
    )
    species = ", ".join(NAMED_BY_MISTAKE).replace("_", " ")
    told = f"pictures of landbirds ({species}) labelled waterbird, as published: {mistaken:,}"
    return [told] if mistaken else []
