"""Birds to cut out and scenes to put them on: CUB and any folder of scene photographs, unpacked or in zips."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile

from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import UserError

# Matched as substrings, as published: "tern" is also in Eastern Towhee, Western Meadowlark and Western Wood Pewee.
WATERBIRDS = (
    *("albatross", "auklet", "cormorant", "frigatebird", "fulmar", "gull", "jaeger", "kittiwake", "pelican"),
    *("puffin", "tern", "gadwall", "grebe", "mallard", "merganser", "guillemot", "pacific_loon"),
)
PHOTOGRAPHS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
PARTS = {"train": (0, 50), "val": (50, 60), "test": (60, 100)}  # per cent of each scene folder, in sorted order
PACKED = ("id", "path", "split", "x", "y", "w", "h")


@dataclass(frozen=True)
class Files:
    """A folder, or a zip that is read as if it were one."""

    root: Path

    def read(self, name: str) -> bytes:
        try:
            return _archive(self.root).read(name) if self.zipped else (self.root / name).read_bytes()
        except (KeyError, FileNotFoundError):
            raise UserError(f"{self.root / name}: no such file; is {self.root.name} complete?") from None
        except (OSError, BadZipFile) as error:
            raise UserError(f"{self.root / name}: cannot be read ({error})") from error

    def text(self, name: str) -> str:
        return self.read(name).decode("utf-8-sig")

    def image(self, name: str) -> Image.Image:
        data = self.read(name)
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
            return image
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{self.root / name}: a damaged image ({error}); restore it or remove it") from error

    def holds(self, name: str) -> bool:
        if self.zipped:
            return name in _archive(self.root).NameToInfo
        return (self.root / name).is_file()

    @property
    def zipped(self) -> bool:
        return self.root.suffix.lower() == ".zip" and self.root.is_file()


@dataclass(frozen=True)
class Bird:
    """One photograph of CUB."""

    id: int
    name: str  # 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18
    photo: str
    mask: str
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    tested: bool  # in CUB's own test split
    waterbird: bool
    split: str | None = None  # as Waterbirds' label file has it, where there is one
    place: str | None = None

    @property
    def species(self) -> str:
        """001.Black_footed_Albatross"""
        return self.name.split("/")[0]

    @property
    def kind(self) -> str:
        """albatross"""
        return self.species.split("_")[-1].split(".")[-1].lower()


@dataclass(frozen=True, eq=False)
class Birds:
    """The photographs of CUB, with masks."""

    files: Files
    all: tuple[Bird, ...]

    def photo(self, bird: Bird) -> Image.Image:
        """RGB as stored: masks and boxes belong to the pixels, whatever the camera says of their orientation."""
        return self.files.image(bird.photo).convert("RGB")

    def mask(self, bird: Bird) -> Image.Image:
        """One bit per pixel."""
        return self.files.image(bird.mask).convert("L").point(lambda level: 255 * (level >= 128), mode="1")

    @property
    def about(self) -> dict:
        return {"name": self.files.root.stem, "birds": len(self.all), "sha256": _digest(map(repr, self.all))}


@dataclass(frozen=True, eq=False)
class Scenes:
    """Photographs of places, by the folder they lie in."""

    files: Files
    folders: Mapping[str, list[str]]

    def photo(self, name: str) -> Image.Image:
        return ImageOps.exif_transpose(self.files.image(name)).convert("RGB")

    def named(self, name: str) -> list[str]:
        """The folders on whose path these folder names follow each other: `forest` is also `f/forest/broadleaf`."""
        wanted = PurePosixPath(name).parts
        found = [
            folder
            for folder in self.folders
            for parts in [PurePosixPath(folder).parts]
            if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))
        ]
        if not found:
            there = ", ".join(sorted(self.folders)[:12]) + (", …" if len(self.folders) > 12 else "")
            raise UserError(f"{self.files.root}: no scenes named '{name}'; there are {there}")
        return found

    def pool(self, folders: Iterable[str], split: str) -> list[str]:
        """The photographs that only this split may use."""
        pool = []
        for folder in folders:
            photos = sorted(self.folders[folder])
            low, high = (share * len(photos) // 100 for share in PARTS[split])
            if low == high:
                raise UserError(
                    f"{self.files.root / folder}: {len(photos)} scenes leave none for {split}; ten are enough"
                )
            pool += photos[low:high]
        return pool

    @property
    def about(self) -> dict:
        photos = sorted(photo for folder in self.folders.values() for photo in folder)
        return {"name": self.files.root.stem, "scenes": len(photos), "sha256": _digest(photos)}


def read_birds(path: Path) -> Birds:
    """From cub224.zip, from it unpacked, from CUB_200_2011 with its segmentations, or a folder with one of these."""
    for root in (path, path / "cub224", path / "cub224.zip", path / "CUB_200_2011"):
        files = Files(root)
        if not (root.is_dir() or files.zipped):
            continue
        read = _packed if files.holds("cub.csv") else _original if files.holds("images.txt") else None
        if read:
            birds = read(files)
            if len({bird.id for bird in birds}) < max(len(birds), 1):
                wrong = "birds with the same number" if birds else "a list without birds"
                raise UserError(f"{root}: {wrong}; restore it")
            return Birds(files, birds)
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    raise UserError(f"{path}: no birds here; expected cub224.zip, cub.csv, or CUB_200_2011 with its images.txt")


def read_scenes(path: Path) -> Scenes:
    """From scenes.zip, from it unpacked, or from any folder of folders of photographs."""
    for root in (path, path / "scenes", path / "scenes.zip"):
        files = Files(root)
        if (root.is_dir() or files.zipped) and files.holds("scenes.csv"):
            return Scenes(files, _listed(files))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder" if not path.exists() else f"{path}: no scenes.csv in it")
    folders: dict[str, list[str]] = {}
    for photo in sorted(path.rglob("*")):
        if photo.suffix.lower() in PHOTOGRAPHS and photo.parent != path:
            folder = photo.parent.relative_to(path).as_posix()
            folders.setdefault(folder, []).append(f"{folder}/{photo.name}")
    if not folders:
        raise UserError(f"{path}: no scenes here; expected scenes.zip, scenes.csv, or folders of photographs")
    return Scenes(Files(path), folders)


def _packed(files: Files) -> tuple[Bird, ...]:
    return tuple(_packed_bird(row, where) for row, where in _table(files, "cub.csv", PACKED))


def _packed_bird(row: dict[str, str], where: str) -> Bird:
    try:
        x, y, w, h = (float(row[key]) for key in "xywh")
        photo = PurePosixPath(row["path"])
        name = PurePosixPath(*photo.parts[1:]).with_suffix("").as_posix()
        known = row.get("waterbird")
        return Bird(
            id=int(row["id"]),
            name=name,
            photo=str(photo),
            mask=f"masks/{name}.png",
            box=_box(x, y, w, h),
            tested={"train": False, "test": True}[row["split"]],
            waterbird=known == "1" if known in ("0", "1") else is_waterbird(name),
            split=("train", "val", "test")[int(row["wb_split"])] if row.get("wb_split") else None,
            place=("land", "water")[int(row["wb_place"])] if row.get("wb_place") else None,
        )
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{where}: cannot be understood ({error}); restore the file") from error


def _original(files: Files) -> tuple[Bird, ...]:
    root = next((r for r in ("", "../") if (files.root / r / "segmentations").is_dir()), None)
    if root is None:
        raise UserError(f"{files.root}: no segmentations/ in it or beside it; unpack CUB's segmentations.tgz there")
    tested = {key: values == ["0"] for key, values in _columns(files, "train_test_split.txt", 1)}
    boxes = {key: _box(*map(float, values)) for key, values in _columns(files, "bounding_boxes.txt", 4)}
    birds = []
    for key, (path,) in _columns(files, "images.txt", 1):
        if key not in tested or key not in boxes:
            raise UserError(f"{files.root}: image {key} has no split or no box; restore the files of CUB")
        name = PurePosixPath(path).with_suffix("").as_posix()
        mask = f"{root}segmentations/{name}.png"
        if not files.holds(mask):
            raise UserError(f"{files.root / mask}: no such file; the segmentations are not complete")
        birds.append(Bird(int(key), name, f"images/{path}", mask, boxes[key], tested[key], is_waterbird(name)))
    return tuple(birds)


def is_waterbird(name: str) -> bool:
    """By the published rule, which takes the name's folder (its species) and finds terns in Eastern and Western."""
    return any(word in name.split("/")[0].lower() for word in WATERBIRDS)


