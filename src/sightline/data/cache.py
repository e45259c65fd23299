"""Cache of decoded images: one memory-mapped file per choice of rows and preprocessing, built once.

The file holds all images, then all masks (one bit per pixel), then the sizes of the original image files, then a CRC-32
of each record (image, mask and size), then one of these sizes and checksums. A record is checked when it is read first,
which costs little; a damaged one is decoded again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import sys
import warnings
import zlib
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor

from ..config.machine import available_cores
from ..console.terminal import watched
from ..errors import UserError
from .batches import Workers
from .fingerprints import content_marks
from .images import Preprocess, decode
from .memory import free_bytes
from .rows import Rows
from .shared_cache import fetch, on_disk, publish

FORMAT = 3
CHUNK = 32  # images decoded and written at a time
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileLayout:
    """Sizes and offsets in the file, in bytes."""

    def __init__(self, count: int, size: tuple[int, int], masks: bool):
        pixels = size[0] * size[1]
        self.count, self.masks = count, masks
        self.image_bytes = 3 * pixels
        self.mask_bytes = -(-pixels // 8) if masks else 0
        self.mask_offset = count * self.image_bytes
        self.size_offset = self.mask_offset + count * self.mask_bytes
        self.sum_offset = self.size_offset + count * 8
        self.end = self.sum_offset + count * 4
        self.total = self.end + 4


@dataclass(frozen=True, eq=False)
class Cache:
    """The decoded images of the rows `indices`, bit for bit what `decode` returns."""

    path: Path
    preprocess: Preprocess
    indices: np.ndarray  # int64 [n]: the rows, in the order of the file
    images: Tensor  # uint8 [n, 3, h, w]: memory-mapped, or on a device
    masks: Tensor | None  # uint8 [n, ⌈h·w / 8⌉]: one bit per pixel
    sizes: np.ndarray  # int32 [n, 2]: width, height of the image files
    built: bool  # by this call; otherwise it existed already
    writer: _Writer  # decodes a damaged record again
    sums: np.ndarray  # uint32 [n]
    checked: np.ndarray  # bool [n]

    @classmethod
    def open(
        cls, rows: Rows, preprocess: Preprocess, folder: Path | str, indices: np.ndarray, *, workers: int | None = None
    ) -> Cache:
        """Opens the cache of exactly these images, building it if needed; by default with a process per CPU."""
        indices = np.asarray(indices, dtype=np.int64)
        assert len(indices) > 0, "a cache needs at least one row"
        layout = FileLayout(len(indices), preprocess.size, rows.masks is not None)
        h, w = preprocess.size
        path = on_disk(folder) / f"decoded-{w}x{h}-{cache_fingerprint(rows, preprocess, indices)}.bin"
        fetch(path)
        built, writer = not _is_complete(path, layout), _Writer(rows, indices, preprocess, layout, path)
        if built:
            useful = max(1, len(indices) // (2 * CHUNK))
            if built := _build(writer, path, min(useful, workers or available_cores())):
                publish(path)
        return _memory_map(path, writer, built)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + (0 if self.masks is None else self.masks.nbytes)

    def to(self, device: torch.device | str, *, max_bytes: int | None = None) -> Cache:
        """A copy in device memory if it takes at most `max_bytes` (default: half of what is free), else unchanged."""
        device = torch.device(device)
        if self.nbytes > (free_bytes(device) // 2 if max_bytes is None else max_bytes):
            return self
        self.check(np.arange(len(self.indices)))
        masks = None if self.masks is None else self.masks.to(device, copy=True)
        return replace(self, images=self.images.to(device, copy=True), masks=masks)

    def positions(self, chosen: np.ndarray) -> np.ndarray:
        """Positions of these rows in the file."""
        at = self._position_of_row[chosen]
        assert (at >= 0).all(), "rows that are not in this cache"
        return at

    def read_images(self, at: np.ndarray, *, pin: bool = False) -> Tensor:
        """uint8 [b, 3, h, w]."""
        self.check(at)
        if self.device.type != "cpu":
            return self.images[torch.from_numpy(at).to(self.device, non_blocking=True)]
        shape = (len(at), *self.images.shape[1:])
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pin else torch.from_numpy(np.empty(shape, "u1"))
        # NumPy, because torch would copy in several threads, which compete with those that train.
        np.take(self.images.numpy(), at, axis=0, out=out.numpy(), mode="clip")
        return out

    def read_masks(self, at: np.ndarray) -> Tensor | None:
        """bool [b, h, w]."""
        if self.masks is None:
            return None
        self.check(at)
        h, w = self.preprocess.size
        if self.device.type == "cpu":
            bits = np.unpackbits(self.masks.numpy()[at], axis=1, count=h * w)
            return torch.from_numpy(bits.view(bool).reshape(-1, h, w))
        packed = self.masks[torch.from_numpy(at).to(self.device, non_blocking=True)]
        return unpack_masks(packed, (h, w))

    def check(self, at: np.ndarray) -> None:
        """Compare these records with their checksums, each once; decode damaged ones again."""
        for i in at[~self.checked[at]].tolist():
            parts = [self.images[i], *([] if self.masks is None else [self.masks[i]])]
            if record_sum([part.numpy() for part in parts], self.sizes[i]) != self.sums[i]:
                image = self.writer.rows.images[self.indices[i]]
                print(f"sightline: {self.path}: the record of {image} was damaged; decoded again", file=sys.stderr)
                self.sizes[i] = self.writer.repair(i)
            self.checked[i] = True

    @cached_property
    def _position_of_row(self) -> np.ndarray:
        positions = np.full(self.indices.max() + 1, -1, dtype=np.int64)
        positions[self.indices] = np.arange(len(self.indices))
        return positions


def unpack_masks(bits: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [b, ⌈h·w / 8⌉], first pixel in the highest bit -> bool [b, h, w], on any device."""
    powers = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] & powers) != 0).flatten(1)[:, : size[0] * size[1]].reshape(-1, *size)


