"""CUB-200-2011 birds: species, masks, boxes and key points; and what every published layout is read with."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.rows import TEST, TRAIN, Rows
from ..errors import UserError

WATERBIRDS = "waterbird_complete95_forest2water2"
TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")
PARTS = ("parts/parts.txt", "parts/part_locs.txt")
NO_VAL = "no validation split is published"


@dataclass(frozen=True)
class Birds:
    """CUB's tables, one row per photograph in the order of images.txt."""

    root: Path
    ids: list[int]
    names: list[str]  # 001.Black_footed_Albatross/Black_Footed_Albatross_0001_796111.jpg
    labels: np.ndarray
    classes: tuple[str, ...]
    splits: np.ndarray
    boxes: np.ndarray  # float32 [n, 4]: left, top, right, bottom
    keypoints: np.ndarray  # float32 [n, K, 3]
    keypoint_names: tuple[str, ...]

    @property
    def masks(self) -> list[str] | None:
        """The segmentation of each, relative to CUB's folder; None where that download is not there."""
        if not (self.root / "segmentations").is_dir():
            return None
        paths = [f"segmentations/{name.rpartition('.')[0]}.png" for name in self.names]
        return [path if there else "" for path, there in zip(paths, present(self.root, paths), strict=True)]


def read_cub(root: Path) -> Rows:
    """200 species with the official train and test split."""
    folder = locate(root, "CUB-200-2011", (*TABLES, *PARTS, "images"), inside=("CUB_200_2011",))
    return _species("cub", read_birds(folder), "images", ())


def read_waterbird200(root: Path) -> Rows:
    """CUB's species and split on the pictures of Waterbirds: the same birds on other backgrounds."""
    root = root.resolve().parent if root.resolve().name == WATERBIRDS else root
    needs = (*TABLES, *PARTS, f"{WATERBIRDS}/metadata.csv")
    folder = locate(root, "Waterbird200 (CUB-200-2011 with Waterbirds in it)", needs, inside=("CUB_200_2011",))
    note = "the papers train on CUB itself and use only the test split of these pictures"
    return _species("waterbird200", read_birds(folder), WATERBIRDS, (note,))


def read_birds(folder: Path) -> Birds:
    names = _names(folder / "images.txt")
    ids = list(names)
    species = _by_id(folder, "image_class_labels.txt", ids, 2)[:, 1].astype(np.int64)
    trains = _by_id(folder, "train_test_split.txt", ids, 2)[:, 1]
    boxes = _by_id(folder, "bounding_boxes.txt", ids, 5)[:, 1:]
    numbers, labels = np.unique(species, return_inverse=True)
    title = {int(number): name.partition("/")[0] for number, name in zip(species, names.values(), strict=True)}
    part_names = _names(folder / "parts/parts.txt")
    return Birds(
        root=folder,
        ids=ids,
        names=list(names.values()),
        labels=labels.astype(np.int64),
        classes=tuple(title[int(number)].partition(".")[2].replace("_", " ") for number in numbers),
        splits=np.where(trains == 1, TRAIN, TEST).astype(np.int8),
        boxes=np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).astype(np.float32),
        keypoints=_keypoints(folder / "parts/part_locs.txt", ids, list(part_names)),
        keypoint_names=tuple(part_names.values()),
    )


def _species(name: str, birds: Birds, pictures: str, notes: tuple[str, ...]) -> Rows:
    images = [f"{pictures}/{bird}" for bird in birds.names]
    check_missing(birds.root, images, birds.root / "images.txt", range(1, len(images) + 1))
    masks = birds.masks
    told = "no masks: there is no segmentations folder" if masks is None else "a mask's pixel counts from half on"
    return Rows(
        name,
        birds.root,
        images,
        birds.labels,
        birds.classes,
        birds.splits,
        masks=masks,
        boxes=list(birds.boxes[:, None]),
        keypoints=birds.keypoints,
        keypoint_names=birds.keypoint_names,
        notes=(NO_VAL, told, *notes),
    )


def _names(path: Path) -> dict[int, str]:
    """Lines of a number and a name."""
    names: dict[int, str] = {}
    for line, text in enumerate(_lines(path), start=1):
        number, _, name = text.partition(" ")
        if not number.isdecimal() or not name.strip() or int(number) in names:
            raise UserError(f"{path}:{line}: expected a new number and a name, found {text[:60]!r}")
        names[int(number)] = name.strip()
    if not names:
        raise UserError(f"{path}: is empty")
    return names


def _numbers(path: Path, columns: int) -> np.ndarray:
    """Lines of that many numbers, float64 [n, columns]."""
    rows = []
    for line, text in enumerate(_lines(path), start=1):
        try:
            row = [float(word) for word in text.split()]
        except ValueError:
            row = []
        if len(row) != columns:
            raise UserError(f"{path}:{line}: expected {columns} numbers, found {text[:60]!r}")
        rows.append(row)
    return np.array(rows).reshape(-1, columns)


def _by_id(folder: Path, table: str, ids: list[int], columns: int) -> np.ndarray:
    """A table's rows in the order of `ids`; its first column is the id."""
    numbers = _numbers(folder / table, columns)
    row_of = {int(number): row for row, number in enumerate(numbers[:, 0])}
    for line, number in enumerate(ids, start=1):
        if number not in row_of:
            raise UserError(f"{folder / table}: nothing on image {number} of {folder / 'images.txt'}:{line}")
    return numbers[[row_of[number] for number in ids]]


