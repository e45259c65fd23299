"""Reading images and masks from files and archives, and preprocessing: upright RGB, resized and cropped to one size.

An image's mask, boxes and keypoints go through the same geometry.
"""

from __future__ import annotations

import io
import math
import os
import warnings
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

from ..console.files import protect
from ..errors import UserError
from ..vit.model import Input
from .formats import FORMATS, MOST_PIXELS, SUFFIXES, check_size, is_dicom, is_image
from .rows import Rows
from .unlabelled import csv_file_of, images_in_table

LOSSLESS = {"PNG", "TIFF", "BMP", "GIF", "PPM"}  # formats in which a level of 1 is not noise
ORIENTATION = 0x0112  # the EXIF tag
MOST_ENLARGED = 8  # pixels resized per pixel needed, above which only the window that is needed is resized
MOST_UNPACKED = 1 << 30  # bytes of a member of an archive
RESAMPLE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class Preprocess:
    """How images are brought to one size: cropped to the aspect ratio, or squashed into it.

    `crop` is as in `Input`: the image is resized to cover size / crop, and `size` is cropped from the centre.
    """

    size: tuple[int, int]  # height, width
    fit: Literal["crop", "squash"] = "crop"
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    crop: float = 1.0

    @classmethod
    def of(cls, expects: Input) -> Preprocess:
        """The preprocessing that a model expects."""
        return cls(size=expects.size, fit=expects.fit, resample=expects.resample, crop=expects.crop)


