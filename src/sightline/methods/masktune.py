"""MaskTune: the most relevant pixels of a trained classifier are hidden, so that fine-tuning must use others as
well."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.relevance import Masktune
from ..sight import Sight
from ..training.trainable import TrainBatch
from ..vit.model import Input, ViT
from ..where.relevance import Kind, relevance_map
from .erm import build_erm
from .given_mask import AddMasks, mask_writer
from .robustvit import MaskSupervisedClassifier, load_starting_classifier

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class LessRelevantSight(nn.Module):
    """Keeps all but a classifier's most relevant pixels (Asgari et al. 2022, sec. 3)."""

    def __init__(self, vit: ViT, kind: Kind = "gae", deviations: float = 2.0):
        super().__init__()
        self.vit, self.kind, self.deviations = vit, kind, deviations

    def look(self, images: Tensor) -> Sight:
        maps = F.interpolate(self.maps(images)[self.kind][:, None], images.shape[-2:], mode="bilinear")[:, 0]
        return Sight(keep_pixels=maps <= relevance_threshold(maps, self.deviations)[:, None, None])

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {self.kind: relevance_map(self.vit, images, kind=self.kind)}

    def extra_repr(self) -> str:
        return f"kind={self.kind}, deviations={self.deviations}"


def relevance_threshold(maps: Tensor, deviations: float) -> Tensor:
    """[B]: mean plus so many standard deviations, both over the positive values of each map."""
    flat = maps.flatten(1).double()
    positive = flat > 0
    n = positive.sum(dim=1).clamp(min=1)
    mean = (flat * positive).sum(dim=1) / n
    variance = ((flat - mean[:, None]).square() * positive).sum(dim=1) / n
    return (mean + deviations * variance.sqrt()).to(maps.dtype)


class MaskTune(MaskSupervisedClassifier):
    """Cross-entropy on images whose most relevant pixels are black."""

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.masks is not None
        logits = self.vit(batch.images * batch.masks[:, None]).logits
        return {"loss": self.classification_loss(logits, batch.labels)}


def mask_training_images(rows: Rows, make: AddMasks) -> Rows:
    """The rows with masks for the training split."""
    at = rows.split_indices("train")
    made = make(rows.take(at))
    assert made.masks is not None
    masks = np.full(len(rows), "", dtype=object)
    masks[at] = made.masks
    return replace(rows, masks=masks.tolist(), notes=made.notes)


def make_masktune(config: Masktune, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = load_starting_classifier(config, rows, run, accelerator)
    where = LessRelevantSight(copy.deepcopy(vit), config.relevance, config.deviations)
    make = mask_writer(where, config, expects, run, accelerator)
    return MaskTune(vit, partial(mask_training_images, make=make)), expects


build_masktune: Any = build_erm
