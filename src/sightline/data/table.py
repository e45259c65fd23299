"""Reading a CSV file of images into columns, compact enough for millions of rows. Errors name file and line."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import UserError

COLUMNS = ("image", "label", "group", "mask", "box", "split")
BOX = 'expected "left top right bottom" in pixels, several boxes separated by ;'


@dataclass
class CategoryColumn:
    """A categorical column: one integer code per row, into the distinct values."""

    code_of: dict[str, int] = field(default_factory=dict)
    codes: array = field(default_factory=lambda: array("q"))

    def append(self, value: str) -> None:
        self.codes.append(self.code_of.setdefault(value, len(self.code_of)))

    def sorted(self) -> tuple[tuple[str, ...], np.ndarray]:
        """The distinct values in sorted order (numbers by value), and each row's index into them."""
        values = natural_order(self.code_of)
        rank = np.empty(len(values), np.int64)
        rank[[self.code_of[value] for value in values]] = np.arange(len(values))
        return values, rank[np.frombuffer(self.codes, np.int64)]


@dataclass
class BoxColumn:
    """A column of boxes: the coordinates of all rows in one array, and where each row's end."""

    coordinates: array = field(default_factory=lambda: array("f"))
    ends: array = field(default_factory=lambda: array("q", [0]))

    def append(self, cell: str) -> None:
        for box in cell.split(";") if cell else ():
            left, top, right, bottom = coordinates = [float(number) for number in box.split()]
            if not (all(map(math.isfinite, coordinates)) and left < right and top < bottom):
                raise ValueError
            self.coordinates.extend(coordinates)
        self.ends.append(len(self.coordinates) // 4)

    def arrays(self) -> list[np.ndarray]:
        """float32 [k, 4] for each row: views of one array."""
        joined = np.array(self.coordinates, np.float32).reshape(-1, 4)
        ends = self.ends
        return [joined[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]


@dataclass(frozen=True)
class Table:
    """The columns a dataset may have; None for those missing from the file."""

    file: Path
    lines: array  # first line of each row
    image: list[str]
    label: CategoryColumn
    mask: list[str] | None
    box: BoxColumn | None
    split: CategoryColumn | None
    groups: dict[str, CategoryColumn]  # `group`, or every column whose name begins with `group_`
    unused: tuple[str, ...]

    def error(self, row: int, message: str) -> UserError:
        return UserError(f"{self.file}:{self.lines[row]}: {message}")

    def check_empty_cells(self) -> None:
        """Every row needs an image, a label, a split and groups where there is such a column; mask and box may lack."""
        if "" in self.image:
            raise self.error(self.image.index(""), "no image; give its path, relative to this file")
        advice = {
            "label": "give the class; `sightline predict` needs no labels",
            "split": "write train, val or test",
        }
        for name, column in {"label": self.label, "split": self.split, **self.groups}.items():
            if column is not None and "" in column.code_of:
                row = column.codes.index(column.code_of[""])
                raise self.error(row, f"no {name}; {advice.get(name, 'where it is not known, write unknown')}")


def read_table(file: Path) -> Table:
    records = read_records(file)
    line, header = next(records, (1, []))
    names = [name.lower() for name in header]
    _check_header(f"{file}:{line}", names)
    group_names = [name for name in names if name == "group" or name.startswith("group_")]
    table = Table(
        file,
        lines=array("q"),
        image=[],
        label=CategoryColumn(),
        mask=[] if "mask" in names else None,
        box=BoxColumn() if "box" in names else None,
        split=CategoryColumn() if "split" in names else None,
        groups={name: CategoryColumn() for name in group_names},
        unused=tuple(name for name in names if name not in COLUMNS and name not in group_names),
    )
    appends = [
        ((table.groups.get(name) or getattr(table, name)).append, index)
        for index, name in enumerate(names)
        if name not in table.unused
    ]
    for line, cells in records:
        if len(cells) != len(names):
            raise cell_count_error(f"{file}:{line}", cells, names)
        table.lines.append(line)
        try:
            for append, index in appends:
                append(cells[index])
        except ValueError:
            raise UserError(f"{file}:{line}: invalid box {cells[names.index('box')]!r}; {BOX}") from None
    if not table.image:
        raise UserError(f"{file}: no rows; write one per image below the header")
    table.check_empty_cells()
    return table


def natural_order(values: Iterable[str]) -> tuple[str, ...]:
    """Sorted; by value where all are numbers."""
    values = sorted(values)
    return tuple(sorted(values, key=int) if all(map(str.isdecimal, values)) else values)


def first_occurrence(images: Sequence[str]) -> np.ndarray:
    """For each row the first row with the same image: itself, unless images are repeated."""
    hashes = np.fromiter(map(hash, images), np.int64, len(images))
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first = first[inverse]
    for row in np.flatnonzero(first != np.arange(len(first))):
        if images[row] != images[first[row]]:  # a hash collision: once in a million datasets of a million images
            first[row] = images.index(images[row])
    return first


def read_records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row's first line number and its cells; empty lines are skipped."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader, line = csv.reader(text, strict=True), 1
            try:
                for cells in reader:
                    if any("\0" in cell for cell in cells):
                        raise UserError(f"{file}:{line}: contains a null character; save the file as CSV UTF-8")
                    if cells:
                        yield line, [cell.strip() for cell in cells]
                    line = reader.line_num + 1
            except csv.Error as error:
                raise UserError(f"{file}:{line}: invalid CSV ({error}); check for an unclosed quote") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}:{_first_line_not_utf8(file)}: not UTF-8 text; save the file as CSV UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def _first_line_not_utf8(file: Path) -> int:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1  # invalid only across lines: not text at all


def cell_count_error(location: str, cells: Sequence[str], names: Sequence[str]) -> UserError:
    return UserError(f"{location}: {len(cells)} cells under {len(names)} columns; quote cells that contain a comma")


def _check_header(location: str, names: list[str]) -> None:
    expected = "expected a header such as image,label,group,mask,box,split; image and label are required"
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        separator = ";" if ";" in names[0] else "tabs"
        raise UserError(f"{location}: the cells are separated by {separator}; save the file with commas")
    for name in ("image", "label"):
        if name not in names:
            raise UserError(f"{location}: no column {name!r} among {', '.join(names) or 'nothing'}; {expected}")
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise UserError(f"{location}: two columns are named {repeated[0]!r}; rename one")
    if "group" in names and any(name.startswith("group_") for name in names):
        raise UserError(f"{location}: both group and group_… columns; use one kind (several group_… are combined)")