@dataclass(frozen=True)
class ResizeCrop:
    """The geometry of preprocessing an image of one size: resized to `resized`, then cropped from (left, top)."""

    size: tuple[int, int]  # width, height of the image, in Pillow's order
    resized: tuple[int, int]
    left: int
    top: int
    preprocess: Preprocess

    @classmethod
    def of(cls, size: tuple[int, int], preprocess: Preprocess) -> ResizeCrop:
        (h, w), (width, height) = preprocess.size, size
        cover_h, cover_w = math.floor(h / preprocess.crop), math.floor(w / preprocess.crop)
        if preprocess.fit == "squash":
            resized = (cover_w, cover_h)
        else:
            scale = max(cover_h / height, cover_w / width)
            resized = (max(w, round(width * scale)), max(h, round(height * scale)))
        return cls(size, resized, round((resized[0] - w) / 2), round((resized[1] - h) / 2), preprocess)

    def image(self, image: Image.Image) -> Tensor:
        """uint8 [3, h, w]."""
        pixels = np.asarray(self._apply(image, RESAMPLE[self.preprocess.resample]))
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))

    def mask(self, mask: Image.Image) -> Tensor:
        """bool [h, w]; the resolution of the mask may differ from that of the image."""
        return torch.from_numpy(np.asarray(self._apply(mask.convert("L"), Image.Resampling.NEAREST)) >= 128)

    def boxes(self, boxes: np.ndarray) -> Tensor:
        """float32 [k, 4], clipped to the crop; NaN where nothing is left."""
        (h, w), (sx, sy) = self.preprocess.size, self._scale
        moved = boxes.reshape(-1, 4) * [sx, sy, sx, sy] - [self.left, self.top, self.left, self.top]
        moved = moved.clip(0, [w, h, w, h])
        visible = (moved[:, :2] < moved[:, 2:]).all(axis=1, keepdims=True)
        return torch.from_numpy(np.where(visible, moved, np.nan).astype(np.float32))

    def keypoints(self, keypoints: np.ndarray) -> Tensor:
        """float32 [K, 3]: 0, 0, 0 where not visible or cropped away. A keypoint names a pixel."""
        (h, w), (sx, sy) = self.preprocess.size, self._scale
        x, y = (keypoints[:, 0] + 0.5) * sx - self.left, (keypoints[:, 1] + 0.5) * sy - self.top
        visible = (keypoints[:, 2] > 0) & (x >= 0) & (x < w) & (y >= 0) & (y < h)
        moved = np.stack([x - 0.5, y - 0.5, visible], axis=1)
        return torch.from_numpy(np.where(visible[:, None], moved, 0).astype(np.float32))

    @property
    def _scale(self) -> tuple[float, float]:
        return self.resized[0] / self.size[0], self.resized[1] / self.size[1]

    def _apply(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        h, w = self.preprocess.size
        window = (self.left, self.top, self.left + w, self.top + h)
        if self.resized[0] * self.resized[1] <= MOST_ENLARGED * h * w:
            return image.resize(self.resized, resample).crop(window)
        across, down = image.size[0] / self.resized[0], image.size[1] / self.resized[1]
        left, top, right, bottom = window
        box = (left * across, top * down, min(right * across, image.size[0]), min(bottom * down, image.size[1]))
        return image.resize((w, h), resample, box=box)


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A preprocessed image with its annotations. Coordinates refer to the upright image."""

    image: Tensor  # uint8 [3, h, w]
    mask: Tensor | None  # bool [h, w]
    boxes: Tensor | None  # float32 [k, 4]: edges; NaN where a box was cropped away
    keypoints: Tensor | None  # float32 [K, 3]: x, y, visible 0/1
    size: tuple[int, int]  # width, height of the image file


def decode(rows: Rows, i: int, preprocess: Preprocess, *, mask: bool = True) -> DecodedImage:
    """Read and preprocess row `i`, with or without its mask."""
    image = read_row_image(rows, i)
    geometry = ResizeCrop.of(image.size, preprocess)
    object_mask = read_row_mask(rows, i) if mask else None
    if object_mask is not None and not same_aspect_ratio(object_mask.size, image.size):
        (w, h), (width, height) = object_mask.size, image.size
        sizes = f"{width}×{height} pixels, but its mask {_mask_path(rows, i)} has {w}×{h}"
        raise UserError(f"{rows.image_path(i)}: {sizes}; the aspect ratios must agree")
    return DecodedImage(
        image=geometry.image(image),
        mask=None if object_mask is None else geometry.mask(object_mask),
        boxes=None if rows.boxes is None else geometry.boxes(rows.boxes[i]),
        keypoints=None if rows.keypoints is None else geometry.keypoints(rows.keypoints[i]),
        size=image.size,
    )


def same_aspect_ratio(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Up to a pixel of rounding."""
    return abs(first[0] * second[1] - first[1] * second[0]) <= max(second)


def read_row_image(rows: Rows, i: int) -> Image.Image:
    """The image of row `i` as upright RGB."""
    return read_image(open_file(rows.root, rows.images[i]), str(rows.image_path(i)))


def read_row_mask(rows: Rows, i: int) -> Image.Image | None:
    """The mask of row `i`, one bit per pixel, if it has one."""
    path = _mask_path(rows, i)
    if not path:
        return None
    try:
        return read_mask(open_file(rows.root, path), str(rows.root / path))
    except UserError as error:
        location = "" if rows.lines is None else f", {rows.location(i)}"
        raise UserError(f"{error} (the mask of {rows.images[i]}{location})") from error


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Image files: as given, sorted from folders, or as listed in a CSV file or a folder's rows.csv."""
    found = []
    for path in paths:
        table = csv_file_of(path)
        if table is not None and table.is_file():
            inside = [table.parent / image for image in images_in_table(table)[0]]
            if not inside:
                raise UserError(f"{table}: has no rows; write one per image below the header")
            found += inside
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and is_image(str(p)))
            if not inside:
                raise UserError(f"{path}: no images in this folder ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    protect(lambda: found, "an image")
    return found


def read_image(source: Path | str | BinaryIO, name: str | None = None) -> Image.Image:
    """An image file, possibly in an archive, as upright RGB; `name` is for error messages."""
    name = name or str(source)
    source = open_file(Path(), str(source)) if isinstance(source, (Path, str)) else source
    return to_upright_rgb(_open(source, name), name)


def to_upright_rgb(image: Image.Image, name: str = "the image") -> Image.Image:
    """Apply the EXIF orientation and convert to 8-bit RGB, transparency to white; the given image is not modified."""
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image), image.mode, name))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def read_mask(source: Path | str | BinaryIO, name: str | None = None) -> Image.Image:
    """A binary mask, one bit per pixel: levels of at least 128 are True; in files of only 0 and 1, the 1s are."""
    mask = _open(source, name or str(source))
    lossless = mask.format in LOSSLESS
    ImageOps.exif_transpose(mask, in_place=True)
    if mask.mode == "1":
        return mask
    grey = mask.convert("L")
    threshold = 1 if lossless and grey.getextrema()[1] == 1 else 128
    return grey.point(lambda level: 255 * (level >= threshold), mode="1")


