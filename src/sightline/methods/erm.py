"""ERM: the whole picture, the whole ViT, cross-entropy. The ordinary way, and the baseline."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Erm, Train
from ..errors import UserError
from ..sight import Prediction, Sight
from ..vit import Input, ViT, ViTConfig
from ..weights import load_backbone
from ..where.attention import cls_attention_map

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..runs import Run
    from ..train import Group, Lesson


class Classifier(nn.Module):
    """Sees everything; its map is the attention of the last block, which explains little."""

    learns_from_masks = False

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
        out = self.vit(images)
        return Prediction(out.logits, sight, out.tokens)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.vit(lesson.images).logits.float(), lesson.labels)}

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return backbone_groups(self.vit, head_lr)


def backbone_groups(vit: ViT, head_lr: float) -> list[Group]:
    """Matrices decay; biases, norms, tokens and positions do not; new layers learn faster."""
    from ..train import Group

    named = [(name, p) for name, p in vit.named_parameters() if p.requires_grad]
    new = {name for name, _ in named if name.startswith(("head.", "fc_norm."))}

    def decays(name: str, p: nn.Parameter) -> bool:
        return p.ndim > 1 and not name.endswith(("_token", "pos_embed"))

    return [
        Group([p for name, p in named if (name in new) == fresh and decays(name, p) == decay], rate, decay)
        for fresh, rate in ((False, 1.0), (True, head_lr))
        for decay in (True, False)
    ]


def open_backbone(config: Train, classes: int) -> tuple[ViT, Input]:
    """The backbone with a new head, and what it expects of a picture at the size asked for."""
    vit = load_backbone(config.backbone, classes=classes, seed=config.seed)
    expects = vit.config.input
    patch, side = vit.config.patch, config.size or expects.size[0]
    if side < patch or side % patch:
        near = max(1, side // patch) * patch
        raise UserError(f"--size {side}: must be a multiple of {config.backbone}'s patch, {patch}, such as {near}")
    return vit, replace(expects, size=(side, side))


def train_erm(config: Erm, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    from ..train import Desk, fit

    vit, expects = open_backbone(config, len(rows.classes))
    if accelerator.is_main_process:
        run.note(vit=asdict(replace(vit.config, input=expects)), backbone=asdict(vit.origin) if vit.origin else None)
    return fit(Classifier(vit, config.frozen), Desk(rows, run, accelerator, expects), config), expects


def build_erm(vit_config: ViTConfig) -> nn.Module:
    return Classifier(ViT(vit_config))
