"""Images for pretraining, labelled or not: a folder, nested at will, or a CSV file with a column `image`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from ..errors import UserError
from .rows import SPLIT_NAMES, TRAIN, VAL, Rows, read_rows, scan_folder
from .table import cell_count_error, read_records

HELD_OUT = 0.05  # fraction of the images held out as validation data,
MAX_HELD_OUT = 1024  # but no more than this


def read_pretraining_rows(path: Path | str, *, layout: str | None = None, seed: int = 0) -> Rows:
    """With class labels where there are any; almost all images for training, unless the data come with splits."""
    path = Path(path).expanduser()
    if layout is not None or not path.exists():
        return read_rows(path, layout=layout, seed=seed)
    if not has_classes(path):
        return read_unlabelled(path, seed=seed)
    if has_splits(path):
        return read_rows(path, seed=seed)
    rows = read_rows(path, all_test=True)
    splits, note = hold_out(len(rows), seed)
    *notes, _ = rows.notes  # the last note is about the test split
    return replace(rows, splits=splits, notes=(*notes, note))


def has_classes(path: Path) -> bool:
    """A CSV file with a column label, or several folders with images in each, none deeper and none beside them."""
    if (file := csv_file_of(path)) is not None:
        return "label" in _header(file)
    folders, loose = scan_folder(path)
    if folders and not loose and all(name.lower() in SPLIT_NAMES for name in folders):
        return all(has_classes(path / name) for name in folders)
    inner = [scan_folder(path / name) for name in folders]
    return len(folders) > 1 and not loose and all(files and not deeper for deeper, files in inner)


def has_splits(path: Path) -> bool:
    """A column split, or folders named after splits."""
    if (file := csv_file_of(path)) is not None:
        return "split" in _header(file)
    return any(name.lower() in SPLIT_NAMES for name in scan_folder(path)[0])


def hold_out(count: int, seed: int) -> tuple[np.ndarray, str]:
    """Splits with a few random validation images, and a note for the user."""
    held_out = min(MAX_HELD_OUT, max(1, round(HELD_OUT * count)))
    splits = np.full(count, TRAIN, np.int8)
    splits[np.random.default_rng((seed, VAL)).permutation(count)[:held_out]] = VAL
    return splits, f"{held_out:,} of {count:,} images held out as validation data, seed {seed}"


def read_unlabelled(path: Path, *, seed: int = 0) -> Rows:
    file = csv_file_of(path)
    if file is None:
        root, (images, masks) = path, (_images_below(path), None)
    else:
        root, (images, masks) = file.parent, images_in_table(file)
    if len(images) < 2:
        raise UserError(f"{path}: {'one image' if images else 'no images'}; give at least two")
    splits, note = hold_out(len(images), seed)
    notes = ("no class labels: k-nearest-neighbour accuracy is not measured", note)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    # The class name is part of the fingerprints in existing run folders.
    return Rows(name, root, images, np.zeros(len(images), np.int64), ("picture",), splits, masks=masks, notes=notes)


def csv_file_of(path: Path) -> Path | None:
    """The path itself if it is a CSV file, or its rows.csv if it is a folder with one."""
    if path.suffix.lower() == ".csv":
        return path
    return path / "rows.csv" if (path / "rows.csv").is_file() else None


def _header(file: Path) -> list[str]:
    _, header = next(read_records(file), (1, []))
    return [name.lower() for name in header]


def images_in_table(file: Path) -> tuple[list[str], list[str] | None]:
    """The images listed in a CSV file, relative to its folder, and their masks if it has such a column."""
    names = _header(file)
    if "image" not in names:
        raise UserError(f"{file}:1: no column 'image' among {', '.join(names) or 'nothing'}; add one with the paths")
    images, masks = [], []
    for line, cells in islice(read_records(file), 1, None):
        if len(cells) != len(names):
            raise cell_count_error(f"{file}:{line}", cells, names)
        row = dict(zip(names, cells, strict=True))
        if not row["image"]:
            raise UserError(f"{file}:{line}: no image; give its path, relative to this file")
        images.append(row["image"])
        masks.append(row.get("mask", ""))
    return images, masks if "mask" in names else None


def _images_below(root: Path, below: str = "") -> list[str]:
    folders, files = scan_folder(root / below)
    deeper = (image for name in folders for image in _images_below(root, f"{below}{name}/"))
    return [f"{below}{name}" for name in files] + list(deeper)
