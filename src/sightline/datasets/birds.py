"""The material of `sightline data`: CUB's birds with masks, and scene photographs; from folders or zip files."""

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

from ..data.formats import FORMATS, check_size
from ..data.images import read_member
from ..errors import UserError
from .cub import read_by_id, read_names

# Matched as substrings, as published: "tern" is also in Eastern Towhee, Western Meadowlark and Western Wood Pewee.
WATERBIRDS = (
    *("albatross", "auklet", "cormorant", "frigatebird", "fulmar", "gull", "jaeger", "kittiwake", "pelican"),
    *("puffin", "tern", "gadwall", "grebe", "mallard", "merganser", "guillemot", "pacific_loon"),
)
SCENE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
SPLIT_PERCENT = {"train": (0, 50), "val": (50, 60), "test": (60, 100)}  # of each scene folder, in sorted order
PACKED = ("id", "path", "split", "x", "y", "w", "h")


@dataclass(frozen=True)
class Files:
    """A folder, or a zip file that is read as if it were one."""

    root: Path

    def read(self, name: str) -> bytes:
        try:
            if not self.zipped:
                return (self.root / name).read_bytes()
            return read_member(_archive(self.root), name, str(self.root / name))
        except (KeyError, FileNotFoundError):
            raise UserError(f"{self.root / name}: no such file; is {self.root.name} complete?") from None
        except (OSError, BadZipFile) as error:
            raise UserError(f"{self.root / name}: cannot be read ({error})") from error

    def text(self, name: str) -> str:
        return self.read(name).decode("utf-8-sig")

    def image(self, name: str) -> Image.Image:
        data = self.read(name)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.size, str(self.root / name))
            image.load()
            return image
        except UserError:
            raise
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{self.root / name}: damaged image ({error}); restore or remove it") from error

    def contains(self, name: str) -> bool:
        if self.zipped:
            return name in _archive(self.root).NameToInfo
        return (self.root / name).is_file()

    @property
    def zipped(self) -> bool:
        return self.root.suffix.lower() == ".zip" and self.root.is_file()


@dataclass(frozen=True)
class Bird:
    """One image of CUB."""

    id: int
    name: str  # 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18
    photo: str
    mask: str
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    in_test: bool  # in CUB's own test split
    waterbird: bool
    split: str | None = None  # according to Waterbirds' label file, if there is one
    background: str | None = None

    @property
    def species(self) -> str:
        """001.Black_footed_Albatross"""
        return self.name.split("/")[0]

    @property
    def kind(self) -> str:
        """albatross"""
        return self.species.split("_")[-1].split(".")[-1].lower()

    @property
    def fingerprint_line(self) -> str:
        """Hashed into `about.json`. The words stay as they are: others would make every finished dataset look new."""
        return (
            f"Bird(id={self.id!r}, name={self.name!r}, photo={self.photo!r}, mask={self.mask!r}, box={self.box!r}, "
            f"tested={self.in_test!r}, waterbird={self.waterbird!r}, split={self.split!r}, place={self.background!r})"
        )


@dataclass(frozen=True, eq=False)
class Birds:
    """The images of CUB, with masks."""

    files: Files
    all: tuple[Bird, ...]

    def photo(self, bird: Bird) -> Image.Image:
        """RGB as stored, without applying EXIF orientation: masks and boxes refer to the stored pixels."""
        return self.files.image(bird.photo).convert("RGB")

    def mask(self, bird: Bird) -> Image.Image:
        """One bit per pixel."""
        return self.files.image(bird.mask).convert("L").point(lambda level: 255 * (level >= 128), mode="1")

    @property
    def identity(self) -> dict:
        digest = _sha256(bird.fingerprint_line for bird in self.all)
        return {"name": self.files.root.stem, "birds": len(self.all), "sha256": digest}


