"""Correcting a model that shows what it sees: leave out a part, or patches unlike those of training.

    method = intervened(load(run).method, Intervention(drop=(3,)))      # looks, judges and is as blind as before

The first stage runs once per picture for all of it: what it found is kept (`Looked`), and every intervention is decided
and answered from that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from .answers import Answers
from .data.batches import Batches
from .data.rows import Rows
from .errors import UserError
from .fingerprints import weights_sha256
from .interventions import FILE, Intervention, Sketch, parse_names
from .load import Model, load
from .methods.pdiscoformer import Found, PartLearner
from .predict import answering_batches, answers_from, over_batches
from .runs import Run
from .screen import watched
from .search import Search, search
from .sight import Method, Prediction, Sight
from .where.corrections import Claims
from .where.parts import hard_keep

if TYPE_CHECKING:
    from .assess import Asked
    from .config import Intervene

QUANTILES = (0.9, 0.95, 0.97, 0.99)
DRAWN = 8  # pictures
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
        where = model.run.folder / FILE
        print(f"sightline: with {where}: {said['words']} (--no-intervention: as trained)", file=sys.stderr)
    return model


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


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What is kept now, and what was measured, now or before."""

    parts: int
    intervention: Intervention | None
    measured: dict[str, Any] | None
    search: Search | None = None
    notes: tuple[str, ...] = ()  # on data that are not the run's own

    @property
    def sentences(self) -> list[str]:
        said, now = [] if self.search is None else [self.search.sentence], self.intervention or Intervention()
        suspect = None if self.search is not None else (self.measured or {}).get("suspect")
        if suspect and suspect["part"] not in now.drop:
            said.append(f"When --find was asked: {suspect['sentence']}")
        if now.changes:
            found = now.facts.get("found")
            how = f", found on the {found['split']} data of {found['data']}" if found else ""
            before = " from before" * (self.search is not None and self.search.gain is None)
            said.append(f"Kept{before}: {now.words}{how}.")
        else:
            said.append(f"{self.parts} parts, and no intervention is kept.")
        names = ", ".join(f"{part} is {name}" for part, name in sorted(now.names.items()))
        return [*said, f"Of {self.parts} parts, {names}."] if names else said


def correct(command: Intervene) -> Outcome:
    """What the command says of a run, done."""
    from .assess import opened

    by_hand = bool(command.drop or command.force or command.quantile is not None)
    if command.find and by_hand:
        raise UserError("--find chooses by itself: leave out --drop, --force and --quantile")
    accelerator, model = opened(command.run, command.device)
    method = with_parts(model.method, str(command.run))
    names = parse_names(command.name)
    Intervention(command.drop, command.quantile, None, command.force, names).refuse_impossible(method.where.parts)
    before = only_names(model) if command.clear else kept(model)
    names = dict(before.names if before else {}) | names
    bench = Bench(command, accelerator, model, method, before)
    if command.find:
        return bench.find(names)
    if by_hand or command.name:
        before = bench.by_hand(before or Intervention(), names)
    elif command.clear:
        before = bench.clear(before)
    return Outcome(method.where.parts, before, bench.measured())


def only_names(model: Model) -> Intervention | None:
    """What `--clear` leaves of what is kept: the names of parts, if it can be read and is about these weights."""
    try:
        before = kept(model)
    except UserError:
        return None
    return Intervention(names=before.names) if before and before.names else None


