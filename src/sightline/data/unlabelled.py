"""Pictures without classes as rows: a folder, nested as you like, or a CSV file with a column `image`."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from ..errors import UserError
from .rows import SPLIT_WORDS, TRAIN, VAL, Rows, read_rows
from .table import records

WATCHED = 0.05  # of the pictures are held out to watch training by,
MOST_WATCHED = 1024  # but no more than this


def read_pictures(path: Path | str, *, layout: str | None = None, seed: int = 0) -> Rows:
    """With their classes where they have any, otherwise without; almost all to learn from, unless they bring splits."""
    path = Path(path).expanduser()
    if layout is not None or not path.exists():
        return read_rows(path, layout=layout, seed=seed)
    if not has_classes(path):
        return read_unlabelled(path, seed=seed)
    if has_splits(path):
        return read_rows(path, seed=seed)
    rows = read_rows(path, whole=True)
    splits, note = hold_out(len(rows), seed)
    *notes, _ = rows.notes  # the last one says that all are for testing
    return replace(rows, splits=splits, notes=(*notes, note))


def has_classes(path: Path) -> bool:
    """A CSV file with a column label, or folders that all hold pictures and nothing deeper, and none beside them."""
    if (file := table_of(path)) is not None:
        return "label" in _header(file)
    folders, loose = _inside(path)
    if folders and not loose and all(name.lower() in SPLIT_WORDS for name in folders):
        return all(has_classes(path / name) for name in folders)
    inner = [_inside(path / name) for name in folders]
    return len(folders) > 1 and not loose and all(files and not deeper for deeper, files in inner)


def has_splits(path: Path) -> bool:
    """A column split, or folders of that name."""
    if (file := table_of(path)) is not None:
        return "split" in _header(file)
    return any(name.lower() in SPLIT_WORDS for name in _inside(path)[0])


def hold_out(count: int, seed: int) -> tuple[np.ndarray, str]:
    """A few to watch training by, the others to learn from; and what to say about it."""
    watched = min(MOST_WATCHED, max(1, round(WATCHED * count)))
    splits = np.full(count, TRAIN, np.int8)
    splits[np.random.default_rng((seed, VAL)).permutation(count)[:watched]] = VAL
    return splits, f"{watched:,} of {count:,} pictures are held out to watch training by, seed {seed}"


def read_unlabelled(path: Path, *, seed: int = 0) -> Rows:
    file = table_of(path)
    if file is None:
        root, (images, masks) = path, (_pictures_below(path), None)
    else:
        root, (images, masks) = file.parent, listed(file)
    if len(images) < 2:
        raise UserError(f"{path}: {'one picture' if images else 'no pictures'}; give at least two")
    splits, note = hold_out(len(images), seed)
    notes = ("no classes: neighbours of the same class cannot be counted", note)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return Rows(name, root, images, np.zeros(len(images), np.int64), ("picture",), splits, masks=masks, notes=notes)


def table_of(path: Path) -> Path | None:
    """The CSV file that a path is, or that its folder has."""
    if path.suffix.lower() == ".csv":
        return path
    return path / "rows.csv" if (path / "rows.csv").is_file() else None


def _header(file: Path) -> list[str]:
    _, header = next(records(file), (1, []))
    return [name.lower() for name in header]


def listed(file: Path) -> tuple[list[str], list[str] | None]:
    """The pictures of a CSV file, relative to its folder, and their masks where it has a column for them."""
    names = _header(file)
    if "image" not in names:
        raise UserError(f"{file}:1: no column 'image' among {', '.join(names) or 'nothing'}; name the pictures in one")
    images, masks = [], []
    for line, cells in islice(records(file), 1, None):
        if len(cells) != len(names):
            raise UserError(f"{file}:{line}: {len(cells)} cells under {len(names)} columns")
        row = dict(zip(names, cells, strict=True))
        if not row["image"]:
            raise UserError(f"{file}:{line}: no image; give its path, relative to this file")
        images.append(row["image"])
        masks.append(row.get("mask", ""))
    return images, masks if "mask" in names else None


def _inside(folder: Path) -> tuple[list[str], list[str]]:
    """Folders and pictures in a folder, sorted; hidden ones are not seen."""
    from .formats import is_image

    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
            folders = sorted(entry.name for entry in seen if entry.is_dir())
            return folders, sorted(entry.name for entry in seen if entry.is_file() and is_image(entry.path))
    except NotADirectoryError:
        raise UserError(f"{folder}: neither a .csv file nor a folder of pictures") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error


def _pictures_below(root: Path, below: str = "") -> list[str]:
    folders, files = _inside(root / below)
    deeper = (picture for name in folders for picture in _pictures_below(root, f"{below}{name}/"))
    return [f"{below}{name}" for name in files] + list(deeper)
