"""ERM (empirical risk minimisation): the whole image, the whole ViT, cross-entropy. The standard baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Erm
from ..sight import Method, Prediction, Sight
from ..training.trainable import ParameterGroup, Trainable, TrainBatch
from ..vit.model import Input, ReadLogits, ViT, ViTConfig, vit_logits
from ..where.attention import cls_attention_map
from .base import backbone_groups, open_and_record

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Classifier(Trainable, Method):
    """Sees everything. Its map is the CLS attention of the last block, which is not an explanation."""

    blind = True
    sees_everything = True
    export_graph = "whole"

    @property
    def divisible(self) -> bool:
        return type(self) is Classifier  # others keep state beside the parameters

    def __init__(self, vit: ViT, freeze_backbone: bool = False):
        super().__init__()
        self.vit = vit
        assert vit.head is not None, "a classifier needs a head"
        if freeze_backbone:
            vit.requires_grad_(False)
            vit.head.requires_grad_(True)

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        out, head = self.vit(images), self.vit.head
        assert head is not None, "a classifier needs a head"
        # In full precision also under autocast, as heads are fitted by `probe` and `dfr`.
        with torch.autocast(images.device.type, enabled=False):
            logits = head(self.vit.fc_norm(out.cls.to(head.weight.dtype)))
        return Prediction(logits, sight, out.tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}

    def relevance_source(self) -> tuple[ViT, ReadLogits]:
        return self.vit, vit_logits

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {"loss": self.classification_loss(self.vit(batch.images).logits, batch.labels)}

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        return backbone_groups(self.vit, head_lr_factor)


def make_erm(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_and_record(config, rows, run, accelerator)
    return Classifier(vit, config.freeze_backbone), expects


def build_erm(vit_config: ViTConfig, *_: Any) -> nn.Module:
    return Classifier(ViT(vit_config))
