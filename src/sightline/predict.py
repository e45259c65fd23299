"""From a method and rows to answers."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor

from .answers import Answers
from .data.batches import Batches
from .data.cache import Cache
from .data.images import Canvas
from .data.rows import SPLITS, Rows
from .errors import UserError
from .sight import Method
from .vit import Input


def make_accelerator(device: str = "auto", precision: str = "fp32") -> Accelerator:
    """Where to compute: `auto`, `cpu` or `cuda`; and how exactly: `fp32` or `bf16`. Ends the one made before."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no GPU that torch can use")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # Accelerate keeps the first settings of a Python process for all later ones.
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=device == "cpu", mixed_precision="bf16" if precision == "bf16" else "no")


def answer(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int = 64,
    workers: int = 0,
    cache: Cache | None = None,
) -> Answers:
    """Every process answers its share; all of them get all answers, in the order of `indices`."""
    batches = answering_batches(rows, indices, expects, accelerator, batch=batch, workers=workers, cache=cache)
    try:
        return answer_batches(method, rows, batches, accelerator)
    finally:
        batches.close()


def answer_batches(method: Method, rows: Rows, batches: Batches, accelerator: Accelerator) -> Answers:
    """The same, of batches that are open already and stay open."""
    found = over_batches(lambda images: method.judge(images, method.look(images)).logits, batches, accelerator)
    order = batches.indices
    splits = {SPLITS[i] for i in np.unique(rows.splits[order])}
    return Answers.from_logits(
        [rows.images[i] for i in order],
        rows.labels[order],
        found,
        rows.classes,
        None if rows.groups is None else rows.groups[order],
        rows.group_names,
        "+".join(sorted(splits)),
    )


def answering_batches(
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int,
    workers: int,
    cache: Cache | None = None,
) -> Batches:
    """Every row once, as the model expects to see it; this process's share."""
    return Batches(
        rows, indices, Canvas.of(expects), max(batch, accelerator.num_processes), shuffle=False, seed=0,
        workers=workers, cache=cache, rank=accelerator.process_index, world=accelerator.num_processes, masks=False,
    )  # fmt: skip


@torch.no_grad()
def over_batches(function: Callable[[Tensor], Tensor], batches: Batches, accelerator: Accelerator) -> np.ndarray:
    """float32 [n, ...]: what `function` makes of every picture, on every process, in the order of the rows' indices."""
    mine = []
    for some in batches.epoch(0):
        if len(some):
            images = some.images.to(accelerator.device).float() / 255
            with accelerator.autocast():
                made = function(images)
            mine.append((some.indices.cpu().numpy(), made.float().cpu().numpy()))
    parts = gather_object(mine)
    order = np.concatenate([part[0] for part in parts])
    back = np.empty(len(order), dtype=np.int64)
    back[np.argsort(batches.indices, kind="stable")] = np.argsort(order, kind="stable")
    return np.concatenate([part[1] for part in parts])[back]
