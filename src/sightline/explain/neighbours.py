"""What features know without a head: whether a picture's nearest neighbours are of its class."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from ..data.rows import Rows
from ..errors import UserError
from ..metrics.inference import inference_batches, map_batches, sight_for_prediction
from ..sight import Method
from ..vit.model import Input

NEIGHBOURS = (1, 10)
AT_ONCE = 1024


def features(
    method: Method, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator,
    *, batch: int, workers: int, cache: Path | None = None,
) -> Tensor:  # fmt: skip
    """[n, D], of length 1: the first token that each answer is made from, which is CLS."""

    def embed(images: Tensor, masks: Tensor | None) -> Tensor:
        tokens = method.judge(images, sight_for_prediction(method, images, masks)).tokens
        if tokens is None:
            raise UserError(f"{type(method).__name__}: says nothing of its features")
        return F.normalize(tokens[:, 0].float(), dim=-1)

    batches = inference_batches(
        method.with_masks(rows), indices, expects, accelerator,
        batch=batch, workers=workers, cache=cache, masks=method.needs_masks,
    )  # fmt: skip
    with closing(batches):
        return torch.from_numpy(map_batches(embed, batches, accelerator))


def named_rightly(
    queries: Tensor, labels: Tensor, bank: Tensor | None = None, bank_labels: Tensor | None = None
) -> dict[int, np.ndarray]:
    """Per number of NEIGHBOURS, or of as many as there are, bool [n]: whether those with the largest cosine name the
    right class, each counting by exp(cosine / 0.07) (DINO, sec. 4.1). Without a bank they are the other queries."""
    others = queries if bank is None else bank
    known = labels if bank_labels is None else bank_labels
    most = min(max(NEIGHBOURS), len(others) - (bank is None))
    if most < 1:
        raise UserError("one picture alone has no neighbours")
    classes = int(max(known.max(), labels.max())) + 1
    found: dict[int, list[Tensor]] = {min(k, most): [] for k in NEIGHBOURS}
    for start in range(0, len(queries), AT_ONCE):
        some = queries[start : start + AT_ONCE]
        likeness = some @ others.T
        if bank is None:
            likeness[torch.arange(len(some)), start + torch.arange(len(some))] = -2
        near = likeness.topk(most, dim=1)
        for k, parts in found.items():
            votes = torch.zeros(len(some), classes)
            votes.scatter_add_(1, known[near.indices[:, :k]], (near.values[:, :k] / 0.07).exp())
            parts.append(votes.argmax(dim=1) == labels[start : start + AT_ONCE])
    return {k: torch.cat(parts).numpy() for k, parts in found.items()}
