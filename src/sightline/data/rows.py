"""A dataset as rows: one per image, with a label and optionally a group, a mask, boxes and a split.

    rows = read_rows("photos")                       # photos/cat/1.jpg, or photos/train/cat/1.jpg
    rows = read_rows("photos/rows.csv")              # columns image, label; optionally group, mask, box, split
    rows = read_rows("CUB_200_2011", layout="cub")   # a published layout, optionally NAME:VARIANT

Decisions made while reading, such as a validation split taken from train, are in `rows.notes`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..console.files import protect
from ..errors import UserError
from .fingerprints import fingerprint as fingerprint
from .formats import is_image
from .layouts import LAYOUTS as LAYOUTS
from .layouts import layout_reader
from .table import CategoryColumn, Table, first_occurrence, read_table

SPLITS = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)
SPLIT_NAMES = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
HELD_OUT = 0.15  # fraction of the rows in each split that has to be made
CARVED = 0.05  # fraction of train that takes the place of the validation split on request


@dataclass(frozen=True, eq=False)
class Rows:
    """The columns of a dataset of n images.

    Paths are relative to `root`. A path may point into an archive: `birds.zip/images/1.webp`.
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
    notes: tuple[str, ...] = field(default=())  # decisions made while reading, to be shown to the user
    table: Path | None = None  # the CSV file that lists the images, if any
    lines: np.ndarray | None = None  # int64 [n]: line of each row in it

    def __post_init__(self):
        for column in (self.labels, self.splits, self.groups, self.masks, self.boxes, self.keypoints, self.lines):
            assert column is None or len(column) == len(self.images), "the columns of Rows differ in length"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def cells(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """The finest division: groups and their names, or labels and classes where there are no groups."""
        return (self.labels, self.classes) if self.groups is None else (self.groups, self.group_names)

    def split_indices(self, split: str) -> np.ndarray:
        """The indices of the rows of a split."""
        return np.flatnonzero(self.splits == SPLITS.index(split))

    def take(self, indices: np.ndarray | Sequence[int]) -> Rows:
        """These rows, in this order; classes and group names are unchanged."""
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

    def location(self, i: int) -> str:
        """Where row `i` comes from, for error messages: file and line, or the folder."""
        return str(self.root) if self.lines is None else f"{self.table}:{self.lines[i]}"


def read_rows(path: Path | str, *, layout: str | None = None, seed: int = 0, all_test: bool = False) -> Rows:
    """A CSV file, a folder with `rows.csv`, class folders with or without splits, or a published layout.

    Rows without splits are divided; with `all_test` they all become test rows, for a model trained elsewhere.
    """
    rows = _read(Path(path).expanduser(), layout, seed, all_test)
    for column in (rows.images, rows.masks or ()):
        protect(lambda column=column: (rows.root / name for name in column if name), "an image or mask of the data")
    protect([rows.table] if rows.table else [], "the table of the data")
    return rows


def _read(path: Path, layout: str | None, seed: int, all_test: bool) -> Rows:
    read = None if layout is None else layout_reader(layout)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if read is not None:
        return complete_splits(read(path), seed=seed)
    if path.suffix.lower() == ".csv" or (path / "rows.csv").is_file():
        return read_csv(path, seed=seed, all_test=all_test)
    if not path.is_dir():
        raise UserError(f"{path}: neither a .csv file nor a folder; for a published dataset give its --layout")
    return read_folder(path, seed=seed, all_test=all_test)


def group_table(rows: Rows) -> np.ndarray:
    """int64 [splits, cells]: rows per split and group (per class where there are no groups)."""
    cells, names = rows.cells
    flat = np.bincount(rows.splits * np.int64(len(names)) + cells, minlength=len(SPLITS) * len(names))
    return flat.reshape(len(SPLITS), len(names))


def name_groups(
    labels: np.ndarray, classes: Sequence[str], attributes: np.ndarray, values: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """`groups` and `group_names`: the combinations of label and attribute that occur, `label/attribute`.

    Values that all begin with their label already (`landbird/water`) are kept unchanged.
    """
    pairs, groups = np.unique(labels * np.int64(len(values)) + attributes, return_inverse=True)
    named = [(classes[pair // len(values)], values[pair % len(values)]) for pair in pairs]
    if all(value.startswith(f"{label}/") for label, value in named):
        return groups, tuple(value for _, value in named)
    return groups, tuple(f"{label}/{value}" for label, value in named)


def attribute_of(group_name: str, label: str) -> str:
    """The attribute in a group's name: the part after the label."""
    return group_name.removeprefix(f"{label}/")


# ---- class folders ---------------------------------------------------------------------------------------------------

EXPECTED = "expected class folders (DATA/cat/1.jpg), train, val and test folders of them, or rows.csv"


def read_folder(path: Path | str, *, seed: int = 0, all_test: bool = False) -> Rows:
    """`DATA/cat/1.jpg`, or `DATA/train/cat/1.jpg` with train, val (valid, validation) and test; classes sorted."""
    root = Path(path)
    folders, loose = scan_folder(root)
    split_folders = [name for name in folders if name.lower() in SPLIT_NAMES]
    if split_folders and len(split_folders) < len(folders):
        others = ", ".join(name for name in folders if name not in split_folders)
        raise UserError(f"{root}: has {', '.join(split_folders)} beside {others}; {EXPECTED}, not both")
    if len({SPLIT_NAMES[name.lower()] for name in split_folders}) < len(split_folders):
        raise UserError(f"{root}: {', '.join(split_folders)} name the same split twice; keep one folder per split")
    if {"images", "masks"} <= set(folders):
        raise UserError(f"{root}: images and masks are not classes; list both in rows.csv (columns image, label, mask)")
    notes = [f"images outside class folders, ignored: {len(loose):,} ({loose[0]} …)"] if loose else []
    images, labels, splits = [], CategoryColumn(), array("b")
    for split in split_folders or [""]:
        for name, files in _class_folders(root, split, notes):
            for file in files:
                images.append(f"{split}/{name}/{file}" if split else f"{name}/{file}")
                labels.append(name)
                splits.append(SPLIT_NAMES[split.lower()] if split else TRAIN)
    if not images:
        tables = [file.name for file in sorted(root.glob("*.csv"))]
        hint = f"; to read {tables[0]}, give the file itself" if tables else ""
        found = f"no images (folders: {_abbreviate(folders) or '–'})"
        found = f"images, but no class folders ({_abbreviate(loose)})" if loose else found
        raise UserError(f"{root}: found {found}; {EXPECTED}{hint}")
    classes, codes = labels.sorted()
    rows = Rows(root.resolve().name, root, images, codes, classes, np.array(splits, np.int8), notes=tuple(notes))
    return complete_splits(rows, seed=seed) if split_folders else make_splits(rows, seed=seed, all_test=all_test)


def _class_folders(root: Path, split: str, notes: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each class folder with its images."""
    parent = root / split
    folders, loose = scan_folder(parent) if split else (scan_folder(parent)[0], [])
    if loose:
        raise UserError(f"{parent}: {len(loose):,} images outside class folders ({loose[0]} …); move them into one")
    for name in folders:
        inner, files = scan_folder(parent / name)
        if inner and not files:
            raise UserError(f"{parent / name}: contains folders ({_abbreviate(inner)}), no images; {EXPECTED}")
        if inner:
            notes.append(f"{Path(split, name)}: folders inside a class folder, ignored ({_abbreviate(inner)})")
        if not files:
            notes.append(f"{Path(split, name)}: no images, ignored")
        else:
            yield name, files


def scan_folder(folder: Path) -> tuple[list[str], list[str]]:
    """The folders and the images in a folder, sorted; hidden ones are ignored."""
    folders, files = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "__MACOSX")):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif is_image(entry.path):
                    files.append(entry.name)
    except NotADirectoryError:
        raise UserError(f"{folder}: neither a .csv file nor a folder of images") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error
    for name in folders + files:
        if not _is_utf8(name):
            raise UserError(f"{folder}: the name {name!r} is not UTF-8; rename it")
    return sorted(folders), sorted(files)


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- CSV -------------------------------------------------------------------------------------------------------------


def read_csv(path: Path | str, *, seed: int = 0, all_test: bool = False) -> Rows:
    """A CSV file, or the folder with its `rows.csv`; paths in it are relative to its folder."""
    path = Path(path)
    file = path / "rows.csv" if path.is_dir() else path
    table = read_table(file)
    classes, labels = table.label.sorted()
    groups, group_names = _groups(table, labels, classes)
    first = first_occurrence(table.image)
    _check_consistent(table, first, labels, classes)
    if groups is not None:
        _check_consistent(table, first, groups, group_names)
    notes = []
    if unused := [name for name in table.unused if name]:
        notes.append(f"unused columns: {_abbreviate(unused)}")
    if repeated := int((first != np.arange(len(first))).sum()):
        notes.append(f"repeated images: {repeated:,} rows list an image again")
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
    return (
        complete_splits(rows, seed=seed) if table.split is not None else make_splits(rows, seed=seed, all_test=all_test)
    )


def _groups(table: Table, labels: np.ndarray, classes: Sequence[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The combination of all group columns with the label."""
    if not table.groups:
        return None, ()
    (values, attributes), *others = (column.sorted() for column in table.groups.values())
    for more, codes in others:
        pairs, attributes = np.unique(attributes * len(more) + codes, return_inverse=True)
        values = tuple(f"{values[pair // len(more)]}/{more[pair % len(more)]}" for pair in pairs)
    return name_groups(labels, classes, attributes, values)


def _check_consistent(table: Table, first: np.ndarray, codes: np.ndarray, names: Sequence[str]) -> None:
    """Rows of the same image must have the same label and group."""
    differing = np.flatnonzero(codes != codes[first])
    if len(differing):
        row = int(differing[0])
        here, earlier, line = names[codes[row]], names[codes[first[row]]], table.lines[first[row]]
        raise table.error(row, f"{table.image[row]} is {here!r} here and {earlier!r} on line {line}; keep one of them")


def _split_column(table: Table, column: CategoryColumn) -> np.ndarray:
    for name, code in column.code_of.items():
        if name.lower() not in SPLIT_NAMES:
            raise table.error(column.codes.index(code), f"unknown split {name!r}; write train, val or test")
    splits = np.array([SPLIT_NAMES[name.lower()] for name in column.code_of], np.int8)
    return splits[np.frombuffer(column.codes, np.int64)]


# ---- splits ----------------------------------------------------------------------------------------------------------


def make_splits(rows: Rows, *, seed: int, all_test: bool = False) -> Rows:
    """Split rows 70 % train, 15 % val, 15 % test, stratified; or all test."""
    if all_test:
        return _with_note(replace(rows, splits=np.full(len(rows), TEST, np.int8)), "no splits: all rows are test rows")
    rows = _move_to_split(rows, TEST, HELD_OUT, seed)
    rows = _move_to_split(rows, VAL, HELD_OUT / (1 - HELD_OUT), seed)
    sizes = ", ".join(f"{(rows.splits == number).sum():,} {split}" for number, split in enumerate(SPLITS))
    return _with_note(rows, f"no splits: divided 70 : 15 : 15 ({sizes}), {_stratification(rows, seed)}")


def complete_splits(rows: Rows, *, seed: int) -> Rows:
    """Without a val split, a stratified 15 % of train becomes val. A missing test split is not replaced."""
    present = set(np.unique(rows.splits).tolist())
    if TRAIN not in present:
        return _with_note(rows, "no train split: evaluation only")
    if VAL not in present:
        before = len(rows.split_indices("train"))
        rows = _move_to_split(rows, VAL, HELD_OUT, seed)
        moved = before - len(rows.split_indices("train"))
        note = f"no val split: {moved:,} of {before:,} train rows moved to val, {_stratification(rows, seed)}"
        rows = _with_note(rows, note)
    if TEST not in present:
        rows = _with_note(rows, "no test split: val also selects the checkpoint, so its numbers are optimistic")
    return rows


def carve_validation(rows: Rows, *, seed: int) -> Rows:
    """Without the validation split; a twentieth of train, stratified by label alone, takes its place."""
    kept = rows.take(rows.splits != VAL)
    moved = _move_to_split(replace(kept, groups=None), VAL, CARVED, seed)
    count, before = int((moved.splits == VAL).sum()), len(kept.split_indices("train"))
    note = f"validation split: {count:,} of {before:,} train rows, stratified by label, seed {seed}; val is not used"
    return _with_note(replace(kept, splits=moved.splits), note)


def _move_to_split(rows: Rows, split: int, fraction: float, seed: int) -> Rows:
    """Move a stratified fraction of train to another split; rows of one image stay together.

    Every class of at least two images gets at least one in the other split.
    """
    train = rows.split_indices("train")
    first = first_occurrence([rows.images[row] for row in train])
    units = train[np.unique(first)]
    keys = rows.labels if rows.groups is None else rows.labels * np.int64(len(rows.group_names)) + rows.groups
    strata, stratum, sizes = np.unique(keys[units], return_inverse=True, return_counts=True)
    quota = np.floor(fraction * sizes + 0.5).astype(np.int64)
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


def _stratification(rows: Rows, seed: int) -> str:
    return f"stratified by {'label' if rows.groups is None else 'label and group'}, seed {seed}"


def _with_note(rows: Rows, note: str) -> Rows:
    return replace(rows, notes=(*rows.notes, note))
