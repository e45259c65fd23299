"""Decoded pictures, kept: one memory-mapped file per choice of rows and canvas, built once.

The file holds all pictures, then all masks (one bit per pixel), then the sizes of the files they came from.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import warnings
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor

from ..console.terminal import watched
from ..errors import UserError
from .batches import Workers
from .fingerprints import file_stamps
from .images import Canvas, decode
from .rows import Rows

FORMAT = 2
CHUNK = 32  # pictures decoded and written at a time
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Layout:
    """What is where in the file, in bytes."""

    count: int
    size: tuple[int, int]
    masks: bool

    @property
    def picture(self) -> int:
        return 3 * self.size[0] * self.size[1]

    @property
    def mask(self) -> int:
        return -(-self.size[0] * self.size[1] // 8) if self.masks else 0

    @property
    def masks_from(self) -> int:
        return self.count * self.picture

    @property
    def sizes_from(self) -> int:
        return self.masks_from + self.count * self.mask

    @property
    def total(self) -> int:
        return self.sizes_from + self.count * 8


@dataclass(frozen=True, eq=False)
class Cache:
    """The decoded pictures of the rows `indices`, bit for bit what `decode` gives."""

    path: Path
    canvas: Canvas
    indices: np.ndarray  # int64 [n]: the rows, in the order of the file
    images: Tensor  # uint8 [n, 3, h, w]: memory-mapped, or on a device
    masks: Tensor | None  # uint8 [n, ⌈h·w / 8⌉]: one bit per pixel
    sizes: np.ndarray  # int32 [n, 2]: width, height of the files
    built: bool  # just now; otherwise it was there

    @classmethod
    def open(
        cls, rows: Rows, canvas: Canvas, folder: Path, indices: np.ndarray, *, workers: int | None = None
    ) -> Cache:
        """Builds the file if there is none for just these pictures; by default with a process per processor."""
        indices = np.asarray(indices, dtype=np.int64)
        assert len(indices) > 0, "a cache of nothing"
        layout = Layout(len(indices), canvas.size, rows.masks is not None)
        h, w = canvas.size
        path = folder / f"decoded-{w}x{h}-{fingerprint(rows, canvas, indices)}.bin"
        built = not _is_complete(path, layout)
        if built:
            most = max(1, len(indices) // (2 * CHUNK))
            built = _build(_Writer(rows, indices, canvas, layout), path, min(most, workers or _processors()))
        return _mapped(path, canvas, indices, layout, built)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + (0 if self.masks is None else self.masks.nbytes)

    def to(self, device: torch.device | str, *, at_most: int | None = None) -> Cache:
        """Resident on the device if that takes no more than `at_most` bytes (default: half of what is free there).

        Otherwise the cache as it is, in its file.
        """
        device = torch.device(device)
        if self.nbytes > (_free(device) // 2 if at_most is None else at_most):
            return self
        masks = None if self.masks is None else self.masks.to(device, copy=True)
        return replace(self, images=self.images.to(device, copy=True), masks=masks)

    def positions(self, chosen: np.ndarray) -> np.ndarray:
        """Where rows lie in the file."""
        at = self._where[chosen]
        assert (at >= 0).all(), "rows that are not in this cache"
        return at

    def pictures(self, at: np.ndarray, *, pin: bool = False) -> Tensor:
        """uint8 [b, 3, h, w]."""
        if self.device.type != "cpu":
            return self.images[torch.from_numpy(at).to(self.device, non_blocking=True)]
        shape = (len(at), *self.images.shape[1:])
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pin else torch.from_numpy(np.empty(shape, "u1"))
        # NumPy, because torch would share the copying among threads, which then wait for those that train.
        np.take(self.images.numpy(), at, axis=0, out=out.numpy(), mode="clip")
        return out

    def outlines(self, at: np.ndarray) -> Tensor | None:
        """bool [b, h, w]: the masks."""
        if self.masks is None:
            return None
        h, w = self.canvas.size
        if self.device.type == "cpu":
            bits = np.unpackbits(self.masks.numpy()[at], axis=1, count=h * w)
            return torch.from_numpy(bits.view(bool).reshape(-1, h, w))
        packed = self.masks[torch.from_numpy(at).to(self.device, non_blocking=True)]
        return unpacked(packed, (h, w))

    @cached_property
    def _where(self) -> np.ndarray:
        where = np.full(self.indices.max() + 1, -1, dtype=np.int64)
        where[self.indices] = np.arange(len(self.indices))
        return where


def unpacked(bits: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [b, ⌈h·w / 8⌉], first pixel in the highest bit -> bool [b, h, w], on any device."""
    powers = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] & powers) != 0).flatten(1)[:, : size[0] * size[1]].reshape(-1, *size)


