"""Attentive probes, more than a probe and less than fine-tuning: frozen patch tokens, pooled by learned queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Train
from ..config.attentive import Aim, Ep
from ..errors import UserError
from ..sight import Method, Prediction, Sight
from ..training.context import Group, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..what.attentive import AimPool, EpPool
from .base import open_backbone, record_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Attentive(Trainable, Method):
    """The backbone stays as it is; a pool and the head learn. Sees everything."""

    blind = True
    sees_everything = True
    export_graph = "whole"

    def __init__(self, vit: ViT, pool: AimPool | EpPool):
        super().__init__()
        self.backbone, self.pool = vit.requires_grad_(False), pool
        assert vit.head is not None, "a classifier needs a head"
        vit.head.requires_grad_(True)

    def pooled(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            out = self.backbone(images)
        pooled, attention = self.pool(out.patches.float())
        assert self.backbone.head is not None
        return self.backbone.head(pooled), attention.mean(dim=1).unflatten(1, out.grid), out.tokens

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        logits, _, tokens = self.pooled(images)
        return Prediction(logits, sight, tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": self.pooled(images)[1]}

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        return {"loss": self.classification_loss(self.pooled(lesson.images)[0], lesson.labels)}

    def parameter_groups(self, head_lr: float) -> list[Group]:
        learns = [p for p in self.parameters() if p.requires_grad]
        return [Group([p for p in learns if (p.ndim > 1) == decays], head_lr, decays) for decays in (True, False)]


def make_aim(config: Aim, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    heads = vit.config.heads if config.heads is None else config.heads
    return made(config, vit, expects, AimPool, {"heads": heads}, run, accelerator), expects


def make_ep(config: Ep, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    return made(config, vit, expects, EpPool, {"queries": config.queries}, run, accelerator), expects


def made(
    config: Aim | Ep, vit: ViT, expects: Input, pool: Any, told: dict[str, int], run: Run, accelerator: Accelerator
) -> Attentive:
    ((what, count),), width = told.items(), vit.config.width
    if count < 1 or width % count:
        near = max(n for n in range(1, width + 1) if width % n == 0 and n <= max(count, 1))
        raise UserError(f"--{what} {count}: must divide {config.backbone}'s width, {width}, such as {near}")
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        run.note(pool=told)
    torch.manual_seed(config.seed)
    return Attentive(vit, pool(width, count))


def build_aim(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return Attentive(ViT(vit_config), AimPool(vit_config.width, **facts["pool"]))


def build_ep(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return Attentive(ViT(vit_config), EpPool(vit_config.width, **facts["pool"]))
