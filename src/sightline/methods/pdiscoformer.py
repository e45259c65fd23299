"""PDiscoFormer: parts are discovered, pooled and classified. Its maps are soft and late, so it is not blind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..config import Pdiscoformer
from ..sight import Prediction, Sight
from ..vit.model import Input, ViT, ViTConfig
from ..where.corrections import Correction
from ..where.parts import Parts
from .base import (
    Found,
    PartMethod,
    PartSettings,
    check_hopeless_parts,
    check_odd_look,
    open_backbone,
    record_backbone,
    selector,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class PDiscoFormer(PartMethod):
    """Answers from the parts' embeddings, which have seen everything."""

    blind = False
    pools = True
    export_graph = "pooled parts"
    uses_sight = False  # `judge` discovers the parts itself, so that looking before is in vain

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        parts, _ = self.discover(images)
        return Prediction(self.where.class_logits(self.where.embed(parts)), sight)

    def answer(self, images: Tensor, found: Found, correction: Correction | None = None) -> Prediction:
        """Too distant patches are pooled with the background; then, dropped parts do not answer."""
        correction, scores = correction or Correction(), found.maps.scores
        assert found.features is not None
        shares = replace(correction, drop=()).shares(found.maps)
        embeddings = self.where.embed(Parts(found.features, scores, scores, shares))
        answering = [part for part in range(self.where.parts) if part not in correction.drop]
        logits = self.where.part_scores(embeddings)[:, :, answering].mean(dim=2)
        return Prediction(logits, self.decide(images, found, correction))


def make_pdiscoformer(config: Pdiscoformer, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_hopeless_parts(config, accelerator)
    vit, expects = open_backbone(config, 0)
    check_odd_look(config.look_size, vit, expects)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
    return PDiscoFormer(selector(vit, config, len(rows.classes), config.look_size), PartSettings.of(config)), expects


def build_pdiscoformer(vit_config: ViTConfig, config: Pdiscoformer, facts: dict[str, Any]) -> nn.Module:
    classes = len(facts["data"]["classes"])
    return PDiscoFormer(selector(ViT(vit_config), config, classes, config.look_size), PartSettings.of(config))