def fingerprint(rows: Rows, canvas: Canvas, indices: np.ndarray) -> str:
    """Changes with the files (path, size, time of change or checksum), their order, the canvas and the decoder."""
    digest = hashlib.sha256(f"{FORMAT} {PIL.__version__} {sorted(asdict(canvas).items())}\n".encode())
    root = os.fspath(rows.root)
    for column in (rows.images, rows.masks or []):
        paths = [column[i] for i in indices] if column else []
        for path, stamp in zip(paths, file_stamps(rows.root, paths), strict=True):
            digest.update(f"{path}\0{stamp}\0{_changed(root, path) if stamp else 0}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()[:24]


def _changed(root: str, path: str) -> int:
    """When a file was last written; 0 in an archive, whose stamps are checksums."""
    try:
        return os.stat(os.path.join(root, path)).st_mtime_ns  # noqa: PTH116, PTH118 (a Path per file is slow)
    except OSError:
        return 0


@dataclass(frozen=True, eq=False)
class _Writer:
    """Decodes one chunk of pictures after the other, straight into the file."""

    rows: Rows
    indices: np.ndarray
    canvas: Canvas
    layout: Layout
    path: Path = Path()

    def __call__(self, chunk: int) -> int:
        first, layout = chunk * CHUNK, self.layout
        samples = [decode(self.rows, int(i), self.canvas) for i in self.indices[first : first + CHUNK]]
        nothing = torch.zeros(self.canvas.size, dtype=torch.bool)
        try:
            with self.path.open("r+b") as file:
                file.seek(first * layout.picture)
                file.writelines(sample.image.numpy().data for sample in samples)
                if layout.masks:
                    file.seek(layout.masks_from + first * layout.mask)
                    masks = (nothing if sample.mask is None else sample.mask for sample in samples)
                    file.writelines(np.packbits(mask.numpy()).data for mask in masks)
                file.seek(layout.sizes_from + first * 8)
                file.write(np.array([sample.size for sample in samples], dtype=np.int32).data)
        except OSError as error:
            raise _cannot_write(self.path.parent, error, layout.total) from error
        return len(samples)


def _build(writer: _Writer, path: Path, workers: int) -> bool:
    """True: it was built here. False: another process did, while this one waited."""
    folder, needed = path.parent, writer.layout.total
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder) as alone:
            if _is_complete(path, writer.layout):
                return False
            if alone:
                for left_behind in folder.glob("decoded-*.partial"):
                    left_behind.unlink(missing_ok=True)
            partial = path.with_name(f"{path.stem}-{secrets.token_hex(4)}.partial")
            try:
                _reserve(partial, needed)
                _fill(replace(writer, path=partial), workers)
                partial.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error, needed) from error
    return True


def _reserve(path: Path, needed: int) -> None:
    """Takes the room at once: a disk that is full is then known before the work, not after it."""
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, needed)
        else:
            file.truncate(needed)


def _fill(writer: _Writer, workers: int) -> None:
    crew = Workers(writer, workers if workers > 1 else 0)
    chunks = range(-(-writer.layout.count // CHUNK))
    try:
        for _ in watched(crew.run(chunks), len(chunks), "decoding pictures"):
            pass
    finally:
        crew.close()
    with writer.path.open("rb") as file:
        os.fsync(file.fileno())  # or the name could outlive a power cut and the pictures not


@contextlib.contextmanager
def _alone_in(folder: Path) -> Generator[bool]:
    """Waits for its turn to build in this folder; False where the file system knows no locks."""
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


def _mapped(path: Path, canvas: Canvas, indices: np.ndarray, layout: Layout, built: bool) -> Cache:
    n = layout.count
    sizes = np.fromfile(path, dtype=np.int32, offset=layout.sizes_from).reshape(n, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # we do not write
        images = torch.from_numpy(np.memmap(path, np.uint8, "r", 0, (n, 3, *canvas.size)))
        masks = None
        if layout.masks:
            masks = torch.from_numpy(np.memmap(path, np.uint8, "r", layout.masks_from, (n, layout.mask)))
    return Cache(path, canvas, indices, images, masks, sizes, built)


def _is_complete(path: Path, layout: Layout) -> bool:
    return path.is_file() and path.stat().st_size == layout.total


def _cannot_write(folder: Path, error: OSError, needed: int) -> UserError:
    why = (error.strerror or str(error)).lower()
    if error.errno in NO_ROOM:
        return UserError(
            f"{folder}: no room for the decoded pictures, which take {needed / 1e9:.3g} GB ({why}); make room, choose "
            "another folder, or go without a cache"
        )
    return UserError(f"{folder}: decoded pictures cannot be kept here ({why}); choose another folder")


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
