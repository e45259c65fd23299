"""A data set is rows: one per image, with a label, and perhaps a group, a mask, boxes and a split.

    rows = read_rows("photos")                       # photos/cat/1.jpg, or photos/train/cat/1.jpg
    rows = read_rows("photos/rows.csv")              # columns image, label; perhaps group, mask, box, split
    rows = read_rows("CUB_200_2011", layout="cub")   # as published, perhaps with an option (imagenet9:mixed_rand)

What had to be decided while reading is said in `rows.notes`.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..errors import UserError
from .fingerprints import fingerprint as fingerprint
from .layouts import LAYOUTS as LAYOUTS
from .layouts import reader_of
from .table import Table, Words, first_of, read_table

SPLITS = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)
SPLIT_WORDS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
SHARE = 0.15  # of the rows, for each split that has to be made


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns over n images; a million rows are cheap.

    Paths are relative to `root`. A path may lead into an archive: `birds.zip/images/1.webp`.
    Groups are the combinations of label and attributes that occur, numbered in the order of `group_names`,
    and named `label/attribute` (`landbird/water`).
    """

    name: str
    root: Path
    images: list[str]
    labels: np.ndarray  # int64 [n], into `classes`
    classes: tuple[str, ...]
    splits: np.ndarray  # int8 [n], into SPLITS
    groups: np.ndarray | None = None  # int64 [n], into `group_names`
    group_names: tuple[str, ...] = ()
    masks: list[str] | None = None  # paths; "" where an image has none
    boxes: list[np.ndarray] | None = None  # per image float32 [k, 4]: left, top, right, bottom in pixels of the file
    keypoints: np.ndarray | None = None  # float32 [n, K, 3]: x, y in pixels of the file, visible 0/1
    keypoint_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what was decided while reading, for the user to know
    table: Path | None = None  # the CSV file that lists the images, if one does,
    lines: np.ndarray | None = None  # int64 [n]: and where in it

    def __post_init__(self):
        for column in (self.labels, self.splits, self.groups, self.masks, self.boxes, self.keypoints, self.lines):
            assert column is None or len(column) == len(self.images), "the columns of Rows differ in length"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def cells(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """The finest division there is: groups and their names, or without groups labels and classes."""
        return (self.labels, self.classes) if self.groups is None else (self.groups, self.group_names)

    def where(self, split: str) -> np.ndarray:
        """The rows of a split."""
        return np.flatnonzero(self.splits == SPLITS.index(split))

    def take(self, indices: np.ndarray | Sequence[int]) -> Rows:
        """These rows, in this order; classes and group names stay as they are."""
        at = np.asarray(indices)
        at = (np.flatnonzero(at) if at.dtype == bool else at).astype(np.int64)
        return replace(
            self,
            images=[self.images[i] for i in at],
            labels=self.labels[at],
            splits=self.splits[at],
            groups=None if self.groups is None else self.groups[at],
            masks=None if self.masks is None else [self.masks[i] for i in at],
            boxes=None if self.boxes is None else [self.boxes[i] for i in at],
            keypoints=None if self.keypoints is None else self.keypoints[at],
            lines=None if self.lines is None else self.lines[at],
        )

    def image_path(self, i: int) -> Path:
        return self.root / self.images[i]

    def place(self, i: int) -> str:
        """Where row `i` was read, for complaints: file and line, or the folder."""
        return str(self.root) if self.lines is None else f"{self.table}:{self.lines[i]}"


def read_rows(path: Path | str, *, layout: str | None = None, seed: int = 0, whole: bool = False) -> Rows:
    """A CSV file, a folder with `rows.csv`, class folders with or without splits, or a published layout.

    Rows that come without splits are divided; with `whole` they are all for testing, by a model trained elsewhere.
    """
    path = Path(path).expanduser()
    read = None if layout is None else reader_of(layout)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if read is not None:
        return complete_splits(read(path), seed=seed)
    if path.suffix.lower() == ".csv" or (path / "rows.csv").is_file():
        return read_csv(path, seed=seed, whole=whole)
    if not path.is_dir():
        raise UserError(f"{path}: neither a .csv file nor a folder; a published data set needs its layout named")
    return read_folder(path, seed=seed, whole=whole)


def group_table(rows: Rows) -> np.ndarray:
    """int64 [splits, cells]: how many rows each split has of each group (of each class where there are no groups)."""
    numbers, names = rows.cells
    flat = np.bincount(rows.splits * np.int64(len(names)) + numbers, minlength=len(SPLITS) * len(names))
    return flat.reshape(len(SPLITS), len(names))


def name_groups(
    labels: np.ndarray, classes: Sequence[str], attributes: np.ndarray, values: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """`groups` and `group_names`: the combinations of label and attribute that occur, `label/attribute`.

    Values that all begin with their label already (`landbird/water`) stay as they are.
    """
    pairs, groups = np.unique(labels * np.int64(len(values)) + attributes, return_inverse=True)
    named = [(classes[pair // len(values)], values[pair % len(values)]) for pair in pairs]
    if all(value.startswith(f"{label}/") for label, value in named):
        return groups, tuple(value for _, value in named)
    return groups, tuple(f"{label}/{value}" for label, value in named)


def attribute_of(group_name: str, label: str) -> str:
    """What a group's name says besides the label."""
    return group_name.removeprefix(f"{label}/")


# ---- class folders ---------------------------------------------------------------------------------------------------

EXPECTED = "expected class folders (DATA/cat/1.jpg), train, val and test folders of them, or rows.csv"


def read_folder(path: Path | str, *, seed: int = 0, whole: bool = False) -> Rows:
    """`DATA/cat/1.jpg`, or `DATA/train/cat/1.jpg` with train, val (valid, validation) and test; classes sorted."""
    root = Path(path)
    folders, loose = _scan(root)
    words = [name for name in folders if name.lower() in SPLIT_WORDS]
    if words and len(words) < len(folders):
        others = ", ".join(name for name in folders if name not in words)
        raise UserError(f"{root}: has {', '.join(words)} beside {others}; {EXPECTED}, not both")
    if len({SPLIT_WORDS[word.lower()] for word in words}) < len(words):
        raise UserError(f"{root}: {', '.join(words)} name the same split twice; keep one folder for each")
    if {"images", "masks"} <= set(folders):
        raise UserError(f"{root}: images and masks are no classes; list both in rows.csv (columns image, label, mask)")
    notes = [f"pictures beside the folders, left out: {len(loose):,} ({loose[0]} …)"] if loose else []
    images, names, splits = [], Words(), array("b")
    for word in words or [""]:
        for name, files in _class_folders(root, word, notes):
            for file in files:
                images.append(f"{word}/{name}/{file}" if word else f"{name}/{file}")
                names.append(name)
                splits.append(SPLIT_WORDS[word.lower()] if word else TRAIN)
    if not images:
        tables = [file.name for file in sorted(root.glob("*.csv"))]
        hint = f"; to read {tables[0]}, give the file itself" if tables else ""
        found = f"no pictures (folders: {_few(folders) or '–'})"
        found = f"pictures, but no folders ({_few(loose)})" if loose else found
        raise UserError(f"{root}: found {found}; {EXPECTED}{hint}")
    classes, labels = names.sorted()
    rows = Rows(root.resolve().name, root, images, labels, classes, np.array(splits, np.int8), notes=tuple(notes))
    return complete_splits(rows, seed=seed) if words else make_splits(rows, seed=seed, whole=whole)


def _class_folders(root: Path, split: str, notes: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each class folder with its pictures."""
    here = root / split
    folders, loose = _scan(here) if split else (_scan(here)[0], [])
    if loose:
        raise UserError(f"{here}: pictures beside the class folders ({len(loose):,}); put each into one")
    for name in folders:
        inner, files = _scan(here / name)
        if inner and not files:
            raise UserError(f"{here / name}: holds folders ({_few(inner)}), not pictures; {EXPECTED}")
        if inner:
            notes.append(f"{Path(split, name)}: folders inside a class folder are left out ({_few(inner)})")
        if not files:
            notes.append(f"{Path(split, name)}: no pictures, left out")
        else:
            yield name, files


def _scan(folder: Path) -> tuple[list[str], list[str]]:
    """The folders and the pictures in a folder, sorted; hidden ones are not seen."""
    from .formats import is_image

    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "__MACOSX")):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif is_image(entry.path):
                files.append(entry.name)
    for name in folders + files:
        if not _is_text(name):
            raise UserError(f"{folder}: the name {name!r} is not UTF-8; rename it")
    return sorted(folders), sorted(files)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- CSV -------------------------------------------------------------------------------------------------------------


def read_csv(path: Path | str, *, seed: int = 0, whole: bool = False) -> Rows:
    """A CSV file, or the folder with its `rows.csv`; paths in it are relative to its folder."""
    path = Path(path)
    file = path / "rows.csv" if path.is_dir() else path
    table = read_table(file)
    classes, labels = table.label.sorted()
    groups, group_names = _groups(table, labels, classes)
    first = first_of(table.image)
    _refuse_two_answers(table, first, labels, classes)
    if groups is not None:
        _refuse_two_answers(table, first, groups, group_names)
    notes = []
    if unused := [name for name in table.unused if name]:
        notes.append(f"columns that are not used: {_few(unused)}")
    if repeated := int((first != np.arange(len(first))).sum()):
        notes.append(f"rows that repeat an image of an earlier row: {repeated:,}")
    rows = Rows(
        name=(file.resolve().parent.name if file.name == "rows.csv" else file.stem),
        root=file.parent,
        images=table.image,
        labels=labels,
        classes=classes,
        splits=np.full(len(labels), TRAIN, np.int8) if table.split is None else _split_column(table, table.split),
        groups=groups,
        group_names=group_names,
        masks=table.mask,
        boxes=None if table.box is None else table.box.arrays(),
        notes=tuple(notes),
        table=file,
        lines=np.array(table.lines, np.int64),
    )
    return complete_splits(rows, seed=seed) if table.split is not None else make_splits(rows, seed=seed, whole=whole)


def write_csv(rows: Rows, path: Path | str) -> None:
    """What `read_csv` reads back as the same rows, with classes and groups in sorted order; key points are left out."""
    path = Path(path)
    folder = os.path.relpath(rows.root, path.parent)
    columns = {
        "image": [_joined(folder, image) for image in rows.images],
        "label": [rows.classes[label] for label in rows.labels],
        "split": [SPLITS[split] for split in rows.splits],
    }
    if rows.groups is not None:
        named = zip(rows.groups, columns["label"], strict=True)
        columns["group"] = [attribute_of(rows.group_names[group], label) for group, label in named]
    if rows.masks is not None:
        columns["mask"] = [_joined(folder, mask) for mask in rows.masks]
    if rows.boxes is not None:
        columns["box"] = [";".join(" ".join(f"{number:.9g}" for number in box) for box in some) for some in rows.boxes]
    try:
        with path.open("w", newline="", encoding="utf-8") as text:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _joined(folder: str, path: str) -> str:
    return path if folder == "." or not path else Path(folder, path).as_posix()


def _groups(table: Table, labels: np.ndarray, classes: Sequence[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The group columns together, crossed with the label."""
    if not table.groups:
        return None, ()
    (values, attributes), *others = (column.sorted() for column in table.groups.values())
    for words, codes in others:
        pairs, attributes = np.unique(attributes * len(words) + codes, return_inverse=True)
        values = tuple(f"{values[pair // len(words)]}/{words[pair % len(words)]}" for pair in pairs)
    return name_groups(labels, classes, attributes, values)


def _refuse_two_answers(table: Table, first: np.ndarray, numbers: np.ndarray, names: Sequence[str]) -> None:
    differing = np.flatnonzero(numbers != numbers[first])
    if len(differing):
        row = int(differing[0])
        here, there = names[numbers[row]], names[numbers[first[row]]]
        earlier = table.lines[first[row]]
        raise table.error(row, f"{table.image[row]} is {here!r} here and {there!r} on line {earlier}; keep one of them")


def _split_column(table: Table, column: Words) -> np.ndarray:
    for word, number in column.numbers.items():
        if word.lower() not in SPLIT_WORDS:
            raise table.error(column.codes.index(number), f"{word!r} is no split; write train, val or test")
    known = np.array([SPLIT_WORDS[word.lower()] for word in column.numbers], np.int8)
    return known[np.frombuffer(column.codes, np.int64)]


# ---- splits ----------------------------------------------------------------------------------------------------------


def make_splits(rows: Rows, *, seed: int, whole: bool = False) -> Rows:
    """70 % train, 15 % val, 15 % test, stratified, for rows that came without splits; or all test."""
    if whole:
        return _noted(replace(rows, splits=np.full(len(rows), TEST, np.int8)), "no splits: all rows are for testing")
    rows = _set_aside(rows, TEST, SHARE, seed)
    rows = _set_aside(rows, VAL, SHARE / (1 - SHARE), seed)
    sizes = ", ".join(f"{(rows.splits == number).sum():,} {split}" for number, split in enumerate(SPLITS))
    return _noted(rows, f"no splits: divided 70 : 15 : 15 ({sizes}), {_how(rows, seed)}")


def complete_splits(rows: Rows, *, seed: int) -> Rows:
    """Where there is a train split but no val: a stratified 15 % of train becomes val. Nothing stands in for test."""
    present = set(np.unique(rows.splits).tolist())
    if TRAIN not in present:
        return _noted(rows, "no train split: for evaluation only")
    if VAL not in present:
        before = len(rows.where("train"))
        rows = _set_aside(rows, VAL, SHARE, seed)
        moved = before - len(rows.where("train"))
        rows = _noted(rows, f"no val split: {moved:,} of the {before:,} rows of train became val, {_how(rows, seed)}")
    if TEST not in present:
        rows = _noted(rows, "no test split: the numbers on val also chose the model, so they flatter it")
    return rows


def _set_aside(rows: Rows, split: int, share: float, seed: int) -> Rows:
    """Move a share of train to another split; rows of one image stay together, a class of two has one in each."""
    train = rows.where("train")
    first = first_of([rows.images[row] for row in train])
    units = train[np.unique(first)]
    keys = rows.labels if rows.groups is None else rows.labels * np.int64(len(rows.group_names)) + rows.groups
    strata, stratum, sizes = np.unique(keys[units], return_inverse=True, return_counts=True)
    quota = np.floor(share * sizes + 0.5).astype(np.int64)
    label_of = strata if rows.groups is None else strata // len(rows.group_names)
    for label in np.unique(label_of):
        own = np.flatnonzero(label_of == label)
        if quota[own].sum() == 0 and sizes[own].sum() >= 2:
            quota[own[sizes[own].argmax()]] = 1
    order = np.random.default_rng((seed, split)).permutation(len(units))
    order = order[np.argsort(stratum[order], kind="stable")]
    rank = np.arange(len(units)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = np.zeros(len(rows), bool)
    moved[units[order[rank < np.repeat(quota, sizes)]]] = True
    splits = rows.splits.copy()
    splits[train[moved[train[first]]]] = split
    return replace(rows, splits=splits)


def _how(rows: Rows, seed: int) -> str:
    return f"stratified by {'label' if rows.groups is None else 'label and group'}, seed {seed}"


def _noted(rows: Rows, note: str) -> Rows:
    return replace(rows, notes=(*rows.notes, note))
