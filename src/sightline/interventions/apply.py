"""Correcting a model that shows what it sees: leave out a part, or patches unlike those of training.

    method = intervened(load(run).method, Intervention(drop=(3,)))      # looks, judges and is as blind as before

The first stage runs once per picture for all of it: what it found is kept (`Looked`), and every intervention is decided
and answered from that.
"""

from __future__ import annotations

import sys
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

from ..console import watched
from ..data.batches import Batches
from ..data.rows import Rows
from ..errors import UserError
from ..fingerprints import weights_sha256
from ..load import Model, load
from ..methods.pdiscoformer import Found, PartLearner
from ..metrics.inference import answers_from, over_batches
from ..metrics.predictions import Answers
from ..sight import Method, Prediction, Sight
from ..training.run_folder import Run
from ..where.corrections import Claims
from ..where.parts import hard_keep
from .file import FILE, Intervention, Sketch

if TYPE_CHECKING:
    from ..evaluate import Asked

QUANTILES = (0.9, 0.95, 0.97, 0.99)
MOST_BYTES = 4 << 30  # of what was found, to be held in memory
SEARCH_FILE = Path("interventions") / "search.json"


# ---- a corrected method ----------------------------------------------------------------------------------------------


class Intervened(nn.Module):
    """A method with an intervention: the same three calls, and as blind outside its sight."""

    def __init__(self, method: PartLearner, intervention: Intervention):
        super().__init__()
        self.method, self.intervention, self.correction = method, intervention, intervention.correction

    @property
    def blind(self) -> bool:
        return getattr(self.method, "blind", True)

    @property
    def heeds_sight(self) -> bool:
        return getattr(self.method, "heeds_sight", True)

    def look(self, images: Tensor) -> Sight:
        return self.method.decide(images, self.method.find(images), self.correction)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        if self.heeds_sight:
            return self.method.judge(images, sight)
        return replace(self.method.answer(images, self.method.find(images), self.correction), sight=sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        """Of the parts that are left, by their names."""
        parts, _ = self.method.discover(images)
        correction = self.correction
        if self.method.looks_again:  # distances are those of the closer look, and maps are not
            correction = replace(correction, farthest=None)
        shares = correction.shares(Claims.of(parts, parts.scores)).unbind(dim=1)
        left = [k for k in range(len(shares) - 1) if k not in self.intervention.drop]
        return {self.intervention.part(k): shares[k] for k in left} | {"background": shares[-1]}

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        """A mask of the user's own takes the place of everything."""
        return told(self.method, images, masks)


def intervened(method: Method, intervention: Intervention) -> Intervened:
    learner = with_parts(method, "this method")
    intervention.refuse_impossible(learner.where.parts)
    return Intervened(learner, intervention).train(learner.training)


def with_parts(method: object, name: str) -> PartLearner:
    if not isinstance(method, PartLearner):
        raise UserError(f"{name}: discovers no parts to intervene in; ifam and pdiscoformer do")
    return method


def told(method: object, images: Tensor, masks: Tensor) -> Sight:
    """What a mask drawn by the user shows, bool [B, h, w], for methods that answer from a mask."""
    look_at = getattr(method, "look_at", None)
    if look_at is None:
        raise UserError("--mask: this method cannot be shown a mask; ifam, early-mask and late-mask can")
    return look_at(images, masks)


# ---- what is kept with a run -----------------------------------------------------------------------------------------


def kept(model: Model) -> Intervention | None:
    path = model.run.folder / FILE
    if not path.exists():
        return None
    intervention = Intervention.load(path)
    if intervention.facts.get("weights") != weights_sha256(cast(nn.Module, model.method)):
        raise UserError(f"{path}: is about other weights than this run has now; remove it with --clear, and find anew")
    intervention.refuse_impossible(with_parts(model.method, str(model.run.folder)).where.parts)
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


def load_corrected(folder: Path, device: str, intervention: bool, *, aloud: bool = True) -> Model:
    """With the intervention that is kept in the run, if one is and if that is wanted, and a line that says so."""
    model = load(folder, device)
    model = with_kept(model) if intervention else model
    if aloud and (said := model.run.facts.get("intervention")):
        announce(model.run.folder, said["words"])
    return model


def announce(folder: Path, words: str) -> None:
    """That the intervention kept in this run is applied."""
    print(f"sightline: with {folder / FILE}: {words} (--no-intervention: as trained)", file=sys.stderr)


def with_kept(model: Model) -> Model:
    """The model with the intervention kept in its run, if one is; its run then says so."""
    intervention = kept(model)
    if intervention is None or not intervention.changes:
        return model
    said = {name: value for name, value in intervention.to_dict().items() if name not in ("names", "facts")}
    said |= {"folder": intervention.folder, "words": intervention.words}
    # Seeds that were corrected each by its own search are one method.
    said["kind"] = "found" if "found" in intervention.facts else intervention.folder
    facts = model.run.facts | {"intervention": said}
    return replace(model, method=intervened(model.method, intervention), run=Run(model.run.folder, facts))


# ---- how far training patches are from their part --------------------------------------------------------------------


@torch.no_grad()
def calibrate(method: PartLearner, batches: Batches, accelerator: Accelerator) -> Sketch:
    """Distances of the patches that belong to a part, from its prototype; in the closer look, where there are two."""
    sketch = Sketch.empty(method.where.parts)
    for some in watched(batches.epoch(0), len(batches)):
        if len(some):
            with accelerator.autocast():
                claims = method.find(some.to(accelerator.device).images.float() / 255).deciding
            own = hard_keep(claims.scores)
            sketch.add(claims.part[own].cpu().numpy(), claims.distances[own].cpu().numpy())
    return Sketch(np.sum(gather_object([sketch.counts]), axis=0))


def calibrated(asked: Asked, sketch: Sketch) -> dict[str, Any]:
    """What an intervention says of its distances."""
    counts = sketch.counts.sum(axis=1).tolist()
    on = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "split": "train"}
    return {"calibrated": on | {"patches": counts, "relative_error": sketch.ERROR}}


# ---- looking once ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Looked:
    """Pictures that are looked at once, and answered under as many interventions as one likes.

    What was found is held on the CPU, as far as `most_bytes` go; the pictures themselves are read again each time.
    """

    method: PartLearner
    rows: Rows
    batches: Batches
    accelerator: Accelerator
    most_bytes: int = MOST_BYTES
    held: list[Found] = field(default_factory=list)
    full: bool = False

    def __call__(self, interventions: Sequence[Intervention]) -> list[Answers]:
        number = count()

        def logits(images: Tensor, _: Tensor | None) -> Tensor:
            found = self.found(next(number), images)
            answers = [self.method.answer(images, found, one.correction).logits for one in interventions]
            return torch.stack(answers, dim=1)

        every = over_batches(logits, self.batches, self.accelerator)
        self.full = True  # the first time has seen all of them
        return [answers_from(self.rows, self.batches.indices, every[:, k]) for k in range(len(interventions))]

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
