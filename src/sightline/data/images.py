"""Pictures from files and archives to tensors: RGB, whatever the file's mode, size and orientation.

A picture lands on a `Canvas`: resized and cut to one size, with its mask, boxes and key points moved along.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import UserError
from ..vit.model import Input
from .formats import SUFFIXES, is_dicom, is_image
from .rows import Rows
from .unlabelled import listed, table_of

LOSSLESS = {"PNG", "TIFF", "BMP", "GIF", "PPM"}  # formats in which a level of 1 is no noise
ORIENTATION = 0x0112  # the EXIF tag
RESAMPLE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class Canvas:
    """The size that every picture is brought to, and how: cut to the aspect ratio, or squashed into it.

    `crop` is an `Input`'s: the picture is resized to cover size / crop, and `size` is taken from the centre.
    """

    size: tuple[int, int]  # height, width
    fit: Literal["crop", "squash"] = "crop"
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    crop: float = 1.0

    @classmethod
    def of(cls, expects: Input) -> Canvas:
        """What `to_tensor` does with a picture for this model."""
        return cls(size=expects.size, resample=expects.resample, crop=expects.crop)


@dataclass(frozen=True)
class Placement:
    """Where a picture of one size ends up on a canvas: resized to `resized`, then cut out from (left, top) on."""

    size: tuple[int, int]  # width, height, as is Pillow's habit: of the picture
    resized: tuple[int, int]
    left: int
    top: int
    canvas: Canvas

    @classmethod
    def of(cls, size: tuple[int, int], canvas: Canvas) -> Placement:
        (h, w), (width, height) = canvas.size, size
        cover_h, cover_w = math.floor(h / canvas.crop), math.floor(w / canvas.crop)
        if canvas.fit == "squash":
            resized = (cover_w, cover_h)
        else:
            scale = max(cover_h / height, cover_w / width)
            resized = (max(w, round(width * scale)), max(h, round(height * scale)))
        return cls(size, resized, round((resized[0] - w) / 2), round((resized[1] - h) / 2), canvas)

    def picture(self, image: Image.Image) -> Tensor:
        """uint8 [3, h, w]."""
        pixels = np.asarray(self._put(image, RESAMPLE[self.canvas.resample]))
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))

    def mask(self, mask: Image.Image) -> Tensor:
        """bool [h, w]; the mask may be of another resolution than its picture."""
        return torch.from_numpy(np.asarray(self._put(mask.convert("L"), Image.Resampling.NEAREST)) >= 128)

    def boxes(self, boxes: np.ndarray) -> Tensor:
        """float32 [k, 4], cut off at the border of the canvas; NaN where nothing is left."""
        (h, w), (across, down) = self.canvas.size, self._scale
        moved = boxes.reshape(-1, 4) * [across, down, across, down] - [self.left, self.top, self.left, self.top]
        moved = moved.clip(0, [w, h, w, h])
        there = (moved[:, :2] < moved[:, 2:]).all(axis=1, keepdims=True)
        return torch.from_numpy(np.where(there, moved, np.nan).astype(np.float32))

    def keypoints(self, keypoints: np.ndarray) -> Tensor:
        """float32 [K, 3]: what is not visible, or not any more, is 0, 0, 0. A key point names a pixel."""
        (h, w), (across, down) = self.canvas.size, self._scale
        x, y = (keypoints[:, 0] + 0.5) * across - self.left, (keypoints[:, 1] + 0.5) * down - self.top
        visible = (keypoints[:, 2] > 0) & (x >= 0) & (x < w) & (y >= 0) & (y < h)
        moved = np.stack([x - 0.5, y - 0.5, visible], axis=1)
        return torch.from_numpy(np.where(visible[:, None], moved, 0).astype(np.float32))

    @property
    def _scale(self) -> tuple[float, float]:
        return self.resized[0] / self.size[0], self.resized[1] / self.size[1]

    def _put(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        h, w = self.canvas.size
        return image.resize(self.resized, resample).crop((self.left, self.top, self.left + w, self.top + h))


@dataclass(frozen=True, eq=False)
class Sample:
    """One picture on its canvas, and what is known about it there. Coordinates count from the upright picture."""

    image: Tensor  # uint8 [3, h, w]
    mask: Tensor | None  # bool [h, w]
    boxes: Tensor | None  # float32 [k, 4]: edges; NaN where a box fell off the canvas
    keypoints: Tensor | None  # float32 [K, 3]: x, y, visible 0/1
    size: tuple[int, int]  # width, height of the file


def decode(rows: Rows, i: int, canvas: Canvas, *, mask: bool = True) -> Sample:
    """Row `i` on the canvas; without its mask if that is not wanted."""
    picture = read_image_file(rows, i)
    place = Placement.of(picture.size, canvas)
    outline = read_mask_file(rows, i) if mask else None
    if outline is not None and not same_shape(outline.size, picture.size):
        (w, h), (width, height) = outline.size, picture.size
        raise UserError(
            f"{_name(rows.root, rows.images[i])}: {width}×{height} pixels, but its mask {_mask_path(rows, i)} has "
            f"{w}×{h}; give it a mask of its own shape"
        )
    return Sample(
        image=place.picture(picture),
        mask=None if outline is None else place.mask(outline),
        boxes=None if rows.boxes is None else place.boxes(rows.boxes[i]),
        keypoints=None if rows.keypoints is None else place.keypoints(rows.keypoints[i]),
        size=picture.size,
    )


def same_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """The same aspect ratio, up to a pixel of rounding."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(other)


def read_image_file(rows: Rows, i: int) -> Image.Image:
    """The picture of row `i`, upright, RGB."""
    return read_image(open_file(rows.root, rows.images[i]), _name(rows.root, rows.images[i]))