def cache_fingerprint(rows: Rows, preprocess: Preprocess, indices: np.ndarray) -> str:
    """Changes with the files (path, size, samples of the content, modification time or checksum), their order,
    preprocessing and decoder."""
    digest = hashlib.sha256(f"{FORMAT} {PIL.__version__} {sorted(asdict(preprocess).items())}\n".encode())
    root = os.fspath(rows.root)
    for column in (rows.images, rows.masks or []):
        paths = [column[i] for i in indices] if column else []
        for path, mark in zip(paths, content_marks(rows.root, paths), strict=True):
            digest.update(f"{path}\0{mark}\0{_modified_ns(root, path) if mark else 0}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()[:24]


def _modified_ns(root: str, path: str) -> int:
    """Modification time of a file; 0 in an archive, whose members have checksums."""
    try:
        return os.stat(os.path.join(root, path)).st_mtime_ns  # noqa: PTH116, PTH118 (a Path per file is slow)
    except OSError:
        return 0


@dataclass(frozen=True, eq=False)
class _Writer:
    """Decodes a chunk of images straight into the file."""

    rows: Rows
    indices: np.ndarray
    preprocess: Preprocess
    layout: FileLayout
    path: Path = Path()

    def __call__(self, chunk: int) -> int:
        first = chunk * CHUNK
        return len(self.write(first, self.indices[first : first + CHUNK]))

    def write(self, first: int, indices: np.ndarray) -> np.ndarray:
        """Write the records of these rows from position `first` on; returns the sizes of their image files."""
        layout, no_mask = self.layout, torch.zeros(self.preprocess.size, dtype=torch.bool)
        samples = [decode(self.rows, int(i), self.preprocess) for i in indices]
        sizes = np.array([sample.size for sample in samples], dtype=np.int32)
        records = [[np.ascontiguousarray(sample.image.numpy())] for sample in samples]
        if layout.masks:
            for record, sample in zip(records, samples, strict=True):
                record.append(np.packbits((no_mask if sample.mask is None else sample.mask).numpy()))
        sums = np.array([record_sum(*record) for record in zip(records, sizes, strict=True)], dtype=np.uint32)
        try:
            with self.path.open("r+b") as file:
                file.seek(first * layout.image_bytes)
                file.writelines(record[0].data for record in records)
                if layout.masks:
                    file.seek(layout.mask_offset + first * layout.mask_bytes)
                    file.writelines(record[1].data for record in records)
                file.seek(layout.size_offset + first * 8)
                file.write(sizes.data)
                file.seek(layout.sum_offset + first * 4)
                file.write(sums.data)
        except OSError as error:
            raise _write_error(self.path.parent, error, layout.total) from error
        return sizes

    def repair(self, at: int) -> np.ndarray:
        """Write a damaged record again; it has the same checksum as before."""
        return self.write(at, self.indices[at : at + 1])[0]

    def finish(self) -> None:
        """Write the checksum of sizes and checksums, when all records are there."""
        with self.path.open("r+b") as file:
            file.seek(self.layout.end)
            file.write(np.array([_table_sum(self.path, self.layout)], dtype=np.uint32).data)
            os.fsync(file.fileno())  # or after a power cut the file might exist without its content


def record_sum(parts: list[np.ndarray], size: np.ndarray) -> int:
    total = 0
    for part in (*parts, size):
        total = zlib.crc32(part.data, total)
    return total


def _table_sum(path: Path, layout: FileLayout) -> int:
    with path.open("rb") as file:
        file.seek(layout.size_offset)
        return zlib.crc32(file.read(layout.end - layout.size_offset))


def _build(writer: _Writer, path: Path, workers: int) -> bool:
    """True if it was built here, False if another process built it while this one waited for the lock."""
    folder, needed = path.parent, writer.layout.total
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _folder_lock(folder) as locked:
            if _is_complete(path, writer.layout):
                return False
            if locked:
                for leftover in folder.glob("decoded-*.partial"):
                    leftover.unlink(missing_ok=True)
            partial = path.with_name(f"{path.stem}-{secrets.token_hex(4)}.partial")
            try:
                _reserve(partial, needed)
                _decode_all(replace(writer, path=partial), workers)
                partial.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
    except OSError as error:
        raise _write_error(folder, error, needed) from error
    return True


def _reserve(path: Path, needed: int) -> None:
    """Allocates the file at once, so that a full disk is noticed before the work and not after it."""
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, needed)
        else:
            file.truncate(needed)


