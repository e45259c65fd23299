"""What the readers of published datasets share: finding the folder, reading tables, checking files, building rows.

A reader takes the folder that a user gives and returns `Rows`. `data/layouts.py` lists the readers by name, and
docs/add-a-dataset.md shows how to add one.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..console.files import save_image
from ..data.formats import SUFFIXES
from ..data.rows import TEST, TRAIN, VAL, Rows
from ..errors import UserError

NO_VALIDATION = "no validation split is published"
SPLIT_CODES = {"0": TRAIN, "1": VAL, "2": TEST}  # as in the CSV files of Waterbirds and CelebA


# ---- the folder ------------------------------------------------------------------------------------------------------


def locate(root: Path, layout: str, needs: Sequence[str], inside: Sequence[str] = ()) -> Path:
    """`root`, or the first of these folders `inside` it, that contains everything the layout needs."""
    for folder in (root, *(root / name for name in inside)):
        if all((folder / need).exists() for need in needs):
            return folder
    missing = next(need for need in needs if not (root / need).exists())
    raise wrong_folder(root, layout, f"{', '.join(needs)}, but {missing} is missing")


def wrong_folder(folder: Path, layout: str, expected: str) -> UserError:
    """An error that says what was expected in a folder and lists the first few entries that are in it."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return UserError(f"{folder}: cannot be read as {layout} ({error.strerror}); expected {expected}")
    found = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    return UserError(f"{folder}: not in the layout of {layout}: expected {expected}; found {found or 'nothing'}")


def image_names(folder: Path, suffixes: Iterable[str] = SUFFIXES) -> tuple[str, ...]:
    """The names of the image files in a folder, sorted, without hidden files."""
    endings = tuple(suffixes)
    return tuple(name for name in _entries(folder, folders=False) if name.lower().endswith(endings))


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    return _entries(folder, folders=True)


def _entries(folder: Path, *, folders: bool) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == folders))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None


def existing(root: Path, paths: Sequence[str]) -> list[str]:
    """Each path, or "" where there is no such file. Folders are listed once, which is faster than a test per file."""
    names_in: dict[str, set[str]] = {}
    found = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in names_in:
            try:
                names_in[folder] = {entry.name for entry in os.scandir(root / folder)}
            except OSError:
                names_in[folder] = set()
        found.append(path if name in names_in[folder] else "")
    return found


def check_missing(root: Path, paths: Sequence[str], table: Path, lines: Sequence[int]) -> None:
    """Raise an error with file and line for the first file that a table lists and that does not exist."""
    missing = [row for row, path in enumerate(existing(root, paths)) if not path]
    if missing:
        others = f" (and {len(missing) - 1:,} more listed files)" if len(missing) > 1 else ""
        path = root / paths[missing[0]]
        raise UserError(f"{table}:{lines[missing[0]]}: {path} does not exist{others}; restore it")


def save_mask(mask: np.ndarray, file: Path) -> None:
    """Write bool [h, w] as a 1-bit PNG."""
    from PIL import Image

    save_image(file, Image.fromarray(mask), sync=False, marked=False)


# ---- text, JSON and CSV ----------------------------------------------------------------------------------------------


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def read_json(file: Path) -> Any:
    """The content of a JSON file; errors name the file and line."""
    try:
        return json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON ({error.msg})") from None


def read_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The line number of each row of a CSV file with its cells in these columns."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            header = [name.strip() for name in next(reader, [])]
            for name in columns:
                if name not in header:
                    found = ", ".join(header[:8]) or "nothing"
                    raise UserError(f"{file}:1: column {name!r} is missing; found {found}")
            positions = [header.index(name) for name in columns]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) < len(header):
                    raise UserError(f"{file}:{reader.line_num}: {len(cells)} cells for {len(header)} columns")
                yield reader.line_num, [cells[position].strip() for position in positions]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: not readable as CSV ({error})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def parse_choice(location: str, column: str, cell: str, allowed: dict[str, int]) -> int:
    """The code of a cell that can only have a few values; `location` is its file and line."""
    if cell not in allowed:
        raise UserError(f"{location}: {column} is {cell!r}; expected one of {', '.join(allowed)}")
    return allowed[cell]


# ---- rows ------------------------------------------------------------------------------------------------------------


class ListedImage(NamedTuple):
    """One line of a table that lists images with two-valued attributes (Waterbirds, CelebA)."""

    line: int
    image: str
    label: int
    attribute: int
    split: int


def rows_from_table(
    name: str,
    root: Path,
    table: Path,
    listed: Sequence[ListedImage],
    classes: tuple[str, ...],
    attributes: tuple[str, ...],
    notes: Sequence[str] = (),
) -> Rows:
    """The images that a table lists; group = label x attribute, numbered label-major as in the papers."""
    if not listed:
        raise UserError(f"{table}: the table has no rows")
    lines, images, labels, values, splits = map(list, zip(*listed, strict=True))
    check_missing(root, images, table, lines)
    return Rows(
        name,
        root,
        images,
        np.array(labels, np.int64),
        classes,
        np.array(splits, np.int8),
        groups=len(attributes) * np.array(labels, np.int64) + np.array(values, np.int64),
        group_names=tuple(f"{label}/{attribute}" for label in classes for attribute in attributes),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Folder:
    """A folder under the root whose images (or only those in `names`) share label, split and attribute."""

    path: str
    label: int
    split: int
    attribute: str = ""
    names: tuple[str, ...] | None = None


def rows_from_folders(
    name: str,
    root: Path,
    classes: tuple[str, ...],
    folders: Iterable[Folder],
    notes: Sequence[str] = (),
    suffixes: Iterable[str] = SUFFIXES,
) -> Rows:
    """The images in these folders; groups are named `label/attribute` where folders have attributes."""
    images, labels, splits, cells = [], [], [], []
    for folder in folders:
        names = image_names(root / folder.path, suffixes) if folder.names is None else folder.names
        images += [f"{folder.path}/{file}" for file in names]
        labels += [folder.label] * len(names)
        splits += [folder.split] * len(names)
        cells += [(folder.label, folder.attribute)] * len(names)
    if not images:
        raise UserError(f"{root}: no images in the folders of layout {name}")
    group_of = {cell: number for number, cell in enumerate(sorted(set(cells)))}
    grouped = any(attribute for _, attribute in group_of)
    return Rows(
        name,
        root,
        images,
        np.array(labels, np.int64),
        classes,
        np.array(splits, np.int8),
        groups=np.array([group_of[cell] for cell in cells], np.int64) if grouped else None,
        group_names=tuple(f"{classes[label]}/{attribute}" for label, attribute in group_of) if grouped else (),
        notes=tuple(notes),
    )
