"""What pictures show when they are opened: damage, unusual kinds, masks and boxes that do not fit, their looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from ..errors import UserError
from .duplicates import perceptual_hash
from .formats import is_dicom
from .images import open_file, read_image_file, read_mask_file, same_shape
from .rows import Rows

Severity = Literal["error", "warning", "info"]
BLOCK = 1024  # pictures handed to the workers at once
ORIENTATION = 0x0112  # in EXIF
TWELVE_BITS = 4095

TROUBLES: dict[str, tuple[Severity, str, str]] = {  # severity, topic, and what to say after "3 of 20 pictures"
    "damaged": ("error", "files", "cannot be read"),
    "mask damaged": ("error", "files", "have a mask that cannot be read"),
    "mask shape": ("error", "masks", "have a mask of another shape; give each a mask of its own"),
    "mask empty": ("warning", "masks", "have an empty mask"),
    "mask full": ("warning", "masks", "have a mask that hides nothing"),
    "mask size": ("info", "masks", "have a mask of another resolution, which is scaled"),
    "box outside": ("error", "boxes", "have a box that lies outside them"),
    "box over the edge": ("warning", "boxes", "have a box that reaches over the edge, where it is cut off"),
    "nearly black": (
        "warning",
        "pictures",
        f"are 16-bit files with no value above {TWELVE_BITS}, and so nearly black; rescale them to 16 bits, or give "
        "DICOM files with a window",
    ),
    "one colour": ("info", "duplicates", "are of one colour, and not compared with others"),
}


@dataclass(frozen=True)
class Look:
    """What one picture shows when it is opened."""

    kinds: tuple[str, ...] = ()
    hash: int | None = None
    troubles: tuple[tuple[str, str], ...] = ()  # into TROUBLES, and the details


@dataclass(frozen=True)
class Inspection:
    """What many pictures show."""

    kinds: Counter[str]
    troubles: dict[str, list[str]]  # by the names in TROUBLES: the pictures, with details
    hashed: np.ndarray  # the rows that have a perceptual hash
    hashes: np.ndarray  # uint64


def inspect(rows: Rows, which: np.ndarray, workers: int, progress: Callable[[int], None] | None) -> Inspection:
    """Open these rows in threads: Pillow decodes outside the interpreter's lock."""
    kinds, troubles = Counter(), {name: [] for name in TROUBLES}
    hashed, hashes = [], []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(which), BLOCK):
            block = which[start : start + BLOCK].tolist()
            for row, seen in zip(block, pool.map(lambda row: look_at(rows, row), block), strict=True):
                kinds.update(seen.kinds)
                for name, details in seen.troubles:
                    troubles[name].append(f"{rows.images[row]}: {details}" if details else rows.images[row])
                if seen.hash is not None:
                    hashed.append(row)
                    hashes.append(seen.hash)
            if progress is not None:
                progress(start + len(block))
    return Inspection(kinds, troubles, np.array(hashed, np.int64), np.array(hashes, np.uint64))


def look_at(rows: Rows, row: int) -> Look:
    try:
        image = read_image_file(rows, row)
    except Exception as error:  # whatever one file does to its decoder, the others are still looked at
        return Look(troubles=(("damaged", _reason(error).removeprefix(f"{rows.image_path(row)}: ")),))
    seen = perceptual_hash(image)
    kinds = _kinds(rows, row)
    troubles = _mask_troubles(rows, row, image.size) + _box_troubles(rows, row, image.size)
    troubles += _shades_troubles(rows, row) if "16-bit" in kinds else []
    return Look(kinds, seen, (*troubles, *([("one colour", "")] if seen is None else [])))


def _kinds(rows: Rows, row: int) -> tuple[str, ...]:
    """What is unusual about the file, if anything."""
    source = open_file(rows.root, rows.images[row])
    if is_dicom(source, rows.images[row]):
        return ("DICOM",)
    with Image.open(source) as file:
        no_exif = file.format == "PNG" and "exif" not in file.info  # asking such a file would decode it again
        unusual = {
            "grey": file.mode in ("1", "L", "LA"),
            "16-bit": file.mode.startswith("I") or file.mode == "F",
            "transparent": file.mode in ("RGBA", "LA", "PA") or "transparency" in file.info,
            "turned by EXIF": not no_exif and file.getexif().get(ORIENTATION, 1) not in (0, 1),
            "CMYK": file.mode == "CMYK",
            "animated": getattr(file, "is_animated", False),
        }
    return tuple(kind for kind, here in unusual.items() if here)


def _shades_troubles(rows: Rows, row: int) -> list[tuple[str, str]]:
    """Scanners write 12 bits into files of 16, of which the whole range counts."""
    with Image.open(open_file(rows.root, rows.images[row])) as file:
        most = 0 if file.mode == "F" else int(np.asarray(file).max())
    return [("nearly black", f"at most {most}")] if 0 < most <= TWELVE_BITS else []


def _mask_troubles(rows: Rows, row: int, size: tuple[int, int]) -> list[tuple[str, str]]:
    try:
        mask = read_mask_file(rows, row)
    except Exception as error:
        return [("mask damaged", _reason(error.__cause__ or error))]
    if mask is None:
        return []
    visible = np.asarray(mask)
    troubles = []
    if mask.size != size:
        sizes = f"{size[0]}×{size[1]}, mask {mask.size[0]}×{mask.size[1]}"
        troubles.append(("mask size" if same_shape(mask.size, size) else "mask shape", sizes))
    if not visible.any():
        troubles.append(("mask empty", ""))
    elif visible.all():
        troubles.append(("mask full", ""))
    return troubles


def _box_troubles(rows: Rows, row: int, size: tuple[int, int]) -> list[tuple[str, str]]:
    """A pixel over the edge is a matter of counting, not a mistake."""
    if rows.boxes is None:
        return []
    troubles = {}
    for box in rows.boxes[row]:
        left, top, right, bottom = box.tolist()
        told = f"{left:g} {top:g} {right:g} {bottom:g} in {size[0]}×{size[1]}"
        if left >= size[0] or top >= size[1] or right <= 0 or bottom <= 0:
            troubles["box outside"] = told
        elif left < -1 or top < -1 or right > size[0] + 1 or bottom > size[1] + 1:
            troubles["box over the edge"] = told
    return list(troubles.items())


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"cannot be decoded ({type(error).__name__}: {error})"
