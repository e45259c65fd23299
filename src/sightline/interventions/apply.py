"""Interventions on a trained model: part removal, token removal and forced parts, applied and stored with the run.

    method = apply_intervention(load(run).method, Intervention(drop=(3,)))      # as blind outside its sight as before

Stage 1 runs once per image however many interventions are tried: `CachedLook` keeps its detections, and each
intervention only makes the sight and the prediction from them again.
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
from ..methods.base import PartDetections, PartMethod, part_method
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
MOST_BYTES = 4 << 30  # of stage 1 detections, held in memory
SEARCH_FILE = Path("interventions") / "search.json"


# ---- a method with an intervention -----------------------------------------------------------------------------------


class Intervened(Method):
    """A method with an intervention: the same interface, and as blind outside its sight."""

    def __init__(self, method: PartMethod, intervention: Intervention):
        super().__init__()
        self.method, self.intervention, self.correction = method, intervention, intervention.correction

    @property
    def blind(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.method.blind

    @property
    def uses_sight(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.method.uses_sight

    @property
    def accepts_masks(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.method.accepts_masks

    def look(self, images: Tensor) -> Sight:
        return self.method.sight_from(images, self.method.detect(images), self.correction)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        if self.uses_sight:
            return self.method.judge(images, sight)
        return replace(self.method.predict_from(images, self.method.detect(images), self.correction), sight=sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        """The part maps that are left after part and token removal, by part name."""
        parts, _ = self.method.discover(images)
        return self._maps_of(PartAssignment.of(parts, parts.scores))

    def look_with_maps(self, images: Tensor) -> tuple[Sight, dict[str, Tensor]]:
        found = self.method.detect(images)
        return self.method.sight_from(images, found, self.correction), self._maps_of(found.maps)

    def _maps_of(self, assignment: PartAssignment) -> dict[str, Tensor]:
        correction = self.correction
        if self.method.refines:  # distance limits apply to the refined look, not to these maps
            correction = replace(correction, max_distances=None)
        probabilities = correction.probabilities(assignment).unbind(dim=1)
        left = [k for k in range(len(probabilities) - 1) if k not in self.intervention.drop]
        return {self.intervention.part_name(k): probabilities[k] for k in left} | {"background": probabilities[-1]}

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        """A mask given by the user replaces the sight, intervention included."""
        return self.method.look_at(images, masks)


def apply_intervention(method: Method, intervention: Intervention) -> Intervened:
    with_parts = part_method(method, "this method")
    intervention.check_part_numbers(with_parts.where.parts)
    return Intervened(with_parts, intervention).train(with_parts.training)


# ---- what is stored with a run ---------------------------------------------------------------------------------------


def load_intervention(model: Model) -> Intervention | None:
    """The intervention saved in the run folder, if there is one; it may only name parts."""
    path = model.run.folder / FILE
    if not path.exists():
        return None
    intervention = Intervention.load(path)
    if intervention.facts.get("weights") != weights_sha256(cast(nn.Module, model.method)):
        raise UserError(f"{path}: was made for other weights than this run's; remove it with --clear and search again")
    intervention.check_part_numbers(part_method(model.method, str(model.run.folder)).where.parts)
    return intervention


def load_part_names(model: Model) -> Intervention | None:
    """Only the part names of the saved intervention, if it is readable and for these weights."""
    try:
        saved = load_intervention(model)
    except UserError:
        return None
    return Intervention(names=saved.names) if saved and saved.names else None


def save_intervention(model: Model, intervention: Intervention) -> Intervention:
    """Save it in the run folder, with the fingerprint of the weights that it is for."""
    weights = weights_sha256(cast(nn.Module, model.method))
    complete = replace(intervention, facts=dict(intervention.facts) | {"weights": weights})
    complete.save(model.run.folder / FILE)
    return complete


def load_search(model: Model) -> dict[str, Any] | None:
    """What `intervene --find` measured, if it was run with these weights."""
    path = model.run.folder / SEARCH_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove the file") from error
    return content if content and content.get("weights") == weights_sha256(model.method) else None


# ---- distances of training patches from their prototype --------------------------------------------------------------


@torch.no_grad()
def calibrate(method: PartMethod, batches: Batches, accelerator: Accelerator) -> DistanceSketch:
    """Distances of the foreground patches from their part's prototype, in the look that decides the mask."""
    sketch = DistanceSketch.empty(method.where.parts)
    for batch in watched(batches.epoch(0), len(batches)):
        if len(batch):
            with accelerator.autocast():
                assignment = method.detect(batch.to(accelerator.device).images.float() / 255).mask_assignment
            foreground = hard_keep(assignment.scores)
            sketch.add(assignment.part[foreground].cpu().numpy(), assignment.distances[foreground].cpu().numpy())
    return DistanceSketch(np.sum(gather_object([sketch.counts]), axis=0))


def calibration_facts(data: EvaluationData, sketch: DistanceSketch) -> dict[str, Any]:
    """The facts that an intervention stores about its distance quantiles."""
    counts = sketch.counts.sum(axis=1).tolist()
    on = {"data": data.rows.name, "fingerprint": data.fingerprint, "split": "train"}
    return {"calibrated": on | {"patches": counts, "relative_error": sketch.ERROR}}


# ---- many interventions, one run of stage 1 --------------------------------------------------------------------------


@dataclass(eq=False)
class CachedLook:
    """Predictions for the same images under any number of interventions, with stage 1 run once per image.

    Its detections are held on the CPU, up to `most_bytes`; the images themselves are read again each time.
    """

    method: PartMethod
    rows: Rows
    batches: Batches
    accelerator: Accelerator
    most_bytes: int = MOST_BYTES
    held: list[PartDetections] = field(default_factory=list)
    full: bool = False

    def __call__(self, interventions: Sequence[Intervention]) -> list[Predictions]:
        number = count()

        def logits(images: Tensor, _: Tensor | None) -> Tensor:
            detections = self.detect_once(next(number), images)
            corrections = [intervention.correction for intervention in interventions]
            return torch.stack([self.method.predict_from(images, detections, c).logits for c in corrections], dim=1)

        every = map_batches(logits, self.batches, self.accelerator)  # [n, interventions, C]
        self.full = True  # after the first pass no batch is new
        return [predictions_from_logits(self.rows, self.batches.indices, some) for some in every.swapaxes(0, 1)]

    def detect_once(self, number: int, images: Tensor) -> PartDetections:
        if number < len(self.held):
            return self.method.restore_views(images, self.held[number].to(images.device))
        detections = self.method.detect(images)
        self.full = self.full or self.bytes + detections.for_cache().bytes > self.most_bytes
        if not self.full:
            self.held.append(detections.for_cache())
        return detections

    @property
    def bytes(self) -> int:
        return sum(detections.bytes for detections in self.held)
