"""Opening images to check them: damage, unusual formats, masks and boxes that do not fit, perceptual hashes."""

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
from .formats import FORMATS, is_dicom
from .images import ORIENTATION, open_file, read_row_image, read_row_mask, same_aspect_ratio
from .rows import Rows

Severity = Literal["error", "warning", "info"]
BLOCK = 1024  # images handed to the workers at once
TWELVE_BITS = 4095

PROBLEMS: dict[str, tuple[Severity, str, str]] = {  # severity, topic, and the text after "3 of 20 images"
    "damaged": ("error", "files", "cannot be read"),
    "mask damaged": ("error", "files", "have a mask that cannot be read"),
    "mask shape": ("error", "masks", "have a mask of another aspect ratio"),
    "mask empty": ("warning", "masks", "have an empty mask"),
    "mask full": ("warning", "masks", "have a mask that covers the whole image"),
    "mask size": ("info", "masks", "have a mask of another resolution, which is resized"),
    "box outside": ("error", "boxes", "have a box outside the image"),
    "box over the edge": ("warning", "boxes", "have a box that exceeds the image and is clipped"),
    "nearly black": (
        "warning",
        "images",
        f"are 16-bit files with no value above {TWELVE_BITS}, and so nearly black; rescale them to 16 bits, or "
        "use DICOM files with a window",
    ),
    "one colour": ("info", "duplicates", "are of one colour and not checked for near-duplicates"),
}


@dataclass(frozen=True)
class ImageInspection:
    """The findings about one image."""

    kinds: tuple[str, ...] = ()
    hash: int | None = None
    problems: tuple[tuple[str, str], ...] = ()  # names in PROBLEMS, and details


@dataclass(frozen=True)
class Inspection:
    """The findings about many images."""

    kinds: Counter[str]
    problems: dict[str, list[str]]  # by the names in PROBLEMS: the images, with details
    hashed: np.ndarray  # indices of the rows that have a perceptual hash
    hashes: np.ndarray  # uint64


def inspect_images(rows: Rows, indices: np.ndarray, workers: int, progress: Callable[[int], None] | None) -> Inspection:
    """Open the images of these rows in threads: Pillow releases the interpreter lock while it decodes."""
    kinds, problems = Counter(), {name: [] for name in PROBLEMS}
    hashed, hashes = [], []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(indices), BLOCK):
            block = indices[start : start + BLOCK].tolist()
            for row, found in zip(block, pool.map(lambda row: inspect_image(rows, row), block), strict=True):
                kinds.update(found.kinds)
                for name, details in found.problems:
                    problems[name].append(f"{rows.images[row]}: {details}" if details else rows.images[row])
                if found.hash is not None:
                    hashed.append(row)
                    hashes.append(found.hash)
            if progress is not None:
                progress(start + len(block))
    return Inspection(kinds, problems, np.array(hashed, np.int64), np.array(hashes, np.uint64))


def inspect_image(rows: Rows, row: int) -> ImageInspection:
    try:
        image = read_row_image(rows, row)
    except Exception as error:  # however a decoder fails on one file, the others are still checked
        return ImageInspection(problems=(("damaged", _reason(error).removeprefix(f"{rows.image_path(row)}: ")),))
    image_hash = perceptual_hash(image)
    kinds = _kinds(rows, row)
    problems = _mask_problems(rows, row, image.size) + _box_problems(rows, row, image.size)
    problems += _depth_problems(rows, row) if "16-bit" in kinds else []
    problems += [("one colour", "")] if image_hash is None else []
    return ImageInspection(kinds, image_hash, tuple(problems))


def _kinds(rows: Rows, row: int) -> tuple[str, ...]:
    """What is unusual about the file format, if anything."""
    source = open_file(rows.root, rows.images[row])
    if is_dicom(source, rows.images[row]):
        return ("DICOM",)
    with Image.open(source, formats=FORMATS) as file:
        no_exif = file.format == "PNG" and "exif" not in file.info  # getexif would decode such a file again
        unusual = {
            "grey": file.mode in ("1", "L", "LA"),
            "16-bit": file.mode.startswith("I") or file.mode == "F",
            "transparent": file.mode in ("RGBA", "LA", "PA") or "transparency" in file.info,
            "turned by EXIF": not no_exif and file.getexif().get(ORIENTATION, 1) not in (0, 1),
            "CMYK": file.mode == "CMYK",
            "animated": getattr(file, "is_animated", False),
        }
    return tuple(kind for kind, applies in unusual.items() if applies)


def _depth_problems(rows: Rows, row: int) -> list[tuple[str, str]]:
    """Scanners write 12 bits into 16-bit files, which are read over the full range."""
    with Image.open(open_file(rows.root, rows.images[row]), formats=FORMATS) as file:
        largest = 0 if file.mode == "F" else int(np.asarray(file).max())
    return [("nearly black", f"at most {largest}")] if 0 < largest <= TWELVE_BITS else []


def _mask_problems(rows: Rows, row: int, size: tuple[int, int]) -> list[tuple[str, str]]:
    try:
        mask = read_row_mask(rows, row)
    except Exception as error:
        return [("mask damaged", _reason(error.__cause__ or error))]
    if mask is None:
        return []
    visible = np.asarray(mask)
    problems = []
    if mask.size != size:
        sizes = f"{size[0]}×{size[1]}, mask {mask.size[0]}×{mask.size[1]}"
        problems.append(("mask size" if same_aspect_ratio(mask.size, size) else "mask shape", sizes))
    if not visible.any():
        problems.append(("mask empty", ""))
    elif visible.all():
        problems.append(("mask full", ""))
    return problems


def _box_problems(rows: Rows, row: int, size: tuple[int, int]) -> list[tuple[str, str]]:
    """One pixel beyond the edge is a matter of counting convention, not a mistake."""
    if rows.boxes is None:
        return []
    problems = {}
    for box in rows.boxes[row]:
        left, top, right, bottom = box.tolist()
        details = f"{left:g} {top:g} {right:g} {bottom:g} in {size[0]}×{size[1]}"
        if left >= size[0] or top >= size[1] or right <= 0 or bottom <= 0:
            problems["box outside"] = details
        elif left < -1 or top < -1 or right > size[0] + 1 or bottom > size[1] + 1:
            problems["box over the edge"] = details
    return list(problems.items())


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"cannot be decoded ({type(error).__name__}: {error})"