@dataclass(frozen=True, eq=False)
class Bench:
    """Where a run is worked on."""

    command: Intervene
    accelerator: Accelerator
    model: Model
    method: PartLearner
    before: Intervention | None = None  # what there is to go on with

    def clear(self, before: Intervention | None) -> Intervention | None:
        """Nothing is changed any more; names stay."""
        if before is not None:
            return self._save(before)
        if self.accelerator.is_main_process:
            (self.model.run.folder / FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        return None

    def by_hand(self, before: Intervention, names: dict[int, str]) -> Intervention:
        """What is said takes the place of what was kept of its kind; the rest stays, but that a part dropped now is no
        longer forced, and the other way round."""
        drop, force = self.command.drop, self.command.force
        drop, force = (
            drop or tuple(part for part in before.drop if part not in force),
            force or tuple(part for part in before.force if part not in drop),
        )
        now = replace(before, names=names, drop=drop, force=force)
        facts = dict(before.facts) if now == replace(before, names=names) else {}
        if (q := self.command.quantile) is not None:
            asked = self._asked()
            sketch = self._calibrate(asked)
            now, facts = replace(now, quantile=q, thresholds=sketch.quantile(q)), calibrated(asked, sketch)
        elif not facts and "calibrated" in before.facts:
            facts = {"calibrated": before.facts["calibrated"]}
        now.refuse_impossible(self.method.where.parts)
        return self._save(replace(now, facts=facts))

    def find(self, names: dict[int, str]) -> Outcome:
        """On validation data, never on test data; kept only if it surely helps."""
        asked = self._asked()
        for split in ("val", "train"):
            if not len(asked.rows.where(split)):
                raise UserError(f"{asked.path}: no pictures in the split {split!r}, which --find needs")
        notes = () if asked.own else asked.rows.notes  # such as that a part of the training pictures validates
        sketch = self._calibrate(asked)
        batches = self._batches(asked.rows, asked.path, "val")
        looked = Looked(self.method, asked.rows, batches, self.accelerator)
        try:
            found = search(
                looked, self.method.where.parts, {q: sketch.quantile(q) for q in QUANTILES},
                objective=self._objective(asked.rows), names=names, seed=self.command.seed,
            )  # fmt: skip
        finally:
            batches.close()
        data = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "weights": self._weights}
        if self.accelerator.is_main_process:
            self._write(data | found.to_dict())
            self._draw(asked.rows, found)
        self.accelerator.wait_for_everyone()
        if found.gain is None:
            before = self.before
            if self.command.name:
                before = self.by_hand(before or Intervention(), names)
            elif self.command.clear:
                before = self.clear(before)
            return Outcome(self.method.where.parts, before, self.measured(), found, notes)
        about = {k: v for k, v in found.to_dict().items() if k != "trials"}
        facts = calibrated(asked, sketch) | {"found": data | about}
        chosen = self._save(replace(found.chosen, facts=facts))
        return Outcome(self.method.where.parts, chosen, self.measured(), found, notes)

    def _objective(self, rows: Rows) -> str | None:
        """What is said; else AUC where weights were selected by it and there are no groups."""
        by_auc = (self.model.run.facts.get("selection") or {}).get("metric") == "auc" and rows.groups is None
        return self.command.objective or ("auc" if by_auc else None)

    def measured(self) -> dict[str, Any] | None:
        """What --find measured of these weights, this time or before."""
        path = self.model.run.folder / SEARCH_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove it") from error
        return content if content and content.get("weights") == self._weights else None

    def _asked(self) -> Asked:
        from .assess import data_asked_for, with_classes_of
        from .config import Evaluate

        asked = data_asked_for(Evaluate(self.command.run, self.command.data, self.command.layout), self.model.run)
        return replace(asked, rows=with_classes_of(self.model, asked.rows, asked.path))

    def _batches(self, rows: Rows, path: Path, split: str) -> Batches:
        indices, said = rows.where(split), self.command
        if not len(indices):
            raise UserError(f"{path}: no pictures in the split {split!r}, whose patches --quantile is measured on")
        return answering_batches(
            rows, indices, self.model.expects, self.accelerator,
            batch=said.batch, workers=said.workers, cache=said.cache,
        )  # fmt: skip

    def _calibrate(self, asked: Asked) -> Sketch:
        batches = self._batches(asked.rows, asked.path, "train")
        try:
            return calibrate(self.method, batches, self.accelerator)
        finally:
            batches.close()

    @cached_property
    def _weights(self) -> str:
        return weights_sha256(cast(nn.Module, self.model.method))

    def _save(self, intervention: Intervention) -> Intervention:
        if self.accelerator.is_main_process:
            intervention = keep(self.model, intervention)
        self.accelerator.wait_for_everyone()
        return intervention

    def _draw(self, rows: Rows, found: Search) -> None:
        """What each part, and the usual quantiles, leave of a few of the pictures."""
        from .data.images import Canvas, decode
        from .strips import strips

        every = rows.where("val")
        few = every[np.linspace(0, len(every) - 1, min(DRAWN, len(every))).round().astype(int)]
        samples = [decode(rows, int(i), Canvas.of(self.model.expects)).image for i in few]
        images = torch.stack(samples).to(self.accelerator.device).float() / 255
        for name, page in strips(self.method, images, found).items():
            page.save(self.model.run.folder / SEARCH_FILE.parent / f"{name}.png")

    def _write(self, content: dict[str, Any]) -> None:
        from .assess import make_folder, save_plainly

        path = self.model.run.folder / SEARCH_FILE
        make_folder(path.parent)
        save_plainly(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
