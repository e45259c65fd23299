"""Waterbirds: CUB's birds pasted on land and water; class and background agree in 95 % of the training images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..data.rows import Rows
from ..errors import UserError
from .cub import PARTS, TABLES, WATERBIRDS, read_tables
from .reading import SPLIT_CODES, ListedImage, locate, parse_choice, read_columns, rows_from_table

CLASSES = ("landbird", "waterbird")
BACKGROUNDS = ("land", "water")
BINARY = {"0": 0, "1": 1}
MISLABELLED = ("Eastern_Towhee", "Western_Meadowlark", "Western_Wood_Pewee")  # "tern" is in eastern and western


def read_waterbirds(root: Path) -> Rows:
    """The published folder with metadata.csv; with masks, boxes and key points if it is inside CUB's folder."""
    folder = locate(root, "Waterbirds", ("metadata.csv",), inside=(WATERBIRDS, f"CUB_200_2011/{WATERBIRDS}"))
    table, ids, listed = folder / "metadata.csv", [], []
    columns = ("img_id", "img_filename", "y", "split", "place")
    for line, (image_id, name, y, split, background) in read_columns(table, columns):
        location = f"{table}:{line}"
        ids.append(image_id)
        label, split_code = parse_choice(location, "y", y, BINARY), parse_choice(location, "split", split, SPLIT_CODES)
        listed.append(ListedImage(line, name, label, parse_choice(location, "place", background, BINARY), split_code))
    rows = rows_from_table("waterbirds", folder, table, listed, CLASSES, BACKGROUNDS, _label_noise(listed))
    if all((folder.resolve().parent / file).exists() for file in (*TABLES, *PARTS)):
        return _with_cub(rows, ids, [image.line for image in listed], folder.resolve())
    return rows


def _with_cub(rows: Rows, ids: list[str], lines: list[int], folder: Path) -> Rows:
    """Add CUB's masks, boxes and key points, which fit unchanged: the images have the size of CUB's."""
    cub_ids, cub = read_tables(folder.parent)
    row_of = {str(number): row for row, number in enumerate(cub_ids)}
    for number, name, line in zip(ids, rows.images, lines, strict=True):
        known = cub.images[row_of[number]] if number in row_of else "not listed"
        if known != name:
            raise UserError(f"{folder / 'metadata.csv'}:{line}: image {number} is {name}, but {known} in images.txt")
    cub = cub.take([row_of[number] for number in ids])
    note = f"boxes and key points{'' if cub.masks is None else ' and masks'} are CUB's, from {cub.root}"
    return replace(
        cub,
        name=rows.name,
        images=[f"{folder.name}/{name}" for name in rows.images],
        labels=rows.labels,
        classes=rows.classes,
        splits=rows.splits,
        groups=rows.groups,
        group_names=rows.group_names,
        notes=(*rows.notes, note),
    )


def _label_noise(listed: list[ListedImage]) -> list[str]:
    count = sum(image.label == 1 and any(bird in image.image for bird in MISLABELLED) for image in listed)
    species = ", ".join(MISLABELLED).replace("_", " ")
    return [f"images of landbirds ({species}) labelled waterbird, as published: {count:,}"] if count else []
