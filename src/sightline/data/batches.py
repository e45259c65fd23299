"""Rows to batches: decoded ahead of time, in an order that is known from the seed alone.

batches = Batches(rows, indices, canvas, 256, shuffle=True, seed=0, workers=8)
for batch in batches.epoch(3, start=10):    # exactly what an uninterrupted run would have seen from there on
    ...
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import UserError
from .images import Canvas, Placement, decode
from .rows import Rows

if TYPE_CHECKING:
    from .cache import Cache


@dataclass(frozen=True, eq=False)
class Batch:
    """b pictures and what is known about them. A rank's share of a small last batch may hold none: b = 0."""

    images: Tensor  # uint8 [b, 3, h, w]
    labels: Tensor  # int64 [b]
    groups: Tensor | None  # int64 [b]
    masks: Tensor | None  # bool [b, h, w]; nothing is True where an image has no mask
    indices: Tensor  # int64 [b], into the rows
    has_mask: Tensor | None = None  # bool [b]
    boxes: Tensor | None = None  # float32 [b, k, 4]; NaN where an image has fewer than k
    keypoints: Tensor | None = None  # float32 [b, K, 3]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Batch:
        """Does not wait for the copy where the memory is pinned."""
        return self._each(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


class Batches:
    """Batches of the rows `indices`, of which every rank gets its share.

    `batch` counts the images of all ranks together: `world` processes see what one would see. With `weights` (one per
    row of `rows`) an epoch draws as many images with replacement. With a `cache` nothing is decoded, so there are no
    workers; if it lies on a device, so do the batches. `waited` adds up the seconds spent waiting for data.
    """

    def __init__(
        self,
        rows: Rows,
        indices: np.ndarray,
        canvas: Canvas,
        batch: int,
        *,
        shuffle: bool,
        seed: int,
        workers: int = 0,
        cache: Cache | None = None,
        rank: int = 0,
        world: int = 1,
        weights: np.ndarray | None = None,
        drop_last: bool = False,
        masks: bool = True,
        pin: bool = False,
        ahead: int = 2,
    ):
        self.indices = np.asarray(indices, dtype=np.int64)
        if len(self.indices) == 0:
            raise UserError(f"{rows.name}: no images to make batches of; look at its splits")
        if batch < world:
            raise UserError(f"a batch of {batch} cannot be shared by {world} processes; give each at least one image")
        if drop_last and len(self.indices) < batch:
            raise UserError(f"{rows.name}: too few images ({len(self.indices)}) for a batch of {batch}; lower it")
        self.batch, self.shuffle, self.seed, self.drop_last = batch, shuffle, seed, drop_last
        self.rank, self.world = rank, world
        self._shares_of_draw = None if weights is None else _cumulative(weights, self.indices, rows, shuffle)
        self.waited = 0.0
        if cache is None:
            self._workers = Workers(Decoder(rows, canvas, masks), workers, ahead=ahead, pin=pin)
        else:
            on_device = cache.device.type != "cpu"
            loader = FromCache(rows, canvas, masks, cache, pin and not on_device and torch.cuda.is_available())
            self._workers = Workers(loader, 0, ahead=0 if on_device else ahead, pin=loader.pin)

    def __len__(self) -> int:
        """Batches in an epoch; the same on every rank."""
        return len(self.indices) // self.batch if self.drop_last else -(-len(self.indices) // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """int64 [n]: the rows of this epoch, a function of seed and epoch alone."""
        if not self.shuffle:
            return self.indices
        generator = np.random.default_rng([self.seed, epoch])
        if self._shares_of_draw is None:
            return generator.permutation(self.indices)
        draws = generator.random(len(self.indices)) * self._shares_of_draw[-1]
        return self.indices[np.searchsorted(self._shares_of_draw, draws, side="right")]

    def shares(self, epoch: int) -> list[np.ndarray]:
        """This rank's rows of every batch: a contiguous part of it, at most one longer than another rank's."""
        order = self.order(epoch)
        starts = range(0, len(self) * self.batch, self.batch)
        return [np.array_split(order[start : start + self.batch], self.world)[self.rank] for start in starts]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on. One epoch at a time: a new one ends the one before."""
        assert 0 <= start <= len(self), f"batch {start} of {len(self)}"
        return self._timed(self._workers.run(self.shares(epoch)[start:]))

    def close(self) -> None:
        """Ends the worker processes, which otherwise wait for the next epoch."""
        self._workers.close()

    def _timed(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(stream, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch


@dataclass(eq=False)
class OnTheWay:
    """Batches that something is done about before they arrive: a subclass says what, in `epoch`."""

    batches: Batches

    @property
    def indices(self) -> np.ndarray:
        return self.batches.indices

    def __len__(self) -> int:
        return len(self.batches)


def balanced(codes: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Weights, one per row, with which every class (or group) among `indices` is drawn equally often."""
    counts = np.bincount(codes[indices], minlength=codes.max() + 1)
    return 1.0 / np.maximum(counts, 1)[codes]


@dataclass(frozen=True, eq=False)
class Decoder:
    """Decodes a batch from its files."""

    rows: Rows
    canvas: Canvas
    masks: bool

    def __call__(self, chosen: np.ndarray) -> Batch:
        rows, (h, w), b = self.rows, self.canvas.size, len(chosen)
        # NumPy, because torch would share the copying among threads, which then wait for those that train.
        images = np.empty((b, 3, h, w), dtype=np.uint8)
        masks = np.zeros((b, h, w), dtype=bool) if self.masks and rows.masks is not None else None
        sizes = np.empty((b, 2), dtype=np.int32)
        for k, i in enumerate(chosen):
            sample = decode(rows, int(i), self.canvas, mask=masks is not None)
            images[k], sizes[k] = sample.image.numpy(), sample.size
            if masks is not None and sample.mask is not None:
                masks[k] = sample.mask.numpy()
        outlines = None if masks is None else torch.from_numpy(masks)
        return _put_together(rows, self.canvas, chosen, torch.from_numpy(images), outlines, sizes)


@dataclass(frozen=True, eq=False)
class FromCache:
    """Takes a batch out of the cache."""

    rows: Rows
    canvas: Canvas
    masks: bool
    cache: Cache
    pin: bool = False

    def __post_init__(self):
        assert self.canvas == self.cache.canvas, "this cache is for another canvas"

    def __call__(self, chosen: np.ndarray) -> Batch:
        at = self.cache.positions(chosen)
        images = self.cache.pictures(at, pin=self.pin)
        masks = self.cache.outlines(at) if self.masks and self.rows.masks is not None else None
        batch = _put_together(self.rows, self.canvas, chosen, images, masks, self.cache.sizes[at])
        return batch if images.device.type == "cpu" else batch.to(images.device)


class Workers:
    """Does a job for one turn after the other, ahead of time: in a thread, or in processes that stay alive.

    The results come in the order of the turns, and a UserError comes out as it went in.
    """

    def __init__(self, job: Callable[[Any], Any], workers: int, *, ahead: int = 2, pin: bool = False):
        self.job, self.workers, self.ahead = job, workers, ahead
        self.pin = pin and torch.cuda.is_available()
        self._turns = _Turns()
        self._loader: DataLoader | None = None

    def run(self, turns: Sequence[Any]) -> Iterator[Any]:
        if self.workers > 0:
            return self._in_processes(turns)
        job = self._pinned if self.pin else self.job
        return _in_thread(job, turns, self.ahead) if self.ahead > 0 else map(job, turns)

    def close(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None and loader._iterator is not None:  # waiting for the garbage collector can take seconds
            loader._iterator._shutdown_workers()  # ty: ignore[missing-attribute]

    def _pinned(self, turn: Any) -> Any:
        return self.job(turn).pin_memory()

    def _in_processes(self, turns: Sequence[Any]) -> Iterator[Any]:
        if self._loader is None:
            self._loader = DataLoader(
                _Guarded(self.job),  # ty: ignore[invalid-argument-type]
                sampler=self._turns,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=max(1, self.ahead),
                pin_memory=self.pin,
                generator=torch.Generator(),  # or it would draw its seed from the global one
            )
        self._turns.pending = turns
        try:
            for result in self._loader:
                if isinstance(result, _Failure):
                    raise UserError(result.message)
                yield result
                assert self._turns.pending is turns, "another epoch was begun meanwhile"
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Traceback" in str(error):
                raise
            self.close()
            raise UserError(
                f"a decoding process died ({str(error).splitlines()[0]}); use fewer workers, or give the machine more "
                "(shared) memory"
            ) from error


def _in_thread(job: Callable[[Any], Any], turns: Sequence[Any], ahead: int) -> Iterator[Any]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    coming = deque()
    try:
        for turn in turns:
            coming.append(pool.submit(job, turn))
            if len(coming) > ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Turns:
    """What the worker processes are to do next: the loader asks anew for every epoch."""

    pending: Sequence[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


@dataclass(frozen=True)
class _Failure:
    message: str


@dataclass(frozen=True)
class _Guarded:
    """Hands a UserError over as a value: torch would wrap it into a traceback."""

    job: Callable[[Any], Any]

    def __getitem__(self, turn: Any) -> Any:
        try:
            return self.job(turn)
        except UserError as error:
            return _Failure(str(error))


def _as_it_is(result: Any) -> Any:
    return result


def _put_together(
    rows: Rows, canvas: Canvas, chosen: np.ndarray, images: Tensor, masks: Tensor | None, sizes: np.ndarray
) -> Batch:
    """Pictures, and what the rows know about them; `sizes` are those of the files, for the geometry."""
    boxes = keypoints = None
    if rows.boxes is not None or rows.keypoints is not None:
        places = [Placement.of((int(w), int(h)), canvas) for w, h in sizes]
        if rows.boxes is not None:
            boxes = _padded([place.boxes(rows.boxes[i]) for place, i in zip(places, chosen, strict=True)])
        if rows.keypoints is not None:
            keypoints = torch.zeros(len(chosen), *rows.keypoints.shape[1:])
            for k, (place, i) in enumerate(zip(places, chosen, strict=True)):
                keypoints[k] = place.keypoints(rows.keypoints[i])
    return Batch(
        images=images,
        labels=torch.from_numpy(rows.labels[chosen].astype(np.int64)),
        groups=None if rows.groups is None else torch.from_numpy(rows.groups[chosen].astype(np.int64)),
        masks=masks,
        indices=torch.from_numpy(chosen.astype(np.int64)),
        has_mask=None if masks is None or rows.masks is None else torch.tensor([rows.masks[i] != "" for i in chosen]),
        boxes=boxes,
        keypoints=keypoints,
    )


def _padded(boxes: list[Tensor]) -> Tensor:
    padded = torch.full((len(boxes), max((len(each) for each in boxes), default=0), 4), torch.nan)
    for k, each in enumerate(boxes):
        padded[k, : len(each)] = each
    return padded


def _cumulative(weights: np.ndarray, indices: np.ndarray, rows: Rows, shuffle: bool) -> np.ndarray:
    assert shuffle, "weights are for drawing at random"
    assert len(weights) == len(rows), "one weight per row, not per index"
    chosen = np.asarray(weights, dtype=np.float64)[indices]
    if not (np.isfinite(chosen).all() and (chosen >= 0).all() and chosen.sum() > 0):
        raise UserError(f"{rows.name}: the weights of its images must be 0 or more, and not all 0")
    return chosen.cumsum()
