"""Recognising image files by suffix or content, and the limits of what is decoded."""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError

# What Pillow may decode, whatever a file is called: a file named .jpg may be PostScript, which Ghostscript would run.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
FORMATS += ("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()  # from Pillow 11.3 on
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".dcm"}
MOST_PIXELS = 100_000_000  # of an image or mask; decoding takes at most 24 bytes for each
MOST_ELONGATED = 50  # longer side / shorter side


def is_image(path: str) -> bool:
    """By suffix; without one, as is common for radiographs, by the first bytes."""
    suffix = os.path.splitext(path)[1]  # noqa: PTH122 (a Path per file is slow)
    return suffix.lower() in SUFFIXES or (Path(path).is_file() and is_dicom(path, path))


def is_dicom(source: Path | str | BinaryIO, name: str) -> bool:
    """By suffix; where there is none, or only the last number of a DICOM identifier, by the first bytes."""
    stem, suffix = os.path.splitext(os.path.basename(name))  # noqa: PTH119, PTH122
    if suffix[1:].strip("0123456789") or stem == "DICOMDIR":  # an index of images, not an image
        return suffix.lower() == ".dcm"
    try:
        with Path(source).open("rb") if isinstance(source, (Path, str)) else nullcontext(source) as file:
            header = file.read(132)
            file.seek(0)
    except OSError:
        return False
    return header[128:] == b"DICM"


def check_size(size: tuple[int, int], name: str) -> None:
    """Before an image is decoded: its header may promise any size."""
    width, height = size
    if min(size) < 1:
        raise UserError(f"{name}: an image of {width}×{height} pixels; remove it")
    if width * height > MOST_PIXELS:
        raise UserError(f"{name}: {width:,}×{height:,} pixels, more than {MOST_PIXELS:,}; make it smaller")
    if max(size) > MOST_ELONGATED * min(size):
        limit = f"one side more than {MOST_ELONGATED} times the other"
        raise UserError(f"{name}: {width:,}×{height:,} pixels, {limit}; crop or remove it")
