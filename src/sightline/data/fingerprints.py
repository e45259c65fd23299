"""Fingerprints of datasets: whether the data have changed, without opening the files."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .rows import Rows


SAMPLE = 4096  # bytes
READERS, FEW = 16, 2000  # threads, for more files than that
_SAMPLED: dict[tuple[str, int, int, int], str] = {}


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


def content_marks(root: Path, paths: Sequence[str]) -> list[str]:
    """What reveals a changed file by a look into it: a hash of its size, beginning, middle and end (a file of up to
    three blocks as a whole), or a zip member's checksum; "" if missing. Each file is read once per process, for as long
    as its size and time of modification stay the same."""
    base, marks = os.fspath(root), list(file_fingerprints(root, paths))

    def mark(i: int) -> str:
        return marks[i] if not marks[i] or ":" in marks[i] else _sampled_hash(os.path.join(base, paths[i]))  # noqa: PTH118

    with ThreadPoolExecutor(READERS) as pool:  # the disk or the network may be slow
        return list(pool.map(mark, range(len(paths)))) if len(paths) > FEW else [mark(i) for i in range(len(paths))]


def _sampled_hash(path: str) -> str:
    try:
        status = os.stat(path)  # noqa: PTH116
        key = path, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if key not in _SAMPLED:
            _SAMPLED[key] = _read_samples(path, status.st_size)
        return _SAMPLED[key]
    except (OSError, ValueError):
        return ""


def _read_samples(path: str, size: int) -> str:
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (a Path per file is slow)
        if size <= 3 * SAMPLE:
            digest.update(file.read())
        else:
            for at in (0, (size - SAMPLE) // 2, size - SAMPLE):
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def content_fingerprint(rows: Rows) -> str:
    """As `fingerprint`, of what is in the files; files that changed and kept their size are noticed."""
    digest = hashlib.sha256()
    for paths in (rows.images, [path for path in rows.masks or () if path]):
        for mark in content_marks(rows.root, paths):
            digest.update(f"{mark}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def fingerprint(rows: Rows) -> str:
    """SHA-256 over all columns and file fingerprints, independent of where the folder is.

    A file that changes but keeps its size goes unnoticed, except in an archive: see `content_fingerprint`.
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
