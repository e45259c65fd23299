"""Whether a data set is still the one it was, told without opening its files."""

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


def file_stamps(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """What tells a changed file without opening it: its size, or a zip member's checksum; "" where there is none."""
    archives: dict[str, dict[str, str] | None] = {}
    base = os.fspath(root)
    for path in paths:
        end = path.lower().find(".zip/") + len(".zip")
        if end >= len(".zip"):
            archive = path[:end]
            if archive not in archives:
                archives[archive] = _members(Path(base, archive))
            members = archives[archive]
            if members is not None:
                yield members.get(path[end + 1 :], "")
                continue
        try:
            found = os.stat(os.path.join(base, path))  # noqa: PTH116, PTH118 (a Path per file is slow)
        except (OSError, ValueError):
            yield ""
        else:
            yield str(found.st_size) if stat.S_ISREG(found.st_mode) else ""


def _members(archive: Path) -> dict[str, str] | None:
    """A zip file's members with size and checksum; None for a folder that only looks like one."""
    if archive.is_dir():
        return None
    try:
        with zipfile.ZipFile(archive) as file:
            return {info.filename: f"{info.file_size}:{info.CRC:08x}" for info in file.infolist()}
    except (OSError, zipfile.BadZipFile):
        return {}


def fingerprint(rows: Rows) -> str:
    """sha256 of what was read: every column and every file's stamp (see `file_stamps`), wherever the folder lies.

    A file that changes but keeps its size goes unnoticed, except in an archive.
    """
    digest = hashlib.sha256()

    def add(content: bytes) -> None:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)

    for words in (rows.classes, rows.group_names, rows.keypoint_names):
        add("\0".join(words).encode())
    for numbers, kind in ((rows.labels, "<i8"), (rows.splits, "i1"), (rows.groups, "<i8"), (rows.keypoints, "<f4")):
        add(b"" if numbers is None else np.ascontiguousarray(numbers, kind).tobytes())
    for boxes in rows.boxes or ():
        add(np.ascontiguousarray(boxes, "<f4").tobytes())
    for paths in (rows.images, rows.masks or ()):
        for path, stamp in zip(paths, file_stamps(rows.root, paths), strict=True):
            digest.update(f"{path}\0{stamp}\n".encode())
        add(b"")
    return digest.hexdigest()
