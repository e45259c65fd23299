"""From a method and rows to answers."""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .answers import Answers
from .data.batches import Batches
from .data.cache import Cache
from .data.images import Canvas
from .data.rows import SPLITS, Rows
from .sight import Method
from .vit import Input


@torch.no_grad()
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
    """Every process answers its share; all of them get all answers."""
    batches = Batches(
        rows, indices, Canvas.of(expects), max(batch, accelerator.num_processes), shuffle=False, seed=0,
        workers=workers, cache=cache, rank=accelerator.process_index, world=accelerator.num_processes, masks=False,
    )  # fmt: skip
    chosen, logits = [], []
    for some in batches.epoch(0):
        if len(some) == 0:
            continue
        images = some.images.to(accelerator.device).float() / 255
        with accelerator.autocast():
            prediction = method.judge(images, method.look(images))
        chosen.append(some.indices.cpu().numpy())
        logits.append(prediction.logits.float().cpu().numpy())
    batches.close()
    mine = [(np.concatenate(chosen), np.concatenate(logits))] if chosen else []
    parts = gather_object(mine)
    order = np.concatenate([part[0] for part in parts])
    found = np.concatenate([part[1] for part in parts])
    back = np.argsort(order, kind="stable")
    order, found = order[back], found[back]
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