def read_mask_file(rows: Rows, i: int) -> Image.Image | None:
    """The mask of row `i`, one bit per pixel, if it has one."""
    path = _mask_path(rows, i)
    if not path:
        return None
    try:
        return read_mask(open_file(rows.root, path), _name(rows.root, path))
    except UserError as error:
        listed_at = "" if rows.lines is None else f", {rows.place(i)}"
        raise UserError(f"{error} (the mask of {rows.images[i]}{listed_at})") from error


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Files as given, folders as the pictures in them, sorted; what a CSV file, or a folder's rows.csv, lists."""
    found = []
    for path in paths:
        table = table_of(path)
        if table is not None and table.is_file():
            inside = [table.parent / image for image in listed(table)[0]]
            if not inside:
                raise UserError(f"{table}: has no rows; write one per image below the header")
            found += inside
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and is_image(str(p)))
            if not inside:
                raise UserError(f"{path}: no pictures in this folder ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    return found


def read_image(source: Path | str | BinaryIO, name: str | None = None) -> Image.Image:
    """A picture from its file, perhaps in an archive, as `upright_rgb` makes it; `name` is for complaints."""
    name = name or str(source)
    source = open_file(Path(), str(source)) if isinstance(source, (Path, str)) else source
    return upright_rgb(_open(source, name), name)


def upright_rgb(image: Image.Image, name: str = "the picture") -> Image.Image:
    """RGB, upright. Grey becomes RGB, 16 bits become 8, transparency becomes white; the image itself stays as it is."""
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image, dtype=np.float64), image.mode, name))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def read_mask(source: Path | str | BinaryIO, name: str | None = None) -> Image.Image:
    """One bit per pixel: what is brighter than half counts as visible; in files of 0 and 1 alone, what is 1."""
    mask = _open(source, name or str(source))
    exact = mask.format in LOSSLESS
    ImageOps.exif_transpose(mask, in_place=True)
    if mask.mode == "1":
        return mask
    grey = mask.convert("L")
    least = 1 if exact and grey.getextrema()[1] == 1 else 128
    return grey.point(lambda level: 255 * (level >= least), mode="1")


def to_tensor(image: Image.Image, expects: Input) -> Tensor:
    """Floats [3, h, w] in [0, 1], resized and cropped as the model expects."""
    return Placement.of(image.size, Canvas.of(expects)).picture(image).float() / 255


def mask_to_tensor(mask: Image.Image, expects: Input) -> Tensor:
    """bool [h, w], through the same geometry as its image."""
    return Placement.of(mask.size, Canvas.of(expects)).mask(mask)


def open_file(root: Path, path: str) -> BinaryIO | Path:
    """Where a path of a data set leads: a file, or the contents of an archive's member."""
    inside = _in_archive(root, path)
    if inside is None:
        return root / path
    archive, member = inside
    try:
        return io.BytesIO(_archive(archive).read(member))
    except KeyError:
        raise UserError(f"{archive}: no member {member}; is it the right archive, and complete?") from None
    except (RuntimeError, NotImplementedError) as error:  # a password, a compression that is not known
        raise UserError(f"{archive}/{member}: cannot be unpacked ({error}); unpack the archive yourself") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{archive}/{member}: a damaged archive ({error}); fetch it again") from error


_archives: dict[Path, tuple[tuple[int, int, int], zipfile.ZipFile]] = {}


def _archive(path: Path) -> zipfile.ZipFile:
    """One handle per archive and process: one that was inherited through a fork would share its position."""
    facts = path.stat()
    state = (os.getpid(), facts.st_mtime_ns, facts.st_size)
    held = _archives.get(path)
    if held is None or held[0] != state:
        try:
            held = _archives[path] = (state, zipfile.ZipFile(path))
        except zipfile.BadZipFile:
            raise UserError(f"{path}: not a zip archive, or a damaged one; fetch it again") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    return held[1]


def _in_archive(root: Path, path: str) -> tuple[Path, str] | None:
    end = path.lower().find(".zip/")
    while end >= 0:
        archive = root / path[: end + 4]
        if archive.is_file():
            return archive, path[end + 5 :]
        end = path.lower().find(".zip/", end + 5)
    return None


def _open(source: Path | str | BinaryIO, name: str) -> Image.Image:
    if is_dicom(source, name):
        return _open_dicom(source, name)
    try:
        image = Image.open(source)
        image.load()
        return image
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{name}: no such file") from None
    except PermissionError:
        raise UserError(f"{name}: may not be read; change its permissions") from None
    except UnidentifiedImageError:
        raise UserError(f"{name}: not an image that can be read; remove it, or convert it to PNG or JPEG") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{name}: a damaged image ({error}); restore it or remove it") from error


def _open_dicom(source: Path | str | BinaryIO, name: str) -> Image.Image:
    from .dicom import read_dicom

    source = Path(source) if isinstance(source, str) else source
    try:
        return read_dicom(source)
    except UserError as error:
        raise UserError(str(error).replace(str(source), name)) from error


def _to_8_bits(values: np.ndarray, mode: str, name: str) -> np.ndarray:
    top = 1.0 if mode == "F" else 65535.0
    if values.size and (values.min() < 0 or values.max() > top):
        raise UserError(
            f"{name}: pixel values from {values.min():g} to {values.max():g} in mode {mode}; save it as 8 or 16 bits"
        )
    return np.round(values / top * 255).astype(np.uint8)


def _mask_path(rows: Rows, i: int) -> str:
    return rows.masks[i] if rows.masks is not None else ""


def _name(root: Path, path: str) -> str:
    return str(root / path)
