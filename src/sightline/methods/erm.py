"""ERM: the whole picture, the whole ViT, cross-entropy. The ordinary way, and the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Erm
from ..sight import Method, Prediction, Sight
from ..training.context import Group, Trainable, TrainBatch
from ..vit.model import Input, ViT, ViTConfig
from ..where.attention import cls_attention_map
from .base import backbone_groups, open_and_record

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Classifier(Trainable, Method):
    """Sees everything; its map is the attention of the last block, which explains little."""

    blind = True
    sees_everything = True
    export_graph = "whole"

    def __init__(self, vit: ViT, frozen: bool = False):
        super().__init__()
        self.vit, self.frozen = vit, frozen
        assert vit.head is not None, "a classifier needs a head"
        if frozen:
            vit.requires_grad_(False)
            vit.head.requires_grad_(True)

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        out, head = self.vit(images), self.vit.head
        assert head is not None, "a classifier needs a head"
        # In full precision also under autocast: a head that was fitted elsewhere must answer here as it did there.
        with torch.autocast(images.device.type, enabled=False):
            logits = head(self.vit.fc_norm(out.cls.to(head.weight.dtype)))
        return Prediction(logits, sight, out.tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        return {"loss": self.classification_loss(self.vit(lesson.images).logits, lesson.labels)}

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return backbone_groups(self.vit, head_lr)


def make_erm(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    return Classifier(vit, config.frozen), expects


def build_erm(vit_config: ViTConfig, *_: Any) -> nn.Module:
    return Classifier(ViT(vit_config))
