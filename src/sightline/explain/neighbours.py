"""k-nearest-neighbour accuracy of the features: are an image's nearest neighbours of its class?"""

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
TEMPERATURE = 0.07
CHUNK = 1024


def features(
    method: Method, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator,
    *, batch: int, workers: int, cache: Path | None = None,
) -> Tensor:  # fmt: skip
    """[n, D], L2-normalised: the first token that the prediction is made from, which is CLS."""

    def embed(images: Tensor, masks: Tensor | None) -> Tensor:
        tokens = method.judge(images, sight_for_prediction(method, images, masks)).tokens
        if tokens is None:
            raise UserError(f"{type(method).__name__}: does not return its features")
        return F.normalize(tokens[:, 0].float(), dim=-1)

    batches = inference_batches(
        method.with_masks(rows), indices, expects, accelerator,
        batch=batch, workers=workers, cache=cache, masks=method.needs_masks,
    )  # fmt: skip
    with closing(batches):
        return torch.from_numpy(map_batches(embed, batches, accelerator))


def knn_correct(
    queries: Tensor, labels: Tensor, bank: Tensor | None = None, bank_labels: Tensor | None = None
) -> dict[int, np.ndarray]:
    """For each k of NEIGHBOURS, bool [n]: whether the k nearest neighbours by cosine vote for the true class, weighted
    by exp(cosine / 0.07) (DINO, sec. 4.1). Without a bank, the neighbours are the other queries."""
    others = queries if bank is None else bank
    other_labels = labels if bank_labels is None else bank_labels
    most = min(max(NEIGHBOURS), len(others) - (bank is None))
    if most < 1:
        raise UserError("a single image has no neighbours")
    classes = int(max(other_labels.max(), labels.max())) + 1
    correct: dict[int, list[Tensor]] = {min(k, most): [] for k in NEIGHBOURS}
    for start in range(0, len(queries), CHUNK):
        chunk = queries[start : start + CHUNK]
        cosine = chunk @ others.T
        if bank is None:
            cosine[torch.arange(len(chunk)), start + torch.arange(len(chunk))] = -2
        nearest = cosine.topk(most, dim=1)
        for k, chunks in correct.items():
            votes = torch.zeros(len(chunk), classes)
            votes.scatter_add_(1, other_labels[nearest.indices[:, :k]], (nearest.values[:, :k] / TEMPERATURE).exp())
            chunks.append(votes.argmax(dim=1) == labels[start : start + CHUNK])
    return {k: torch.cat(chunks).numpy() for k, chunks in correct.items()}
