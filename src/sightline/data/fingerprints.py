"""Fingerprints of datasets: whether the data have changed, without opening the files."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .rows import Rows


def file_fingerprints(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """What reveals a changed file without opening it: its size, or a zip member's checksum; "" if missing."""
    archives: dict[str, dict[str, str] | None] = {}
    base = os.fspath(root)
    for path in paths:
        end = path.lower().find(".zip/") + len(".zip")
        if end >= len(".zip"):
            archive = path[:end]
            if archive not in archives:
                archives[archive] = _archive_members(Path(base, archive))
            members = archives[archive]
            if members is not None:
                yield members.get(path[end + 1 :], "")
                continue
        try:
            status = os.stat(os.path.join(base, path))  # noqa: PTH116, PTH118 (a Path per file is slow)
        except (OSError, ValueError):
            yield ""
        else:
            yield str(status.st_size) if stat.S_ISREG(status.st_mode) else ""


def _archive_members(archive: Path) -> dict[str, str] | None:
    """A zip file's members with size and checksum; None for a folder named like a zip file."""
    if archive.is_dir():
        return None
    try:
        with zipfile.ZipFile(archive) as file:
            return {info.filename: f"{info.file_size}:{info.CRC:08x}" for info in file.infolist()}
    except (OSError, zipfile.BadZipFile):
        return {}


def fingerprint(rows: Rows) -> str:
    """SHA-256 over all columns and file fingerprints, independent of where the folder is.

    A file that changes but keeps its size goes unnoticed, except in an archive.
    """
    digest = hashlib.sha256()

    def add(content: bytes) -> None:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)

    for names in (rows.classes, rows.group_names, rows.keypoint_names):
        add("\0".join(names).encode())
    for numbers, kind in ((rows.labels, "<i8"), (rows.splits, "i1"), (rows.groups, "<i8"), (rows.keypoints, "<f4")):
        add(b"" if numbers is None else np.ascontiguousarray(numbers, kind).tobytes())
    for boxes in rows.boxes or ():
        add(np.ascontiguousarray(boxes, "<f4").tobytes())
    for paths in (rows.images, rows.masks or ()):
        for path, mark in zip(paths, file_fingerprints(rows.root, paths), strict=True):
            digest.update(f"{path}\0{mark}\n".encode())
        add(b"")
    return digest.hexdigest()
