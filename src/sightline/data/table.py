"""A CSV file of images as columns, lean enough for millions of rows. What is wrong is named by file and line."""

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
BOX = 'a box is "left top right bottom" in pixels, several are separated by ;'


@dataclass
class Words:
    """A column of words that repeat, kept as numbers into the distinct ones."""

    numbers: dict[str, int] = field(default_factory=dict)
    codes: array = field(default_factory=lambda: array("q"))

    def append(self, word: str) -> None:
        self.codes.append(self.numbers.setdefault(word, len(self.numbers)))

    def sorted(self) -> tuple[tuple[str, ...], np.ndarray]:
        """The distinct words in order (numbers by size), and which of them each row has."""
        words = in_order(self.numbers)
        rank = np.empty(len(words), np.int64)
        rank[[self.numbers[word] for word in words]] = np.arange(len(words))
        return words, rank[np.frombuffer(self.codes, np.int64)]


@dataclass
class Boxes:
    """A column of boxes: all coordinates in a row, and where each row's end."""

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
        """float32 [k, 4] for each row: windows onto one array."""
        together = np.array(self.coordinates, np.float32).reshape(-1, 4)
        ends = self.ends
        return [together[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]


@dataclass(frozen=True)
class Table:
    """The columns a data set may have; those that the file lacks are None."""

    file: Path
    lines: array  # where each row begins
    image: list[str]
    label: Words
    mask: list[str] | None
    box: Boxes | None
    split: Words | None
    groups: dict[str, Words]  # `group`, or every column whose name begins with `group_`
    unused: tuple[str, ...]

    def error(self, row: int, message: str) -> UserError:
        return UserError(f"{self.file}:{self.lines[row]}: {message}")

    def check_empty(self) -> None:
        """Every row has an image, a label, and what else the file has a column for; masks and boxes may lack."""
        if "" in self.image:
            raise self.error(self.image.index(""), "no image; give its path, relative to this file")
        advice = {"label": "give its class; `sightline predict` answers without", "split": "write train, val or test"}
        for name, column in {"label": self.label, "split": self.split, **self.groups}.items():
            if column is not None and "" in column.numbers:
                row = column.codes.index(column.numbers[""])
                told = advice.get(name, "where it is not known, write a word for that, such as unknown")
                raise self.error(row, f"no {name}; {told}")


def read_table(file: Path) -> Table:
    found = records(file)
    line, header = next(found, (1, []))
    names = [name.lower() for name in header]
    _check_header(f"{file}:{line}", names)
    group_names = [name for name in names if name == "group" or name.startswith("group_")]
    table = Table(
        file,
        lines=array("q"),
        image=[],
        label=Words(),
        mask=[] if "mask" in names else None,
        box=Boxes() if "box" in names else None,
        split=Words() if "split" in names else None,
        groups={name: Words() for name in group_names},
        unused=tuple(name for name in names if name not in COLUMNS and name not in group_names),
    )
    columns = [table.groups.get(name) or getattr(table, name) for name in names if name not in table.unused]
    places = [place for place, name in enumerate(names) if name not in table.unused]
    filling = [(column.append, place) for column, place in zip(columns, places, strict=True)]
    for line, cells in found:
        if len(cells) != len(names):
            raise UserError(
                f"{file}:{line}: {len(cells)} cells under {len(names)} columns; a cell with a comma in it needs quotes"
            )
        table.lines.append(line)
        try:
            for append, place in filling:
                append(cells[place])
        except ValueError:
            raise UserError(f"{file}:{line}: {cells[names.index('box')]!r} is no box: {BOX}") from None
    if not table.image:
        raise UserError(f"{file}: has no rows; write one per image below the header")
    table.check_empty()
    return table


def in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Sorted; by size where all are numbers."""
    words = sorted(words)
    return tuple(sorted(words, key=int) if all(map(str.isdecimal, words)) else words)


def first_of(images: Sequence[str]) -> np.ndarray:
    """For each row the first row with the same image: itself, unless images are repeated."""
    hashes = np.fromiter(map(hash, images), np.int64, len(images))
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    first = first[which]
    for row in np.flatnonzero(first != np.arange(len(first))):
        if images[row] != images[first[row]]:  # two images, one hash: once in a million data sets of a million
            first[row] = images.index(images[row])
    return first


def records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row's first line and its cells; empty lines are skipped."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader, line = csv.reader(text, strict=True), 1
            try:
                for cells in reader:
                    if cells:
                        yield line, [cell.strip() for cell in cells]
                    line = reader.line_num + 1
            except csv.Error as error:
                raise UserError(f"{file}:{line}: not readable as CSV ({error}); is a quote not closed?") from None
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
    return 1  # lines that only break when joined: not text at all


def _check_header(where: str, names: list[str]) -> None:
    expected = "expected a header such as image,label,group,mask,box,split, of which image and label are a must"
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        mark = ";" if ";" in names[0] else "tabs"
        raise UserError(f"{where}: the cells are separated by {mark}; save it with commas")
    for name in ("image", "label"):
        if name not in names:
            raise UserError(f"{where}: no column {name!r} among {', '.join(names) or 'nothing'}; {expected}")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two columns are named {twice[0]!r}; rename one")
    if "group" in names and any(name.startswith("group_") for name in names):
        raise UserError(f"{where}: has group and group_… columns; keep one kind, several group_… make groups together")
