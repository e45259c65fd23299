"""Recognising image files by suffix or content."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".dcm"}


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
