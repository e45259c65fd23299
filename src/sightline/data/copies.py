"""Test images that are also in train or val: copies with the same content, whatever they are called."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from .fingerprints import content_marks
from .rows import TEST, Rows


@dataclass(frozen=True)
class Copies:
    """The first row of each test image that is also in train or val, and the row it is a copy of."""

    pairs: tuple[tuple[int, int], ...]
    test_images: int

    @property
    def sentence(self) -> str:
        n = len(self.pairs)
        return f"{n:,} of {self.test_images:,} test images {'is' if n == 1 else 'are'} also in train or val"


def find_copies(rows: Rows) -> Copies:
    """Files with the same mark are compared as a whole; members of archives have a checksum of the whole already."""
    test = rows.split_indices("test")
    by_mark: dict[str, list[int]] = defaultdict(list)
    if len(test):
        for row, mark in enumerate(content_marks(rows.root, rows.images)):
            if mark:
                by_mark[mark].append(row)
    pairs = []
    for alike in by_mark.values():
        earlier = [row for row in alike if rows.splits[row] != TEST]
        later = [row for row in alike if rows.splits[row] == TEST]
        if not earlier or not later:
            continue
        known = {whole_content(rows, row): row for row in reversed(earlier)}
        pairs += [(row, known[content]) for row in later if (content := whole_content(rows, row)) in known]
    return Copies(tuple(sorted(pairs)), len(test))


def whole_content(rows: Rows, row: int) -> bytes:
    path = Path(rows.root, rows.images[row])
    if not path.is_file():  # in an archive
        return b""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