def _listed(files: Files) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for row, _ in _table(files, "scenes.csv", ("path", "class")):
        folders.setdefault(row["class"], []).append(row["path"])
    return folders


def _table(files: Files, name: str, columns: tuple[str, ...]) -> Iterable[tuple[dict[str, str], str]]:
    """The rows of a CSV file, each with where it stands."""
    reader = csv.DictReader(io.StringIO(files.text(name), newline=""))
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{files.root / name}:1: no column {', '.join(missing)}; restore the file")
    for row in reader:
        yield row, f"{files.root / name}:{reader.line_num}"


def _columns(files: Files, name: str, count: int) -> Iterable[tuple[str, list[str]]]:
    """The lines of one of CUB's text files: a number, and what belongs to it."""
    for number, line in enumerate(files.text(name).splitlines(), start=1):
        key, *values = line.split() or [""]
        if len(values) != count or not key.isdigit():
            what = "a number and " + ("one entry" if count == 1 else f"{count} entries")
            raise UserError(f"{files.root / name}:{number}: expected {what}; restore the file")
        yield key, values


def _box(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
    left, top, right, bottom = (round(edge, 2) for edge in (x, y, x + w, y + h))
    return left, top, right, bottom


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@lru_cache(maxsize=4)
def _archive(path: Path) -> ZipFile:
    try:
        return ZipFile(path)
    except (OSError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it") from error
