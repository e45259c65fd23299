"""Correcting a model that shows what it sees: leave out a part, or patches unlike those of training.

    method = intervened(load(run).method, Intervention(drop=(3,)))      # looks, judges and is as blind as before

The first stage runs once per picture for all of it: what it found is kept (`CachedLook`), and every intervention is decided
and answered from that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..console.terminal import watched
from ..data.batches import Batches
from ..data.rows import Rows
from ..errors import UserError
from ..methods.base import Found, PartMethod, part_method
from ..metrics.inference import map_batches, predictions_from_logits
from ..metrics.predictions import Predictions
from ..sight import Method, Prediction, Sight
from ..vit.weights import weights_sha256
from ..where.corrections import PartAssignment
from ..where.parts import hard_keep
from .file import FILE, DistanceSketch, Intervention

if TYPE_CHECKING:
    from ..load import EvaluationData, Model

QUANTILES = (0.9, 0.95, 0.97, 0.99)
MOST_BYTES = 4 << 30  # of what was found, to be held in memory
SEARCH_FILE = Path("interventions") / "search.json"


# ---- a corrected method ----------------------------------------------------------------------------------------------


class Intervened(Method):
    """A method with an intervention: the same three calls, and as blind outside its sight."""

    def __init__(self, method: PartMethod, intervention: Intervention):
        super().__init__()
        self.method, self.intervention, self.correction = method, intervention, intervention.correction

    @property
    def blind(self) -> bool:
        return self.method.blind

    @property
    def uses_sight(self) -> bool:
        return self.method.uses_sight

    @property
    def accepts_masks(self) -> bool:
        return self.method.accepts_masks

    def look(self, images: Tensor) -> Sight:
        return self.method.decide(images, self.method.find(images), self.correction)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        if self.uses_sight:
            return self.method.judge(images, sight)
        return replace(self.method.answer(images, self.method.find(images), self.correction), sight=sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        """Of the parts that are left, by their names."""
        parts, _ = self.method.discover(images)
        correction = self.correction
        if self.method.looks_again:  # distances are those of the closer look, and maps are not
            correction = replace(correction, farthest=None)
        shares = correction.shares(PartAssignment.of(parts, parts.scores)).unbind(dim=1)
        left = [k for k in range(len(shares) - 1) if k not in self.intervention.drop]
        return {self.intervention.part(k): shares[k] for k in left} | {"background": shares[-1]}

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        """A mask of the user's own takes the place of everything."""
        return self.method.look_at(images, masks)


def intervened(method: Method, intervention: Intervention) -> Intervened:
    learner = part_method(method, "this method")
    intervention.check_impossible(learner.where.parts)
    return Intervened(learner, intervention).train(learner.training)


# ---- what is kept with a run -----------------------------------------------------------------------------------------


def kept(model: Model) -> Intervention | None:
    path = model.run.folder / FILE
    if not path.exists():
        return None
    intervention = Intervention.load(path)
    if intervention.facts.get("weights") != weights_sha256(cast(nn.Module, model.method)):
        raise UserError(f"{path}: is about other weights than this run has now; remove it with --clear, and find anew")
    intervention.check_impossible(part_method(model.method, str(model.run.folder)).where.parts)
    return intervention


def only_names(model: Model) -> Intervention | None:
    """The names of parts alone, if what is kept can be read and is about these weights."""
    try:
        before = kept(model)
    except UserError:
        return None
    return Intervention(names=before.names) if before and before.names else None


def keep(model: Model, intervention: Intervention) -> Intervention:
    """Kept in the run from now on; it says of which weights."""
    weights = weights_sha256(cast(nn.Module, model.method))
    complete = replace(intervention, facts=dict(intervention.facts) | {"weights": weights})
    complete.save(model.run.folder / FILE)
    return complete


def measured_search(model: Model) -> dict[str, Any] | None:
    """What `intervene --find` measured of these weights, if it did."""
    path = model.run.folder / SEARCH_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it") from error
    return content if content and content.get("weights") == weights_sha256(model.method) else None


# ---- how far training patches are from their part --------------------------------------------------------------------


@torch.no_grad()
def calibrate(method: PartMethod, batches: Batches, accelerator: Accelerator) -> DistanceSketch:
    """Distances of the patches that belong to a part, from its prototype; in the closer look, where there are two."""
    sketch = DistanceSketch.empty(method.where.parts)
    for some in watched(batches.epoch(0), len(batches)):
        if len(some):
            with accelerator.autocast():
                claims = method.find(some.to(accelerator.device).images.float() / 255).deciding
            own = hard_keep(claims.scores)
            sketch.add(claims.part[own].cpu().numpy(), claims.distances[own].cpu().numpy())
    return DistanceSketch(np.sum(gather_object([sketch.counts]), axis=0))


def calibrated(asked: EvaluationData, sketch: DistanceSketch) -> dict[str, Any]:
    """What an intervention says of its distances."""
    counts = sketch.counts.sum(axis=1).tolist()
    on = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "split": "train"}
    return {"calibrated": on | {"patches": counts, "relative_error": sketch.ERROR}}


# ---- looking once ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CachedLook:
    """Pictures that are looked at once, and answered under as many interventions as one likes.

    What was found is held on the CPU, as far as `most_bytes` go; the pictures themselves are read again each time.
    """

    method: PartMethod
    rows: Rows
    batches: Batches
    accelerator: Accelerator
    most_bytes: int = MOST_BYTES
    held: list[Found] = field(default_factory=list)
    full: bool = False

    def __call__(self, interventions: Sequence[Intervention]) -> list[Predictions]:
        number = count()

        def logits(images: Tensor, _: Tensor | None) -> Tensor:
            found = self.found(next(number), images)
            answers = [self.method.answer(images, found, one.correction).logits for one in interventions]
            return torch.stack(answers, dim=1)

        every = map_batches(logits, self.batches, self.accelerator)
        self.full = True  # the first time has seen all of them
        return [
            predictions_from_logits(self.rows, self.batches.indices, every[:, k]) for k in range(len(interventions))
        ]

    def found(self, number: int, images: Tensor) -> Found:
        if number < len(self.held):
            return self.method.again(images, self.held[number].to(images.device))
        found = self.method.find(images)
        self.full = self.full or self.bytes + found.kept().bytes > self.most_bytes
        if not self.full:
            self.held.append(found.kept())
        return found

    @property
    def bytes(self) -> int:
        return sum(found.bytes for found in self.held)
