"""From a method and rows to answers."""

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
from ..data.images import Canvas
from ..data.rows import SPLITS, Rows
from ..sight import Method, Sight
from ..vit.model import Input
from .predictions import Predictions


def sight_for(method: Method, images: Tensor, masks: Tensor | None) -> Sight:
    """Where the method looks, or the sight that given masks allow."""
    return method.look_at(images, masks) if masks is not None and method.accepts_masks else method.look(images)


def sight_for_prediction(method: Method, images: Tensor, masks: Tensor | None) -> Sight:
    """The same, but `look` is not called where the prediction does not depend on it."""
    return sight_for(method, images, masks) if method.uses_sight else Sight.everything(images)


def answer(
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
    """Every process answers its share; all of them get all answers, in the order of `indices`."""
    rows = method.with_masks(rows)
    batches = inference_batches(
        rows, indices, expects, accelerator, batch=batch, workers=workers, cache=cache, masks=method.needs_masks
    )
    try:
        return predict_batches(method, rows, batches, accelerator)
    finally:
        batches.close()


def predict_batches(method: Method, rows: Rows, batches: Batches, accelerator: Accelerator) -> Predictions:
    """The same, of batches that are open already and stay open."""

    def logits(images: Tensor, masks: Tensor | None) -> Tensor:
        return method.judge(images, sight_for_prediction(method, images, masks)).logits

    return predictions_from_logits(rows, batches.indices, map_batches(logits, batches, accelerator))


def predictions_from_logits(rows: Rows, order: np.ndarray, logits: np.ndarray) -> Predictions:
    """What these logits [n, C] say of the rows `order`."""
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
    """Every row once, as the model expects to see it; this process's share. A folder to `cache` in is that of
    training, or like it: what is decoded there already is not decoded again."""
    canvas = Canvas.of(expects)
    if isinstance(cache, Path):
        with accelerator.main_process_first():
            cache = Cache.open(rows, canvas, cache, indices, workers=max(1, workers))
    return Batches(
        rows, indices, canvas, max(batch, accelerator.num_processes), shuffle=False, seed=0,
        workers=workers, cache=cache, rank=accelerator.process_index, world=accelerator.num_processes, masks=masks,
    )  # fmt: skip


@torch.no_grad()
def map_batches(
    function: Callable[[Tensor, Tensor | None], Tensor], batches: Batches, accelerator: Accelerator
) -> np.ndarray:
    """float32 [n, ...]: what `function` makes of every picture (and its mask, where the batches have masks), on every
    process, in the order of the rows' indices."""
    mine = []
    for some in watched(batches.epoch(0), len(batches)):
        if len(some):
            some = some.to(accelerator.device)
            with accelerator.autocast():
                made = function(some.images.float() / 255, some.masks)
            mine.append((some.indices, made.float()))  # on the device until the end: it need not wait for each batch
    parts = gather_object([(indices.cpu().numpy(), made.cpu().numpy()) for indices, made in mine])
    order = np.concatenate([part[0] for part in parts])
    back = np.empty(len(order), dtype=np.int64)
    back[np.argsort(batches.indices, kind="stable")] = np.argsort(order, kind="stable")
    return np.concatenate([part[1] for part in parts])[back]
