"""Predictions for the report: of the model as it is, with each part removed, and with token removal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..explain.estimates import accuracy_difference
from ..interventions.apply import CachedLook, calibrate
from ..interventions.file import Intervention
from ..interventions.search import accuracy_differences, gain_estimate, next_interventions, resolve_objective
from ..methods.base import PartDetections
from ..metrics.estimates import Estimate
from ..metrics.groups import score
from ..metrics.inference import map_batches, predictions_from_logits, sample_evenly, sight_for
from ..metrics.intervals import proportion
from ..metrics.predictions import Predictions
from ..sight import Sight
from .case import ReportContext

QUANTILES = (0.99, 0.97, 0.95, 0.9, 0.8, 0.5)
QUICK_IMAGES = 200  # training images for the distance quantiles, with --quick


@dataclass(frozen=True, eq=False)
class SurveyResults:
    predictions: Predictions
    coverage: np.ndarray  # [n]: the visible fraction of each image
    areas: np.ndarray | None = None  # [n, K]: the fraction of each part
    part_removal: dict[str, tuple[Intervention, Predictions]] = field(default_factory=dict)  # by the part removed
    token_removal: dict[float, Predictions] = field(default_factory=dict)  # by quantile
    calibrated_on: int = 0  # training images


def survey(context: ReportContext) -> SurveyResults:
    if context.parts is not None:
        return survey_parts(context)

    def predict(images: Tensor, masks: Tensor | None) -> Tensor:
        sight = sight_for(context.method, images, masks)
        logits = context.method.judge(images, sight).logits.float()
        return torch.cat([logits, sight.coverage(tuple(images.shape[2:]))[:, None]], dim=1)

    with context.batches("predicting", context.indices) as batches:
        found = map_batches(predict, batches, context.accelerator)
    return SurveyResults(predictions_from_logits(context.rows, context.indices, found[:, :-1]), found[:, -1])


def survey_parts(context: ReportContext) -> SurveyResults:
    """Stage 1 runs once per image for all interventions."""
    assert context.parts is not None
    now, train = context.intervention, context.rows.split_indices("train")
    train = sample_evenly(train, QUICK_IMAGES if context.command.quick else len(train))
    quantiles: dict[float, Intervention] = {}
    if len(train):
        with context.batches("measuring distances on training images", train) as batches:
            sketch = calibrate(context.parts, batches, context.accelerator)
        quantiles = {q: replace(now, quantile=q, thresholds=sketch.quantile(q)) for q in QUANTILES}
    dropped = next_interventions(now, context.parts.where.parts, {})
    with context.batches("predicting with and without each part", context.indices) as batches:
        look = LookWithAreas(context.parts, context.rows, batches, context.accelerator, most_bytes=0, now=now)
        predictions, *others = look([now, *dropped.values(), *quantiles.values()])
    part_removal = dict(zip(dropped, zip(dropped.values(), others, strict=False), strict=True))
    token_removal = dict(zip(quantiles, others[len(dropped) :], strict=True))
    areas, coverage = torch.cat(look.areas).numpy(), torch.cat(look.coverage).numpy()
    return SurveyResults(predictions, coverage, areas, part_removal, token_removal, len(train))


@dataclass(eq=False)
class LookWithAreas(CachedLook):
    """Also records the fraction of each image that every part covers."""

    now: Intervention = field(default_factory=Intervention)
    areas: list[Tensor] = field(default_factory=list)
    coverage: list[Tensor] = field(default_factory=list)

    def detect_once(self, number: int, images: Tensor) -> PartDetections:
        found, size = super().detect_once(number, images), (images.shape[2], images.shape[3])
        sight = self.method.sight_from(images, found, self.now.correction)
        part = part_of_pixels(sight, size)
        assert sight.parts is not None
        areas = [(part == k).flatten(1).float().mean(dim=1) for k in range(sight.parts.shape[1] - 1)]
        self.areas.append(torch.stack(areas, dim=1).cpu())
        self.coverage.append(sight.coverage(size).cpu())
        return found


def part_of_pixels(sight: Sight, size: tuple[int, int]) -> Tensor:
    """int64 [B, h, w]: the most probable part of every visible pixel, -1 elsewhere."""
    assert sight.parts is not None, "a map of parts needs parts"
    part = F.interpolate(sight.parts[:, :-1].float(), size, mode="bilinear").argmax(dim=1)
    return part.masked_fill(~sight.visible(size), -1)


# ---- summaries -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartRemoval:
    """The effect of removing a part."""

    what: str
    score: float  # worst-group or worst-class accuracy
    gain: Estimate
    accuracy: Estimate  # the difference
    cells: dict[str, Estimate]  # differences, by group or class


def part_removals(found: SurveyResults, seed: int = 0) -> list[PartRemoval]:
    before, objective = found.predictions, resolve_objective(found.predictions, None)
    return [
        PartRemoval(
            what, score(after, objective), gain_estimate(after, before, objective, seed),
            accuracy_difference(after, before, seed), accuracy_differences(after, before, objective, seed),
        )
        for what, (_, after) in found.part_removal.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class PartFrequency:
    """How often a part is visible, and how large it is."""

    overall: Estimate
    area: float  # mean fraction of all images
    cells: dict[str, Estimate]


def part_frequency(found: SurveyResults, part: int) -> PartFrequency:
    assert found.areas is not None
    visible, predictions = found.areas[:, part] > 0, found.predictions
    cells, names = predictions.labels, predictions.classes
    if predictions.groups is not None:
        cells, names = predictions.groups, predictions.group_names
    by_cell = {names[cell]: proportion(visible[cells == cell]) for cell in np.unique(cells)}
    return PartFrequency(proportion(visible), float(found.areas[:, part].mean()), by_cell)