@dataclass(frozen=True, eq=False)
class Scenes:
    """Scene photographs, by folder."""

    files: Files
    folders: Mapping[str, list[str]]

    def photo(self, name: str) -> Image.Image:
        return ImageOps.exif_transpose(self.files.image(name)).convert("RGB")

    def folders_named(self, name: str) -> list[str]:
        """The folders whose path contains these consecutive folder names: `forest` matches `f/forest/broadleaf`."""
        wanted = PurePosixPath(name).parts
        matching = [
            folder
            for folder in self.folders
            for parts in [PurePosixPath(folder).parts]
            if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))
        ]
        if not matching:
            known = ", ".join(sorted(self.folders)[:12]) + (", …" if len(self.folders) > 12 else "")
            raise UserError(f"{self.files.root}: no scene folder is named '{name}'; the folders are {known}")
        return matching

    def photos_for(self, split: str, folders: Iterable[str]) -> list[str]:
        """The photographs of these folders that only this split may use."""
        photos = []
        for folder in folders:
            names = sorted(self.folders[folder])
            low, high = (percent * len(names) // 100 for percent in SPLIT_PERCENT[split])
            if low == high:
                raise UserError(
                    f"{self.files.root / folder}: {len(names)} scenes are too few, none is left for {split}; "
                    "ten are enough"
                )
            photos += names[low:high]
        return photos

    @property
    def identity(self) -> dict:
        photos = sorted(photo for folder in self.folders.values() for photo in folder)
        return {"name": self.files.root.stem, "scenes": len(photos), "sha256": _sha256(photos)}


def read_birds(path: Path) -> Birds:
    """From cub224.zip, the same unpacked, CUB_200_2011 with its segmentations, or a folder with one of these."""
    for root in (path, path / "cub224", path / "cub224.zip", path / "CUB_200_2011"):
        files = Files(root)
        if not (root.is_dir() or files.zipped):
            continue
        read = _read_packed if files.contains("cub.csv") else _read_cub if files.contains("images.txt") else None
        if read:
            birds = read(files)
            if not birds:
                raise UserError(f"{root}: the list of birds is empty; restore it")
            if len({bird.id for bird in birds}) < len(birds):
                raise UserError(f"{root}: two birds have the same number; restore the list of birds")
            for bird in birds:  # their names become names of files
                if bird.name.startswith("/") or ".." in PurePosixPath(bird.name).parts or "\\" in bird.name:
                    raise UserError(f"{root}: bird {bird.id} is called {bird.name!r}, outside its folder; restore it")
            return Birds(files, birds)
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    raise UserError(f"{path}: no birds found; expected cub224.zip, cub.csv, or CUB_200_2011 with its images.txt")


def read_scenes(path: Path) -> Scenes:
    """From scenes.zip, the same unpacked, or any folder of folders of photographs."""
    for root in (path, path / "scenes", path / "scenes.zip"):
        files = Files(root)
        if (root.is_dir() or files.zipped) and files.contains("scenes.csv"):
            return Scenes(files, _read_scene_list(files))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder" if not path.exists() else f"{path}: no scenes.csv in it")
    folders: dict[str, list[str]] = {}
    for photo in sorted(path.rglob("*")):
        if photo.suffix.lower() in SCENE_SUFFIXES and photo.parent != path:
            folder = photo.parent.relative_to(path).as_posix()
            folders.setdefault(folder, []).append(f"{folder}/{photo.name}")
    if not folders:
        raise UserError(f"{path}: no scenes found; expected scenes.zip, scenes.csv, or folders of photographs")
    return Scenes(Files(path), folders)


def _read_packed(files: Files) -> tuple[Bird, ...]:
    return tuple(_packed_bird(row, location) for row, location in _csv_rows(files, "cub.csv", PACKED))


def _packed_bird(row: dict[str, str], location: str) -> Bird:
    try:
        x, y, w, h = (float(row[key]) for key in "xywh")
        photo = PurePosixPath(row["path"])
        name = PurePosixPath(*photo.parts[1:]).with_suffix("").as_posix()
        waterbird = row.get("waterbird")
        return Bird(
            id=int(row["id"]),
            name=name,
            photo=str(photo),
            mask=f"masks/{name}.png",
            box=_box(x, y, w, h),
            in_test={"train": False, "test": True}[row["split"]],
            waterbird=waterbird == "1" if waterbird in ("0", "1") else is_waterbird(name),
            split=("train", "val", "test")[int(row["wb_split"])] if row.get("wb_split") else None,
            background=("land", "water")[int(row["wb_place"])] if row.get("wb_place") else None,
        )
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{location}: not a valid row ({error}); restore the file") from error


def _read_cub(files: Files) -> tuple[Bird, ...]:
    root = next((r for r in ("", "../") if (files.root / r / "segmentations").is_dir()), None)
    if root is None:
        raise UserError(f"{files.root}: no segmentations/ in it or beside it; unpack CUB's segmentations.tgz there")
    path_of = read_names(files.root / "images.txt")
    in_train = read_by_id(files.root, "train_test_split.txt", list(path_of), 2)[:, 1].tolist()
    boxes = read_by_id(files.root, "bounding_boxes.txt", list(path_of), 5)[:, 1:].tolist()
    birds = []
    for (number, path), train, box in zip(path_of.items(), in_train, boxes, strict=True):
        name = PurePosixPath(path).with_suffix("").as_posix()
        mask = f"{root}segmentations/{name}.png"
        if not files.contains(mask):
            raise UserError(f"{files.root / mask}: no such file; the segmentations are incomplete")
        birds.append(Bird(number, name, f"images/{path}", mask, _box(*box), train == 0, is_waterbird(name)))
    return tuple(birds)


def is_waterbird(name: str) -> bool:
    """The published keyword rule on the species, which takes Eastern and Western birds for terns."""
    return any(word in name.split("/")[0].lower() for word in WATERBIRDS)


def _read_scene_list(files: Files) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for row, _ in _csv_rows(files, "scenes.csv", ("path", "class")):
        folders.setdefault(row["class"], []).append(row["path"])
    return folders


def _csv_rows(files: Files, name: str, columns: tuple[str, ...]) -> Iterable[tuple[dict[str, str], str]]:
    """The rows of a CSV file, each with its file and line."""
    reader = csv.DictReader(io.StringIO(files.text(name), newline=""))
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{files.root / name}:1: missing columns: {', '.join(missing)}; restore the file")
    for row in reader:
        yield row, f"{files.root / name}:{reader.line_num}"


def _box(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
    left, top, right, bottom = (round(edge, 2) for edge in (x, y, x + w, y + h))
    return left, top, right, bottom


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@lru_cache(maxsize=4)
def _archive(path: Path) -> ZipFile:
    try:
        return ZipFile(path)
    except (OSError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it") from error
