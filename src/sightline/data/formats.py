"""Which files are images."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".dcm"}


def is_image(path: str) -> bool:
    """By its suffix; where it has none, as radiographs often do, by how it begins."""
    suffix = os.path.splitext(path)[1]  # noqa: PTH122 (a Path per file is slow)
    return suffix.lower() in SUFFIXES or (Path(path).is_file() and is_dicom(path, path))


def is_dicom(source: Path | str | BinaryIO, name: str) -> bool:
    """The name says so; or the file, where the name has no suffix, or ends in the number of an identifier."""
    stem, suffix = os.path.splitext(os.path.basename(name))  # noqa: PTH119, PTH122
    if suffix[1:].strip("0123456789") or stem == "DICOMDIR":  # which lists pictures, and is none
        return suffix.lower() == ".dcm"
    try:
        with Path(source).open("rb") if isinstance(source, (Path, str)) else nullcontext(source) as file:
            beginning = file.read(132)
            file.seek(0)
    except OSError:
        return False
    return beginning[128:] == b"DICM"
