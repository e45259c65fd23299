"""CUB-200-2011: species, segmentation masks, boxes and key points; and Waterbird200, the same birds on other scenes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError
from .reading import NO_VALIDATION, check_missing, existing, locate, read_text

WATERBIRDS = "waterbird_complete95_forest2water2"
TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")
PARTS = ("parts/parts.txt", "parts/part_locs.txt")


def read_cub(root: Path) -> Rows:
    """200 species with the official train and test split."""
    folder = locate(root, "CUB-200-2011", (*TABLES, *PARTS, "images"), inside=("CUB_200_2011",))
    return _species_rows("cub", folder, "images", ())


def read_waterbird200(root: Path) -> Rows:
    """CUB's species and split on the images of Waterbirds: the same birds on other backgrounds."""
    root = root.resolve().parent if root.resolve().name == WATERBIRDS else root
    needs = (*TABLES, *PARTS, f"{WATERBIRDS}/metadata.csv")
    folder = locate(root, "Waterbird200 (CUB-200-2011 with Waterbirds in it)", needs, inside=("CUB_200_2011",))
    note = "the papers train on CUB itself and use only the test split of these images"
    return _species_rows("waterbird200", folder, WATERBIRDS, (note,))


def _species_rows(name: str, folder: Path, image_folder: str, notes: tuple[str, ...]) -> Rows:
    rows = read_tables(folder)[1]
    images = [f"{image_folder}/{file}" for file in rows.images]
    check_missing(folder, images, folder / "images.txt", range(1, len(images) + 1))
    no_masks = rows.masks is None
    mask_note = "no masks: there is no segmentations folder" if no_masks else "masks are thresholded at one half"
    return replace(rows, name=name, images=images, notes=(NO_VALIDATION, mask_note, *notes))


def read_tables(folder: Path) -> tuple[list[int], Rows]:
    """The image ids and the rows in the order of images.txt, with image paths as they are listed there."""
    name_of = read_names(folder / "images.txt")
    ids, names = list(name_of), list(name_of.values())
    species = read_by_id(folder, "image_class_labels.txt", ids, 2)[:, 1].astype(np.int64)
    in_train = read_by_id(folder, "train_test_split.txt", ids, 2)[:, 1]
    boxes = read_by_id(folder, "bounding_boxes.txt", ids, 5)[:, 1:]
    boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).astype(np.float32)
    numbers, labels = np.unique(species, return_inverse=True)
    title = {int(number): name.partition("/")[0] for number, name in zip(species, names, strict=True)}
    part_names = read_names(folder / "parts/parts.txt")
    masks = [f"segmentations/{name.rpartition('.')[0]}.png" for name in names]
    return ids, Rows(
        "cub",
        folder,
        names,
        labels.astype(np.int64),
        tuple(title[int(number)].partition(".")[2].replace("_", " ") for number in numbers),
        np.where(in_train == 1, TRAIN, TEST).astype(np.int8),
        masks=existing(folder, masks) if (folder / "segmentations").is_dir() else None,
        boxes=list(boxes[:, None]),
        keypoints=_keypoints(folder / "parts/part_locs.txt", ids, list(part_names)),
        keypoint_names=tuple(part_names.values()),
    )


def read_names(path: Path) -> dict[int, str]:
    """A table with a number and a name on each line."""
    names: dict[int, str] = {}
    for line, text in enumerate(read_text(path).splitlines(), start=1):
        number, _, name = text.partition(" ")
        if not number.isdecimal() or not name.strip() or int(number) in names:
            raise UserError(f"{path}:{line}: expected a new number and a name, found {text[:60]!r}")
        names[int(number)] = name.strip()
    if not names:
        raise UserError(f"{path}: the file is empty")
    return names


def _read_numbers(path: Path, columns: int) -> np.ndarray:
    """A table with this many numbers on each line, float64 [n, columns]."""
    rows = []
    for line, text in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = [float(word) for word in text.split()]
        except ValueError:
            row = []
        if len(row) != columns:
            raise UserError(f"{path}:{line}: expected {columns} numbers, found {text[:60]!r}")
        rows.append(row)
    return np.array(rows).reshape(-1, columns)


def read_by_id(folder: Path, table: str, ids: list[int], columns: int) -> np.ndarray:
    """A table's rows in the order of `ids`; its first column is the id."""
    numbers = _read_numbers(folder / table, columns)
    row_of = {int(number): row for row, number in enumerate(numbers[:, 0])}
    for line, number in enumerate(ids, start=1):
        if number not in row_of:
            raise UserError(f"{folder / table}: no line for image {number} of {folder / 'images.txt'}:{line}")
    return numbers[[row_of[number] for number in ids]]


def _keypoints(path: Path, ids: list[int], parts: list[int]) -> np.ndarray:
    """float32 [n, K, 3]; key points that the table does not list are not visible."""
    numbers = _read_numbers(path, 5)
    image_of, part_of = ({number: index for index, number in enumerate(order)} for order in (ids, parts))
    keypoints = np.zeros((len(ids), len(parts), 3), np.float32)
    for line, (image, part, *point) in enumerate(numbers, start=1):
        if int(image) not in image_of or int(part) not in part_of:
            raise UserError(f"{path}:{line}: image {image:g} is not in images.txt or part {part:g} not in parts.txt")
        keypoints[image_of[int(image)], part_of[int(part)]] = point
    return keypoints
