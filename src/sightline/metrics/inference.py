"""Inference: from a method and rows of a dataset to predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..console.terminal import watched
from ..data.batches import Batches
from ..data.cache import Cache
from ..data.images import Preprocess
from ..data.rows import SPLITS, Rows
from ..sight import Method, Sight
from ..vit.model import Input
from .predictions import Predictions

CPU_BATCH = 16  # images at a time on a CPU: with more, what a layer hands to the next no longer fits into its cache


def at_once(batch: int, device: torch.device) -> int:
    """How many images of a batch inference takes at a time."""
    return min(batch, CPU_BATCH) if device.type == "cpu" else batch


def sight_for(method: Method, images: Tensor, masks: Tensor | None) -> Sight:
    """The sight that the method chooses or, where masks are given and it accepts them, the sight they allow."""
    return method.look_at(images, masks) if masks is not None and method.accepts_masks else method.look(images)


def sight_and_maps(method: Method, images: Tensor, masks: Tensor | None) -> tuple[Sight, dict[str, Tensor]]:
    """As `sight_for`, and the method's maps; in one pass where the method can."""
    if masks is not None and method.accepts_masks:
        return method.look_at(images, masks), method.maps(images)
    return method.look_with_maps(images)


def sight_for_prediction(method: Method, images: Tensor, masks: Tensor | None) -> Sight:
    """As `sight_for`, but without calling `look` where the prediction does not depend on the sight."""
    return sight_for(method, images, masks) if method.uses_sight else Sight.everything(images)


def sample_evenly(indices: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the indices, evenly spaced."""
    return indices[np.linspace(0, len(indices) - 1, min(count, len(indices))).round().astype(int)]


def predict_rows(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int = 64,
    workers: int = 0,
    cache: Cache | Path | None = None,
) -> Predictions:
    """Predictions for these rows, in the order of `indices`, on every process; each process computes its share."""
    rows = method.with_masks(rows)
    batches = inference_batches(
        rows, indices, expects, accelerator, batch=batch, workers=workers, cache=cache, masks=method.needs_masks
    )
    try:
        return predict_batches(method, rows, batches, accelerator)
    finally:
        batches.close()


def predict_batches(method: Method, rows: Rows, batches: Batches, accelerator: Accelerator) -> Predictions:
    """As `predict_rows`, for batches that are already open and stay open."""

    def logits(images: Tensor, masks: Tensor | None) -> Tensor:
        return method.judge(images, sight_for_prediction(method, images, masks)).logits

    return predictions_from_logits(rows, batches.indices, map_batches(logits, batches, accelerator))


def predictions_from_logits(rows: Rows, order: np.ndarray, logits: np.ndarray) -> Predictions:
    """The predictions that these logits [n, C] make for the rows `order`."""
    splits = {SPLITS[i] for i in np.unique(rows.splits[order])}
    return Predictions.from_logits(
        [rows.images[i] for i in order],
        rows.labels[order],
        logits,
        rows.classes,
        None if rows.groups is None else rows.groups[order],
        rows.group_names,
        "+".join(sorted(splits)),
    )


def inference_batches(
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int,
    workers: int,
    cache: Cache | Path | None = None,
    masks: bool = False,
) -> Batches:
    """This process's share of the rows, each once, preprocessed as the model expects. `cache` may be the folder that
    training used: images decoded there are not decoded again."""
    preprocess, batch = Preprocess.of(expects), at_once(batch, accelerator.device)
    if isinstance(cache, str | Path):
        with accelerator.main_process_first():
            cache = Cache.open(rows, preprocess, cache, indices, workers=max(1, workers))
    return Batches(
        rows, indices, preprocess, max(batch, accelerator.num_processes), shuffle=False, seed=0,
        workers=workers, cache=cache, rank=accelerator.process_index, world=accelerator.num_processes, masks=masks,
    )  # fmt: skip


@torch.no_grad()
def map_batches(
    function: Callable[[Tensor, Tensor | None], Tensor], batches: Batches, accelerator: Accelerator
) -> np.ndarray:
    """float32 [n, ...]: `function` of every image (and its mask, where the batches have masks), on every process, in
    the order of the batches' indices."""
    own = []
    for batch in watched(batches.epoch(0), len(batches)):
        if len(batch):
            batch = batch.to(accelerator.device)
            with accelerator.autocast():
                values = function(batch.images.float() / 255, batch.masks)
            own.append(
                (batch.indices, values.float())
            )  # on the device until the end, so as not to synchronise each time
    gathered = gather_object([(indices.cpu().numpy(), values.cpu().numpy()) for indices, values in own])
    order = np.concatenate([indices for indices, _ in gathered])
    back = np.empty(len(order), dtype=np.int64)
    back[np.argsort(batches.indices, kind="stable")] = np.argsort(order, kind="stable")
    return np.concatenate([values for _, values in gathered])[back]
