"""Every picture asked once: as the model is, without each part, and without the patches that are unlike training's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..interventions.apply import CachedLook, calibrate
from ..interventions.file import Intervention
from ..interventions.search import differences, gained, next_steps, objective_of
from ..methods.base import Found
from ..metrics.estimates import Estimate
from ..metrics.inference import map_batches, predictions_from_logits, sight_for
from ..metrics.intervals import wilson
from ..metrics.predictions import Predictions
from ..sight import Sight
from .case import Case, few

QUANTILES = (0.99, 0.97, 0.95, 0.9, 0.8, 0.5)
QUICKLY = 200  # training pictures to measure distances on


@dataclass(frozen=True, eq=False)
class Survey:
    answers: Predictions
    coverage: np.ndarray  # [n]: the share of each picture that is in sight
    areas: np.ndarray | None = None  # [n, K]: and of each part
    without: dict[str, tuple[Intervention, Predictions]] = field(default_factory=dict)  # by what is left out, in words
    removed: dict[float, Predictions] = field(default_factory=dict)  # by quantile
    calibrated_on: int = 0  # training pictures


def survey(case: Case) -> Survey:
    if case.parts is not None:
        return survey_of_parts(case)

    def answer(images: Tensor, masks: Tensor | None) -> Tensor:
        sight = sight_for(case.method, images, masks)
        logits = case.method.judge(images, sight).logits.float()
        return torch.cat([logits, sight.coverage(tuple(images.shape[2:]))[:, None]], dim=1)

    with case.batches("answering", case.indices) as batches:
        found = map_batches(answer, batches, case.accelerator)
    return Survey(predictions_from_logits(case.rows, case.indices, found[:, :-1]), found[:, -1])


def survey_of_parts(case: Case) -> Survey:
    """The first stage runs once per picture for all of it."""
    assert case.parts is not None
    now, train = case.intervention, case.rows.where("train")
    train = few(train, QUICKLY if case.command.quick else len(train))
    quantiles: dict[float, Intervention] = {}
    if len(train):
        with case.batches("measuring distances on training pictures", train) as batches:
            sketch = calibrate(case.parts, batches, case.accelerator)
        quantiles = {q: replace(now, quantile=q, thresholds=sketch.quantile(q)) for q in QUANTILES}
    dropped = next_steps(now, case.parts.where.parts, {})
    with case.batches("answering, with and without each part", case.indices) as batches:
        looked = Watched(case.parts, case.rows, batches, case.accelerator, most_bytes=0, now=now)
        answers, *others = looked([now, *dropped.values(), *quantiles.values()])
    without = dict(zip(dropped, zip(dropped.values(), others, strict=False), strict=True))
    removed = dict(zip(quantiles, others[len(dropped) :], strict=True))
    areas = torch.cat(looked.areas).numpy()
    coverage = torch.cat(looked.coverage).numpy()
    return Survey(answers, coverage, areas, without, removed, len(train))


@dataclass(eq=False)
class Watched(CachedLook):
    """Also notes how much of each picture every part is."""

    now: Intervention = field(default_factory=Intervention)
    areas: list[Tensor] = field(default_factory=list)
    coverage: list[Tensor] = field(default_factory=list)

    def found(self, number: int, images: Tensor) -> Found:
        found, size = super().found(number, images), (images.shape[2], images.shape[3])
        sight = self.method.decide(images, found, self.now.correction)
        part = part_of_pixels(sight, size)
        assert sight.parts is not None
        areas = [(part == k).flatten(1).float().mean(dim=1) for k in range(sight.parts.shape[1] - 1)]
        self.areas.append(torch.stack(areas, dim=1).cpu())
        self.coverage.append(sight.coverage(size).cpu())
        return found


def part_of_pixels(sight: Sight, size: tuple[int, int]) -> Tensor:
    """int64 [B, h, w]: the likeliest part of every pixel in sight, -1 elsewhere; as `maps.with_parts` paints it."""
    assert sight.parts is not None, "a map of parts needs parts"
    part = F.interpolate(sight.parts[:, :-1].float(), size, mode="bilinear").argmax(dim=1)
    return part.masked_fill(~sight.visible(size), -1)


# ---- what it comes to ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOut:
    """What changes without a part."""

    what: str
    score: float  # of the worst group, or class
    gain: Estimate
    accuracy: Estimate  # the difference
    cells: dict[str, Estimate]  # differences, by group or class


def left_out(found: Survey, seed: int = 0) -> list[LeftOut]:
    from ..explain.background_swaps import difference
    from ..metrics.groups import score

    objective = objective_of(found.answers, None)
    return [
        LeftOut(
            what, score(answers, objective), gained(answers, found.answers, objective, seed),
            difference(answers, found.answers, seed), differences(answers, found.answers, objective, seed),
        )
        for what, (_, answers) in found.without.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Presence:
    """How often a part is in sight, and how large."""

    everywhere: Estimate
    area: float  # the mean share of all pictures
    cells: dict[str, Estimate]


def presence(found: Survey, part: int) -> Presence:
    assert found.areas is not None
    there, answers = found.areas[:, part] > 0, found.answers
    cells, names = (
        (answers.labels, answers.classes) if answers.groups is None else (answers.groups, answers.group_names)
    )
    by = {names[cell]: share_of(there[cells == cell]) for cell in np.unique(cells)}
    return Presence(share_of(there), float(found.areas[:, part].mean()), by)


def share_of(yes: np.ndarray) -> Estimate:
    low, high = wilson(int(yes.sum()), len(yes))
    return Estimate(yes.mean(), low, high, len(yes), "Wilson")