def to_tensor(image: Image.Image, expects: Input) -> Tensor:
    """float [3, h, w] in [0, 1], resized and cropped as the model expects."""
    return ResizeCrop.of(image.size, Preprocess.of(expects)).image(image).float() / 255


def mask_to_tensor(mask: Image.Image, expects: Input) -> Tensor:
    """bool [h, w], with the same geometry as the image."""
    return ResizeCrop.of(mask.size, Preprocess.of(expects)).mask(mask)


def open_file(root: Path, path: str) -> BinaryIO | Path:
    """Resolve a path of a dataset: a file, or the content of a member of a zip archive."""
    located = _split_archive_path(root, path)
    if located is None:
        return root / path
    archive, member = located
    try:
        return io.BytesIO(read_member(_open_archive(archive), member, f"{archive}/{member}"))
    except KeyError:
        raise UserError(f"{archive}: no member {member}; check that it is the right archive and complete") from None
    except (RuntimeError, NotImplementedError) as error:  # password-protected, or an unknown compression
        raise UserError(f"{archive}/{member}: cannot be extracted ({error}); extract the archive yourself") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{archive}/{member}: damaged archive ({error}); download it again") from error


def read_member(archive: zipfile.ZipFile, member: str, name: str) -> bytes:
    """The content of a member, up to a limit, whatever size its header promises."""
    with archive.open(member) as file:
        content = file.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise UserError(f"{name}: unpacks to more than {MOST_UNPACKED >> 20:,} MiB; extract the archive yourself")
    return content


_archives: dict[Path, tuple[tuple[int, int, int], zipfile.ZipFile]] = {}


def _open_archive(path: Path) -> zipfile.ZipFile:
    """One handle per archive and process: a handle inherited through a fork would share its position."""
    status = path.stat()
    state = (os.getpid(), status.st_mtime_ns, status.st_size)
    opened = _archives.get(path)
    if opened is None or opened[0] != state:
        try:
            opened = _archives[path] = (state, zipfile.ZipFile(path))
        except zipfile.BadZipFile:
            raise UserError(f"{path}: not a zip archive, or damaged; download it again") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    return opened[1]


def _split_archive_path(root: Path, path: str) -> tuple[Path, str] | None:
    end = path.lower().find(".zip/")
    while end >= 0:
        archive = root / path[: end + 4]
        if archive.is_file():
            return archive, path[end + 5 :]
        end = path.lower().find(".zip/", end + 5)
    return None


def _open(source: Path | str | BinaryIO, name: str) -> Image.Image:
    if is_dicom(source, name):
        from .dicom import read_dicom

        return read_dicom(Path(source) if isinstance(source, str) else source, name)
    try:
        with warnings.catch_warnings():  # Pillow warns of large images; we refuse them
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(source, formats=FORMATS)
        check_size(image.size, name)
        image.load()
        return image
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{name}: no such file") from None
    except PermissionError:
        raise UserError(f"{name}: permission denied; change its permissions") from None
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{name}: not a readable image; remove it, or convert it to PNG or JPEG") from None
    except Image.DecompressionBombError:
        raise UserError(f"{name}: more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except MemoryError:
        raise UserError(f"{name}: too large for this machine's memory; make it smaller") from None
    except Exception as error:  # decoders fail in many ways
        raise UserError(f"{name}: damaged image ({error}); restore or remove it") from error


def _to_8_bits(values: np.ndarray, mode: str, name: str) -> np.ndarray:
    largest = 1.0 if mode == "F" else 65535.0
    if not np.isfinite(values).all():
        raise UserError(f"{name}: has pixels that are not numbers (NaN or infinite); restore or remove it")
    if values.size and (values.min() < 0 or values.max() > largest):
        limits = f"{values.min():g} to {values.max():g}"
        raise UserError(f"{name}: pixel values from {limits} in mode {mode}; save it with 8 or 16 bits")
    return np.round(values.astype(np.float64) / largest * 255).astype(np.uint8)


def _mask_path(rows: Rows, i: int) -> str:
    return rows.masks[i] if rows.masks is not None else ""
