"""The data loader: rows to batches, decoded ahead of time, in an order that depends on the seed only.

batches = Batches(rows, indices, preprocess, 256, shuffle=True, seed=0, workers=8)
for batch in batches.epoch(3, start=10):    # exactly what an uninterrupted run sees from batch 10 on
    ...
"""

from __future__ import annotations

import signal
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
from .images import Preprocess, ResizeCrop, decode
from .rows import Rows

if TYPE_CHECKING:
    from .cache import Cache


@dataclass(frozen=True, eq=False)
class Batch:
    """b images with their labels and annotations. A rank's share of a small last batch may be empty: b = 0."""

    images: Tensor  # uint8 [b, 3, h, w]
    labels: Tensor  # int64 [b]
    groups: Tensor | None  # int64 [b]
    masks: Tensor | None  # bool [b, h, w]; all False where an image has no mask
    indices: Tensor  # int64 [b], into the rows
    has_mask: Tensor | None = None  # bool [b]
    boxes: Tensor | None = None  # float32 [b, k, 4]; NaN where an image has fewer than k
    keypoints: Tensor | None = None  # float32 [b, K, 3]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Batch:
        """Does not wait for the copy where the memory is pinned."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


class Batches:
    """Batches of the rows `indices`; with several ranks, this rank's share of each.

    `batch` counts the images of all ranks together: `world` processes see what a single one would see. With `weights`
    (one per row of `rows`) an epoch draws as many images with replacement. With a `cache` nothing is decoded, so there
    are no workers; if it lies on a device, so do the batches. `wait_seconds` is the total time spent waiting for data.
    """

    def __init__(
        self,
        rows: Rows,
        indices: np.ndarray,
        preprocess: Preprocess,
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
            raise UserError(f"{rows.name}: no images to load; check its splits")
        if batch < world:
            raise UserError(f"batch size {batch} is too small for {world} processes; use at least {world}")
        if drop_last and len(self.indices) < batch:
            raise UserError(f"{rows.name}: {len(self.indices)} images do not fill a batch of {batch}; lower --batch")
        self.batch, self.shuffle, self.seed, self.drop_last = batch, shuffle, seed, drop_last
        self.rank, self.world = rank, world
        self._cumulative = None if weights is None else _cumulative_weights(weights, self.indices, rows, shuffle)
        self.wait_seconds = 0.0
        if cache is None:
            self._workers = Workers(Decoder(rows, preprocess, masks), workers, ahead=ahead, pin=pin)
        else:
            on_device = cache.device.type != "cpu"
            reader = CacheReader(rows, preprocess, masks, cache, pin and not on_device and torch.cuda.is_available())
            self._workers = Workers(reader, 0, ahead=0 if on_device else ahead, pin=reader.pin)

    def __len__(self) -> int:
        """Batches per epoch; the same on every rank."""
        return len(self.indices) // self.batch if self.drop_last else -(-len(self.indices) // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """int64 [n]: the rows of this epoch, a function of seed and epoch only."""
        if not self.shuffle:
            return self.indices
        generator = np.random.default_rng([self.seed, epoch])
        if self._cumulative is None:
            return generator.permutation(self.indices)
        draws = generator.random(len(self.indices)) * self._cumulative[-1]
        return self.indices[np.searchsorted(self._cumulative, draws, side="right")]

    def rank_batches(self, epoch: int) -> list[np.ndarray]:
        """This rank's rows of every batch: a contiguous part of it, at most one longer than another rank's."""
        order = self.order(epoch)
        starts = range(0, len(self) * self.batch, self.batch)
        return [np.array_split(order[start : start + self.batch], self.world)[self.rank] for start in starts]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on. One epoch at a time: a new one ends the one before."""
        assert 0 <= start <= len(self), f"batch {start} of {len(self)}"
        return self._timed(self._workers.run(self.rank_batches(epoch)[start:]))

    def close(self) -> None:
        """Ends the worker processes, which otherwise wait for the next epoch."""
        self._workers.close()

    def _timed(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            batch = next(stream, None)
            self.wait_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch


@dataclass(eq=False)
class TransformedBatches:
    """Base of wrappers around `Batches` that transform or observe every batch: a subclass implements `epoch`."""

    batches: Batches

    @property
    def indices(self) -> np.ndarray:
        return self.batches.indices

    def __len__(self) -> int:
        return len(self.batches)


def balanced_weights(codes: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Sampling weights, one per row, that draw every class (or group) among `indices` equally often."""
    counts = np.bincount(codes[indices], minlength=codes.max() + 1)
    return 1.0 / np.maximum(counts, 1)[codes]


@dataclass(frozen=True, eq=False)
class Decoder:
    """Decodes a batch from image files."""

    rows: Rows
    preprocess: Preprocess
    masks: bool

    def __call__(self, chosen: np.ndarray) -> Batch:
        rows, (h, w), b = self.rows, self.preprocess.size, len(chosen)
        # NumPy, because torch would copy in several threads, which compete with those that train.
        images = np.empty((b, 3, h, w), dtype=np.uint8)
        masks = np.zeros((b, h, w), dtype=bool) if self.masks and rows.masks is not None else None
        sizes = np.empty((b, 2), dtype=np.int32)
        for k, i in enumerate(chosen):
            sample = decode(rows, int(i), self.preprocess, mask=masks is not None)
            images[k], sizes[k] = sample.image.numpy(), sample.size
            if masks is not None and sample.mask is not None:
                masks[k] = sample.mask.numpy()
        mask_tensor = None if masks is None else torch.from_numpy(masks)
        return _make_batch(rows, self.preprocess, chosen, torch.from_numpy(images), mask_tensor, sizes)


@dataclass(frozen=True, eq=False)
class CacheReader:
    """Reads a batch from the cache of decoded images."""

    rows: Rows
    preprocess: Preprocess
    masks: bool
    cache: Cache
    pin: bool = False

    def __post_init__(self):
        assert self.preprocess == self.cache.preprocess, "this cache has another preprocessing"

    def __call__(self, chosen: np.ndarray) -> Batch:
        at = self.cache.positions(chosen)
        images = self.cache.read_images(at, pin=self.pin)
        masks = self.cache.read_masks(at) if self.masks and self.rows.masks is not None else None
        batch = _make_batch(self.rows, self.preprocess, chosen, images, masks, self.cache.sizes[at])
        return batch if images.device.type == "cpu" else batch.to(images.device)


class Workers:
    """Runs a job for a sequence of tasks, ahead of time: in a thread, or in processes that stay alive.

    The results come in the order of the tasks, and a UserError is raised here as it was raised in the worker.
    """

    def __init__(self, job: Callable[[Any], Any], workers: int, *, ahead: int = 2, pin: bool = False):
        self.job, self.workers, self.ahead = job, workers, ahead
        self.pin = pin and torch.cuda.is_available()
        self._tasks = _TaskSampler()
        self._loader: DataLoader | None = None

    def run(self, tasks: Sequence[Any]) -> Iterator[Any]:
        if self.workers > 0:
            return self._run_in_processes(tasks)
        job = self._run_pinned if self.pin else self.job
        return _run_in_thread(job, tasks, self.ahead) if self.ahead > 0 else map(job, tasks)

    def close(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None and loader._iterator is not None:  # waiting for the garbage collector can take seconds
            loader._iterator._shutdown_workers()  # ty: ignore[missing-attribute]

    def _run_pinned(self, task: Any) -> Any:
        return self.job(task).pin_memory()

    def _run_in_processes(self, tasks: Sequence[Any]) -> Iterator[Any]:
        if self._loader is None:
            self._loader = DataLoader(
                _CatchUserError(self.job),  # ty: ignore[invalid-argument-type]
                sampler=self._tasks,
                batch_size=None,
                collate_fn=_identity,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=max(1, self.ahead),
                pin_memory=self.pin,
                worker_init_fn=_leave_signals_to_the_main_process,
                generator=torch.Generator(),  # or it would draw its seed from the global one
            )
        self._tasks.pending = tasks
        try:
            for result in self._loader:
                if isinstance(result, UserError):
                    raise result
                yield result
                assert self._tasks.pending is tasks, "another epoch was started meanwhile"
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Traceback" in str(error):
                raise
            self.close()
            reason = str(error).splitlines()[0]
            raise UserError(f"a data-loading worker died ({reason}); lower --workers or add shared memory") from error


def _run_in_thread(job: Callable[[Any], Any], tasks: Sequence[Any], ahead: int) -> Iterator[Any]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    pending = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(job, task))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _TaskSampler:
    """The tasks of the current epoch: the DataLoader iterates over its sampler anew for every epoch."""

    pending: Sequence[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


@dataclass(frozen=True)
class _CatchUserError:
    """Returns a UserError as a value: torch would wrap it into a traceback."""

    job: Callable[[Any], Any]

    def __getitem__(self, task: Any) -> Any:
        try:
            return self.job(task)
        except UserError as error:
            return error


def _leave_signals_to_the_main_process(_: int) -> None:
    """Ctrl-C and schedulers signal every process of a group; the main one still needs data for the step it is in."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _identity(result: Any) -> Any:
    return result


def _make_batch(
    rows: Rows, preprocess: Preprocess, chosen: np.ndarray, images: Tensor, masks: Tensor | None, sizes: np.ndarray
) -> Batch:
    """Images and their annotations; `sizes` are those of the image files, for the geometry."""
    boxes = keypoints = None
    if rows.boxes is not None or rows.keypoints is not None:
        geometries = [ResizeCrop.of((int(w), int(h)), preprocess) for w, h in sizes]
        if rows.boxes is not None:
            boxes = _pad_boxes([geometry.boxes(rows.boxes[i]) for geometry, i in zip(geometries, chosen, strict=True)])
        if rows.keypoints is not None:
            keypoints = torch.zeros(len(chosen), *rows.keypoints.shape[1:])
            for k, (geometry, i) in enumerate(zip(geometries, chosen, strict=True)):
                keypoints[k] = geometry.keypoints(rows.keypoints[i])
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


def _pad_boxes(boxes: list[Tensor]) -> Tensor:
    padded = torch.full((len(boxes), max(map(len, boxes), default=0), 4), torch.nan)
    for k, image_boxes in enumerate(boxes):
        padded[k, : len(image_boxes)] = image_boxes
    return padded


def _cumulative_weights(weights: np.ndarray, indices: np.ndarray, rows: Rows, shuffle: bool) -> np.ndarray:
    assert shuffle, "sampling weights need shuffle=True"
    assert len(weights) == len(rows), "one weight per row, not per index"
    chosen = np.asarray(weights, dtype=np.float64)[indices]
    if not (np.isfinite(chosen).all() and (chosen >= 0).all() and chosen.sum() > 0):
        raise UserError(f"{rows.name}: sampling weights must be 0 or more, and not all 0")
    return chosen.cumsum()
