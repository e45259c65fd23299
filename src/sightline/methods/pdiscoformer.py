"""PDiscoFormer: parts are discovered, pooled and classified. Its part maps are soft and applied late, so it is not
blind."""

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
    PartDetections,
    PartMethod,
    PartSettings,
    check_part_config,
    check_selector_size,
    make_selector,
    open_backbone,
    record_backbone,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class PDiscoFormer(PartMethod):
    """Predicts from the part embeddings, whose tokens have attended to the whole image."""

    blind = False
    pools = True
    export_graph = "pooled parts"
    uses_sight = False  # `judge` discovers the parts itself, so evaluation need not call `look`

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        parts, _ = self.discover(images)
        return Prediction(self.where.class_logits(self.where.embed(parts)), sight)

    def predict_from(self, images: Tensor, found: PartDetections, correction: Correction | None = None) -> Prediction:
        """Token removal: removed patches are pooled with the background. Part removal: the logits are the mean over the
        remaining parts."""
        correction, scores = correction or Correction(), found.maps.scores
        assert found.features is not None
        probabilities = replace(correction, drop=()).probabilities(found.maps)
        embeddings = self.where.embed(Parts(found.features, scores, scores, probabilities))
        remaining = [part for part in range(self.where.parts) if part not in correction.drop]
        logits = self.where.part_scores(embeddings)[:, :, remaining].mean(dim=2)
        return Prediction(logits, self.sight_from(images, found, correction))


def make_pdiscoformer(config: Pdiscoformer, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_part_config(config, accelerator)
    vit, expects = open_backbone(config, 0)
    check_selector_size(config.selector_size, vit, expects)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
    where = make_selector(vit, config, len(rows.classes), config.selector_size)
    return PDiscoFormer(where, PartSettings.of(config)), expects


def build_pdiscoformer(vit_config: ViTConfig, config: Pdiscoformer, facts: dict[str, Any]) -> nn.Module:
    where = make_selector(ViT(vit_config), config, len(facts["data"]["classes"]), config.selector_size)
    return PDiscoFormer(where, PartSettings.of(config))
