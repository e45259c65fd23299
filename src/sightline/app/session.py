"""One model for everyone who looks at it: a picture is looked at once, and answered as often as anybody likes.

    viewer = Viewer.open(App(run))
    picture = viewer.read(Path("bird.jpg"))
    viewer.answer(picture, viewer.wish(shown=[0, 2], removed=1))     # without part 1, and the strangest 1 % of patches

Nothing here knows of pages: `app` draws what this says. Many threads may ask at once; the device serves them in turn.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ..config import Evaluate
from ..data.images import Canvas, Placement, decode, read_image
from ..errors import UserError
from ..interventions.apply import CachedLook, calibrate, calibrated, keep, kept
from ..interventions.file import FILE, DistanceSketch, Intervention
from ..interventions.search import differences, gained, objective_of
from ..load import evaluation_data, match_classes, opened
from ..metrics.groups import evaluate
from ..metrics.inference import inference_batches
from ..sight import Prediction, Sight
from .lock import InTurns, Progress, Turns

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..config import App
    from ..data.batches import Batches
    from ..load import EvaluationData, Model
    from ..methods.base import Found
    from ..metrics.estimates import Estimate
    from ..metrics.predictions import Predictions

MOST_LOOKS = 32  # pictures whose first stage is remembered, for all users together
MOST_EFFECTS = 32
MOST_BYTES = 1 << 30  # of what was found in validation pictures


@dataclass(frozen=True, eq=False)
class Picture:
    """As the model is given it: all that has to be remembered of a user."""

    pixels: Tensor  # uint8 [3, h, w]
    name: str
    label: str = ""
    group: str = ""
    mask: Tensor | None = None  # bool [h, w]: of the data, for a method that is told where to look

    @cached_property
    def key(self) -> str:
        mask = b"" if self.mask is None else self.mask.numpy().tobytes()
        return sha256(self.pixels.numpy().tobytes() + mask).hexdigest()


@dataclass(frozen=True, eq=False)
class Glance:
    """What looking once has found."""

    images: Tensor  # [1, 3, h, w]
    found: Found | None  # where parts are discovered
    plain: Prediction | None  # as trained; None: it is told where to look, and was not
    maps: dict[str, Tensor]  # [1, H, W], where there are no parts to show


@dataclass(frozen=True, eq=False)
class Answer:
    images: Tensor  # [1, 3, h, w]
    probabilities: Tensor  # [C]
    before: Tensor | None  # [C]: as trained
    sight: Sight
    maps: dict[str, Tensor]

    @property
    def coverage(self) -> float:
        return float(self.sight.coverage(tuple(self.images.shape[2:])))


@dataclass(frozen=True)
class Effect:
    """What an intervention does to the validation data."""

    objective: str
    worst: Estimate
    cells: dict[str, Estimate]  # accuracy of each group, or class
    gain: Estimate | None = None  # of the worst; None: as trained
    gains: dict[str, Estimate] = field(default_factory=dict)


@dataclass(eq=False)
class Calibration:
    """How far patches of training pictures lie from their part, when that is known."""

    sketch: Future[DistanceSketch] = field(default_factory=Future)
    done: tuple[int, int] = (0, 1)  # batches, and of how many

    def tell(self, done: int, of: int) -> None:
        self.done = done, of


@dataclass(eq=False)
class Viewer:
    command: App
    accelerator: Accelerator
    model: Model
    asked: EvaluationData | None  # the run's data
    missing: str  # why there are none
    turns: Turns = field(default_factory=Turns)
    _glances: OrderedDict[str, Glance] = field(default_factory=OrderedDict)
    _measured: OrderedDict[Any, Predictions] = field(default_factory=OrderedDict)
    _looked: CachedLook | None = None
    _calibration: Calibration | None = None
    _kept: tuple[tuple[int, ...], Intervention] | None = None
    _calibrating: threading.Lock = field(default_factory=threading.Lock)
    _measuring: threading.Lock = field(default_factory=threading.Lock)
    _saving: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, command: App) -> Viewer:
        accelerator, model = opened(command.run, command.device)
        asked, missing = None, ""
        try:
            asked = evaluation_data(Evaluate(command.run, command.data, command.layout), model.run)
            rows = match_classes(model, asked.rows, asked.path)
            asked = replace(asked, rows=model.method.with_masks(rows))
        except UserError as error:
            if command.data is not None:
                raise
            missing = str(error)
        viewer = cls(command, accelerator, model, asked, missing)
        viewer.kept  # noqa: B018 (what is wrong with it is said now)
        return viewer

    @property
    def method(self) -> Any:
        return self.model.method

    @property
    def parts(self) -> int:
        return self.method.part_count

    @property
    def kept(self) -> Intervention:
        """What the run says now: another program, or another user, may have changed it since it was read."""
        path = self.model.run.folder / FILE
        if not self.parts or not path.exists():
            return Intervention()
        facts = path.stat()
        state = facts.st_mtime_ns, facts.st_size, facts.st_ino
        if self._kept is None or self._kept[0] != state:
            self._kept = state, kept(self.model) or Intervention()
        return self._kept[1]

    @property
    def blind(self) -> bool:
        return self.method.blind

    @property
    def draws(self) -> bool:
        """Whether it can be shown what a user draws."""
        return self.method.accepts_masks and not (self.parts and not self.blind)

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def read(self, path: Path, name: str | None = None) -> Picture:
        """Any file, as `predict` reads it."""
        picture = read_image(path, name)
        place = Placement.of(picture.size, Canvas.of(self.model.expects))
        return Picture(place.picture(picture), Path(name or path).name)

    def examples(self) -> list[int]:
        """Rows of the run's data that were not trained on, if there are any: one group after the other."""
        if self.asked is None:
            return []
        rows = self.asked.rows
        cells, names = rows.cells
        order = next((at for split in ("val", "test", "train") if len(at := rows.where(split))), np.arange(0))
        within = np.zeros(len(order), dtype=np.int64)
        for cell in range(len(names)):
            own = cells[order] == cell
            within[own] = np.arange(own.sum())
        return order[np.lexsort((cells[order], within))].tolist()

    def example(self, row: int) -> Picture:
        assert self.asked is not None, "without data there are no examples"
        rows = self.asked.rows
        sample = decode(rows, row, Canvas.of(self.model.expects), mask=self.method.needs_masks)
        group = "" if rows.groups is None else rows.group_names[rows.groups[row]]
        return Picture(sample.image, rows.images[row], rows.classes[rows.labels[row]], group, sample.mask)

    # ---- one picture -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, picture: Picture) -> Glance:
        """Once per picture, whoever asks."""
        with self.turns:
            glance = self._glances.get(picture.key) or self._glance(picture)
            self._glances[picture.key] = glance
            self._glances.move_to_end(picture.key)
            while len(self._glances) > MOST_LOOKS:
                self._glances.popitem(last=False)
            return glance

    def _glance(self, picture: Picture) -> Glance:
        method, images = self.method, picture.pixels[None].to(self.accelerator.device).float() / 255
        if method.part_count:
            found = method.find(images)
            return Glance(images, found, method.answer(images, found), {})
        if method.needs_masks:
            if picture.mask is None:
                return Glance(images, None, None, {})
            sight = method.look_at(images, picture.mask[None].to(images.device))
        else:
            sight = method.look(images)
        return Glance(images, None, method.judge(images, sight), relevance(method, images) | method.maps(images))

    @torch.no_grad()
    def answer(self, picture: Picture, wish: Intervention | None = None, mask: Tensor | None = None) -> Answer:
        """Under an intervention, or shown nothing but a mask, bool [h, w]. Nothing is looked for again."""
        glance, wish = self.look(picture), wish or Intervention()
        with self.turns:
            prediction = self._judge(glance, wish, mask)
        before = None if glance.plain is None else glance.plain.probabilities[0].cpu()
        return Answer(glance.images, prediction.probabilities[0].cpu(), before, prediction.sight, glance.maps)

    def _judge(self, glance: Glance, wish: Intervention, mask: Tensor | None) -> Prediction:
        if mask is not None:
            if not mask.any():
                raise UserError("nothing is drawn yet: draw on the picture what may be seen")
            sight = self.method.look_at(glance.images, mask[None].to(glance.images.device))
            return self.method.judge(glance.images, sight)
        if glance.found is not None and wish.changes:
            wish.check_impossible(self.parts)
            return self.method.answer(glance.images, glance.found, wish.correction)
        if glance.plain is None:
            raise UserError("this method is told where to look, and this picture has no mask: draw what may be seen")
        return glance.plain

    # ---- interventions -----------------------------------------------------------------------------------------------

    def wish(self, shown: Sequence[int], removed: float = 0.0) -> Intervention:
        """All but the parts that are `shown` dropped, and of the patches the share `removed`, in per cent, that is
        farthest from its part; what the run keeps besides, stays."""
        before = self.kept
        drop = tuple(part for part in range(self.parts) if part not in shown)
        force = tuple(part for part in before.force if part in shown)
        wish = replace(before, drop=drop, force=force, quantile=None, thresholds=None, facts={})
        if removed:
            q = round(1 - removed / 100, 6)
            limits = before.thresholds if q == before.quantile else self.calibration().sketch.result().quantile(q)
            wish = replace(wish, quantile=q, thresholds=limits)
        wish.check_impossible(self.parts)
        return wish

    def calibration(self) -> Calibration:
        """Begun when it is first asked for, and not waited for."""
        with self._calibrating:
            if self._calibration is None:
                self._calibration = Calibration()
                threading.Thread(target=self._calibrate, args=[self._calibration], daemon=True).start()
            return self._calibration

    def _calibrate(self, calibration: Calibration) -> None:
        try:
            batches = self._batches("train", self.command.sample)
            try:
                told = self._in_turns(batches, calibration.tell)
                calibration.sketch.set_result(calibrate(self.method, told, self.accelerator))
            finally:
                batches.close()
        except Exception as error:  # whoever waits for it is told
            calibration.sketch.set_exception(error)

    def save(self, wish: Intervention, names: dict[int, str] | None = None) -> Intervention:
        """As `sightline intervene` keeps it: `predict`, `evaluate` and the others apply it from now on."""
        with self._saving:
            before = self.kept
            names = {part: said for part, name in (names or {}).items() if (said := name.strip())}
            wish = replace(wish, names=names)
            wish.check_impossible(self.parts)
            facts = dict(before.facts) if wish == replace(before, names=names) else {}
            if not facts and wish.quantile is not None:
                facts = self._calibrated(before, wish)
            return keep(self.model, replace(wish, facts=facts))

    def _calibrated(self, before: Intervention, wish: Intervention) -> dict[str, Any]:
        if wish.quantile == before.quantile and "calibrated" in before.facts:
            return {"calibrated": before.facts["calibrated"]}
        assert self.asked is not None
        facts = calibrated(self.asked, self.calibration().sketch.result())
        facts["calibrated"]["pictures"] = min(self.command.sample, len(self.asked.rows.where("train")))
        return facts

    # ---- many pictures -----------------------------------------------------------------------------------------------

    def effects(self, wishes: Sequence[Intervention], progress: Progress | None = None) -> list[Effect]:
        """On validation data, as trained and under each wish: the first stage runs once, for all that is ever asked."""
        with self._measuring:
            every = [Intervention(), *(replace(wish, names={}) for wish in wishes)]
            todo = list({_what(wish): wish for wish in every if _what(wish) not in self._measured}.values())
            if todo:
                for wish, answers in zip(todo, self._answers(todo, progress), strict=True):
                    self._measured[_what(wish)] = answers
            plain, *others = [self._measured[_what(wish)] for wish in every]
            for wish in every:
                self._measured.move_to_end(_what(wish))
            while len(self._measured) > MOST_EFFECTS:
                self._measured.popitem(last=False)
        return [_effect(plain, None), *(_effect(one, plain) for one in others)]

    def _answers(self, wishes: list[Intervention], progress: Progress | None) -> list[Predictions]:
        """Only one thread at a time."""
        if self._looked is None:
            batches = self._in_turns(self._batches("val"))
            assert self.asked is not None
            self._looked = CachedLook(self.method, self.asked.rows, batches, self.accelerator, MOST_BYTES)
        cast(InTurns, self._looked.batches).progress = progress
        return self._looked(wishes)

    def _batches(self, split: str, most: int | None = None) -> Batches:
        if self.asked is None:
            raise UserError(f"this needs the run's data. {self.missing}")
        indices = self.asked.rows.where(split)
        if not len(indices):
            raise UserError(f"{self.asked.path}: no pictures in the split {split!r}, which this is measured on")
        if most is not None and len(indices) > most:
            indices = indices[np.linspace(0, len(indices) - 1, most).round().astype(int)]
        rows, expects = self.asked.rows, self.model.expects
        batch, cache = self.command.batch, self.command.cache
        return inference_batches(rows, indices, expects, self.accelerator, batch=batch, workers=0, cache=cache)

    def _in_turns(self, batches: Batches, progress: Progress | None = None) -> Batches:
        return cast("Batches", InTurns(batches, self.turns, progress))


def _what(wish: Intervention) -> tuple[object, ...]:
    return wish.drop, wish.force, wish.quantile, wish.thresholds


def _effect(ours: Predictions, plain: Predictions | None) -> Effect:
    objective = objective_of(ours, None)
    metrics = evaluate(ours)
    cells, worst = (metrics.classes, metrics.worst_class)
    if objective == "worst-group":
        assert metrics.worst_group is not None
        cells, worst = metrics.groups, metrics.worst_group
    if plain is None:
        return Effect(objective, worst, cells)
    return Effect(objective, worst, cells, gained(ours, plain, objective), differences(ours, plain, objective))


def relevance(method: object, images: Tensor) -> dict[str, Tensor]:
    """What an answer that was made from everything relies on."""
    from ..where.relevance import MAPS, can_be_explained

    return {"relevance": MAPS["gae"](method, images)} if can_be_explained(method) else {}
