"""MaskTune: what a trained classifier finds most relevant is hidden, and it has to find something else as well."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.relevance import Masktune
from ..errors import UserError
from ..sight import Sight
from ..training.context import TrainBatch
from ..vit.model import Input, ViT
from ..where.relevance import Kind, relevance_map
from .erm import build_erm
from .robustvit import Shown, begun, maker

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Remaining(nn.Module):
    """Shows what is left when a classifier's most relevant pixels are hidden (Asgari et al. 2022, sec. 3)."""

    def __init__(self, vit: ViT, kind: Kind = "gae", deviations: float = 2.0):
        super().__init__()
        self.vit, self.kind, self.deviations = vit, kind, deviations

    def look(self, images: Tensor) -> Sight:
        maps = F.interpolate(self.maps(images)[self.kind][:, None], images.shape[-2:], mode="bilinear")[:, 0]
        return Sight(keep_pixels=maps <= limit(maps, self.deviations)[:, None, None])

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {self.kind: relevance_map(self.vit, images, kind=self.kind)}

    def extra_repr(self) -> str:
        return f"kind={self.kind}, deviations={self.deviations}"


def limit(maps: Tensor, deviations: float) -> Tensor:
    """[B]: so many standard deviations above the mean, both over the positive values of each map."""
    flat = maps.flatten(1).double()
    counts = flat > 0
    n = counts.sum(dim=1).clamp(min=1)
    mean = (flat * counts).sum(dim=1) / n
    spread = ((flat - mean[:, None]).square() * counts).sum(dim=1) / n
    return (mean + deviations * spread.sqrt()).to(maps.dtype)


class MaskTune(Shown):
    """Cross-entropy on pictures whose most relevant pixels are black."""

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        assert lesson.masks is not None
        return {"loss": self.classification_loss(self.vit(lesson.images * lesson.masks[:, None]).logits, lesson.labels)}


def remaining_in_training(rows: Rows, make: Callable[[Rows], Rows]) -> Rows:
    at = rows.where("train")
    made = make(rows.take(at))
    assert made.masks is not None
    masks = np.full(len(rows), "", dtype=object)
    masks[at] = made.masks
    return replace(rows, masks=masks.tolist(), notes=made.notes)


def make_masktune(config: Masktune, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not config.deviations >= 0:
        raise UserError(f"--deviations {config.deviations}: must not be negative")
    vit, expects = begun(config, rows, run, accelerator)
    before = Remaining(copy.deepcopy(vit), config.relevance, config.deviations)
    make = maker(before, config, expects, run, accelerator)
    return MaskTune(vit, partial(remaining_in_training, make=make)), expects


build_masktune: Any = build_erm