def _decode_all(writer: _Writer, workers: int) -> None:
    pool = Workers(writer, workers if workers > 1 else 0)
    chunks = range(-(-writer.layout.count // CHUNK))
    try:
        for _ in watched(pool.run(chunks), len(chunks), "decoding images"):
            pass
    finally:
        pool.close()
    try:
        writer.finish()
    except OSError as error:
        raise _write_error(writer.path.parent, error, writer.layout.total) from error


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Generator[bool]:
    """Waits for the exclusive right to build in this folder; yields False where the file system has no locks."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        locked = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: worker processes may still hold a copy
        os.close(handle)


def _memory_map(path: Path, writer: _Writer, built: bool) -> Cache:
    layout, preprocess, n = writer.layout, writer.preprocess, writer.layout.count
    sizes = np.fromfile(path, dtype=np.int32, offset=layout.size_offset, count=2 * n).reshape(n, 2)
    sums = np.fromfile(path, dtype=np.uint32, offset=layout.sum_offset, count=n)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # we do not write
        images = torch.from_numpy(np.memmap(path, np.uint8, "r", 0, (n, 3, *preprocess.size)))
        masks = None
        if layout.masks:
            masks = torch.from_numpy(np.memmap(path, np.uint8, "r", layout.mask_offset, (n, layout.mask_bytes)))
    checked = np.zeros(n, dtype=bool)
    return Cache(path, preprocess, writer.indices, images, masks, sizes, built, writer, sums, checked)


def _is_complete(path: Path, layout: FileLayout) -> bool:
    """Whether it is there, in full length, with the sizes and checksums that were written."""
    if not path.is_file() or path.stat().st_size != layout.total:
        return False
    whole = _table_sum(path, layout) == int(np.fromfile(path, dtype=np.uint32, offset=layout.end)[0])
    if not whole:
        print(f"sightline: {path}: damaged; the images are decoded again", file=sys.stderr)
    return whole


def _write_error(folder: Path, error: OSError, needed: int) -> UserError:
    reason = (error.strerror or str(error)).lower()
    if error.errno in DISK_FULL:
        return UserError(
            f"{folder}: no space for the cache of decoded images, {needed / 1e9:.3g} GB ({reason}); free some, choose "
            "another folder, or run without --cache"
        )
    return UserError(f"{folder}: cannot write the cache of decoded images ({reason}); choose another folder")
