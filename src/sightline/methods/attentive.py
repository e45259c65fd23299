"""Attentive probing (AIM, EP): frozen patch tokens are pooled by learned queries, between a linear probe and
fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Train
from ..config.attentive import Aim, Ep
from ..errors import UserError
from ..sight import Method, Prediction, Sight
from ..training.trainable import ParameterGroup, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..what.attentive import AimPool, EpPool
from .base import open_backbone, record_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class AttentiveProbe(Trainable, Method):
    """A frozen backbone with a trained pooling layer and head. Sees everything."""

    blind = True
    sees_everything = True
    export_graph = "whole"

    def __init__(self, vit: ViT, pool: AimPool | EpPool):
        super().__init__()
        self.backbone, self.pool = vit.requires_grad_(False), pool
        assert vit.head is not None, "a classifier needs a head"
        vit.head.requires_grad_(True)

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, C], the mean attention of the queries [B, H, W], and the backbone's tokens."""
        with torch.no_grad():
            out = self.backbone(images)
        pooled, attention = self.pool(out.patches.float())
        assert self.backbone.head is not None
        return self.backbone.head(pooled), attention.mean(dim=1).unflatten(1, out.grid), out.tokens

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        logits, _, tokens = self.predict(images)
        return Prediction(logits, sight, tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": self.predict(images)[1]}

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {"loss": self.classification_loss(self.predict(batch.images)[0], batch.labels)}

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            ParameterGroup([p for p in trained if (p.ndim > 1) == decays], head_lr_factor, decays)
            for decays in (True, False)
        ]


def make_aim(config: Aim, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    heads = vit.config.heads if config.num_heads is None else config.num_heads
    check_divides_width("--num-heads", heads, vit, config)
    return make_attentive_probe(config, vit, expects, AimPool, {"heads": heads}, run, accelerator), expects


def make_ep(config: Ep, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    check_divides_width("--queries", config.queries, vit, config)
    return make_attentive_probe(config, vit, expects, EpPool, {"queries": config.queries}, run, accelerator), expects


def check_divides_width(flag: str, count: int, vit: ViT, config: Aim | Ep) -> None:
    width = vit.config.width
    if count < 1 or width % count:
        near = max(n for n in range(1, width + 1) if width % n == 0 and n <= max(count, 1))
        raise UserError(f"{flag} {count}: must divide {config.backbone}'s width, {width}, such as {near}")


def make_attentive_probe(
    config: Aim | Ep, vit: ViT, expects: Input, pool: Any, settings: dict[str, int], run: Run, accelerator: Accelerator
) -> AttentiveProbe:
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        run.note(pool=settings)
    torch.manual_seed(config.seed)
    return AttentiveProbe(vit, pool(vit.config.width, **settings))


def build_aim(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return AttentiveProbe(ViT(vit_config), AimPool(vit_config.width, **facts["pool"]))


def build_ep(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return AttentiveProbe(ViT(vit_config), EpPool(vit_config.width, **facts["pool"]))