def _keypoints(path: Path, ids: list[int], parts: list[int]) -> np.ndarray:
    """float32 [n, K, 3]; what the table does not mention is not visible."""
    numbers = _numbers(path, 5)
    image_of, part_of = ({number: place for place, number in enumerate(order)} for order in (ids, parts))
    keypoints = np.zeros((len(ids), len(parts), 3), np.float32)
    for line, (image, part, *point) in enumerate(numbers, start=1):
        if int(image) not in image_of or int(part) not in part_of:
            raise UserError(f"{path}:{line}: image {image:g} or part {part:g} is in no table")
        keypoints[image_of[int(image)], part_of[int(part)]] = point
    return keypoints


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


# ---- for every published layout --------------------------------------------------------------------------------------


def locate(root: Path, layout: str, needs: Sequence[str], inside: Sequence[str] = ()) -> Path:
    """`root`, or the folder of one of these names inside it: whichever holds all it needs."""
    for folder in (root, *(root / name for name in inside)):
        if all((folder / need).exists() for need in needs):
            return folder
    lacking = next(need for need in needs if not (root / need).exists())
    raise wrong_folder(root, layout, f"{', '.join(needs)}, but there is no {lacking}")


def wrong_folder(folder: Path, layout: str, expected: str) -> UserError:
    """What was expected of a folder, and the first few things that are in it."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return UserError(f"{folder}: cannot be read as {layout} ({error.strerror}); expected {expected}")
    found = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    return UserError(f"{folder}: not {layout}: expected {expected}; found {found or 'nothing'}")


def read_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each line number of a CSV file with its cells in these columns."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            header = [name.strip() for name in next(reader, [])]
            for name in columns:
                if name not in header:
                    raise UserError(f"{file}:1: no column {name!r} among {', '.join(header[:8]) or 'nothing'}")
            places = [header.index(name) for name in columns]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) < len(header):
                    raise UserError(f"{file}:{reader.line_num}: {len(cells)} cells under {len(header)} columns")
                yield reader.line_num, [cells[place].strip() for place in places]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: not readable as CSV ({error})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def choice(where: str, column: str, cell: str, allowed: dict[str, int]) -> int:
    """A cell that can only be one of a few."""
    if cell not in allowed:
        raise UserError(f"{where}: {column} is {cell!r}; it can only be {', '.join(allowed)}")
    return allowed[cell]


def present(root: Path, paths: Sequence[str]) -> list[bool]:
    """Whether each file is there; every folder is listed once, which is quicker than asking file by file."""
    listed: dict[str, set[str]] = {}
    found = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in listed:
            try:
                listed[folder] = {entry.name for entry in os.scandir(root / folder)}
            except OSError:
                listed[folder] = set()
        found.append(name in listed[folder])
    return found


def save_mask(mask: np.ndarray, file: Path) -> None:
    """bool [h, w] as a 1-bit PNG."""
    from PIL import Image

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from None


def check_missing(root: Path, paths: Sequence[str], table: Path, lines: Sequence[int]) -> None:
    """An error with file and line for the first file that a table lists and that is not there."""
    lacking = [row for row, there in enumerate(present(root, paths)) if not there]
    if lacking:
        others = f" ({len(lacking) - 1:,} others are missing too)" if len(lacking) > 1 else ""
        path = root / paths[lacking[0]]
        raise UserError(f"{table}:{lines[lacking[0]]}: {path} is listed, but not there{others}; restore it")


@dataclass(frozen=True)
class Folder:
    """A folder under the root whose pictures (or only those in `names`) share label, split and attribute."""

    path: str
    label: int
    split: int
    attribute: str = ""
    names: tuple[str, ...] | None = None


def rows_of_folders(
    name: str,
    root: Path,
    classes: tuple[str, ...],
    folders: Iterable[Folder],
    notes: Sequence[str] = (),
    suffixes: Iterable[str] | None = None,
) -> Rows:
    """The pictures in these folders; groups are named `label/attribute` where folders have attributes."""
    images, labels, splits, cells = [], [], [], []
    for folder in folders:
        names = pictures(root / folder.path, suffixes) if folder.names is None else folder.names
        images += [f"{folder.path}/{file}" for file in names]
        labels += [folder.label] * len(names)
        splits += [folder.split] * len(names)
        cells += [(folder.label, folder.attribute)] * len(names)
    if not images:
        raise UserError(f"{root}: laid out as {name}, but there are no pictures in its folders")
    order = {cell: place for place, cell in enumerate(sorted(set(cells)))}
    grouped = any(attribute for _, attribute in order)
    return Rows(
        name,
        root,
        images,
        np.array(labels, np.int64),
        classes,
        np.array(splits, np.int8),
        groups=np.array([order[cell] for cell in cells], np.int64) if grouped else None,
        group_names=tuple(f"{classes[label]}/{attribute}" for label, attribute in order) if grouped else (),
        notes=tuple(notes),
    )


def pictures(folder: Path, suffixes: Iterable[str] | None = None) -> tuple[str, ...]:
    """The names of the pictures in a folder, sorted; hidden files are not seen."""
    if suffixes is None:
        from ..data.formats import SUFFIXES as suffixes
    endings = tuple(suffixes)
    return tuple(name for name in _entries(folder, folders=False) if name.lower().endswith(endings))


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, sorted; hidden ones are not seen."""
    return _entries(folder, folders=True)


def _entries(folder: Path, *, folders: bool) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == folders))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
