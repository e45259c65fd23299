"""iFAM: the first stage discovers parts, the second answers from their patches, and is blind to all others.

In training the mask passes a gradient straight through to the first stage; in evaluation hidden patches are removed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Ifam
from ..errors import UserError
from ..lessons import Group
from ..sight import Prediction, Sight
from ..vit import Input, ViT, ViTConfig
from ..what.masked import MaskedViT, SoftlyMaskedViT
from ..where.parts import PartDiscovery, Parts, hard_keep, soft_keep, straight_through
from .erm import backbone_groups, note_backbone, open_backbone
from .pdiscoformer import Draws, How, PartLearner, refuse_hopeless_parts, resembling, selector

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..runs import Run


class IFam(PartLearner):
    def __init__(self, where: PartDiscovery, what: MaskedViT | SoftlyMaskedViT, how: How):
        super().__init__(where, how)
        self.what = what

    @property
    def blind(self) -> bool:
        return not self.how.soft

    def look(self, images: Tensor) -> Sight:
        sight = super().look(images)
        if not self.how.soft:
            return sight
        assert sight.parts is not None
        return replace(sight, keep=sight.parts[:, :-1].amax(dim=1) > 0.5)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def losses(self, images: Tensor, labels: Tensor, draws: Draws) -> dict[str, Tensor]:
        parts, losses = self.discovery(images, labels, draws)
        logits = self.what.vit(images, self.mask(parts, draws)).logits
        return losses | {"answer": F.cross_entropy(logits.float(), labels)}

    def mask(self, parts: Parts, draws: Draws) -> Tensor:
        """What the second stage may see in training: [B, H, W], boolean if it is to teach the first stage nothing."""
        scores = self.where.scores(parts.logits, draws.noise_mask)
        if self.how.soft:
            weights = soft_keep(scores, draws.keep_masked)
            return weights if self.how.mask_gradient else weights.detach()
        kept = straight_through if self.how.mask_gradient else hard_keep
        return kept(scores, draws.keep_masked)

    def parameter_groups(self, head_lr: float) -> list[Group]:
        return [*super().parameter_groups(head_lr), *backbone_groups(self.what.vit, head_lr)]


def predictor(vit: ViT, config: dict[str, Any], classes: int) -> MaskedViT | SoftlyMaskedViT:
    """The second stage on this backbone: another LayerNorm and a head without a bias, as published."""
    registers = vit.config.registers * config["registers"]
    shape = replace(vit.config, classes=classes, head_norm=True, head_bias=False, registers=registers)
    seeing = resembling(vit, shape, config["seed"] + 1)
    if config["freeze_predictor"]:
        seeing.requires_grad_(False)
        for new in (seeing.head, seeing.fc_norm):
            assert new is not None
            new.requires_grad_(True)
    return SoftlyMaskedViT(seeing) if config["soft"] else MaskedViT(seeing)


def make_ifam(config: Ifam, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    settings, classes = asdict(config), len(rows.classes)
    how = How.of(settings)
    refuse_hopeless_parts(config, accelerator, taught_by_answer=how.mask_gradient)
    if config.mask_dropout is not None and not 0 <= config.mask_dropout < 1:
        raise UserError(f"--mask-dropout {config.mask_dropout}: must be at least 0 and below 1")
    vit, expects = open_backbone(config, 0)
    if accelerator.is_main_process:
        note_backbone(run, vit, expects, config)
    return IFam(selector(vit, settings, classes), predictor(vit, settings, classes), how), expects


def build_ifam(vit_config: ViTConfig, facts: dict[str, Any]) -> nn.Module:
    settings, classes, vit = facts["config"], len(facts["data"]["classes"]), ViT(vit_config)
    return IFam(selector(vit, settings, classes), predictor(vit, settings, classes), How.of(settings))
