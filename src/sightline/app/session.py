"""The app without its page: one model for all users. Stage 1 runs once per image, then any number of predictions.

    viewer = Viewer.open(App(run))
    image = viewer.read(Path("bird.jpg"))
    viewer.predict(image, viewer.wish(shown=[0, 2], removed=1))     # without part 1; 1 % token removal

Many threads may call at once; a fair lock serializes their use of the device.
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
from ..data.images import Preprocess, ResizeCrop, decode, read_image
from ..data.sampling import interleave_groups
from ..errors import UserError
from ..interventions.apply import CachedLook, calibrate, calibration_facts, load_intervention, save_intervention
from ..interventions.file import FILE, DistanceSketch, Intervention
from ..interventions.search import accuracy_differences, gain_estimate, resolve_objective
from ..load import evaluation_data, match_classes, open_model
from ..metrics.groups import evaluate
from ..metrics.inference import inference_batches, sample_evenly
from ..sight import Method, Prediction, Sight
from .lock import FairLock, LockedBatches, Progress

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..config import App
    from ..data.batches import Batches
    from ..load import EvaluationData, Model
    from ..methods.base import PartDetections
    from ..metrics.estimates import Estimate
    from ..metrics.predictions import Predictions

MAX_LOOKS = 32  # images whose stage 1 is cached, for all users together
MAX_EFFECTS = 32
MAX_BYTES = 1 << 30  # of cached stage 1 detections in validation images


@dataclass(frozen=True, eq=False)
class InputImage:
    """A preprocessed image: the only state of a user."""

    pixels: Tensor  # uint8 [3, h, w]
    name: str
    label: str = ""
    group: str = ""
    mask: Tensor | None = None  # bool [h, w]: of the data, for a method that takes masks as input

    @cached_property
    def key(self) -> str:
        mask = b"" if self.mask is None else self.mask.numpy().tobytes()
        return sha256(self.pixels.numpy().tobytes() + mask).hexdigest()


@dataclass(frozen=True, eq=False)
class LookedImage:
    """An image after the costly look."""

    images: Tensor  # [1, 3, h, w]
    detections: PartDetections | None  # of methods with discovered parts
    plain: Prediction | None  # as trained; None if the method needs a mask and there is none
    maps: dict[str, Tensor]  # [1, H, W], of methods without parts


@dataclass(frozen=True, eq=False)
class ShownPrediction:
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
    """The effect of an intervention on validation data."""

    objective: str
    worst: Estimate
    cells: dict[str, Estimate]  # accuracy of each group, or class
    gain: Estimate | None = None  # of the worst; None for the model as trained
    gains: dict[str, Estimate] = field(default_factory=dict)


@dataclass(eq=False)
class Calibration:
    """The distances of training patches from their part, once they are measured."""

    sketch: Future[DistanceSketch] = field(default_factory=Future)
    done: tuple[int, int] = (0, 1)  # batches done, and their total

    def set_progress(self, done: int, of: int) -> None:
        self.done = done, of


@dataclass(eq=False)
class Viewer:
    command: App
    accelerator: Accelerator
    model: Model
    dataset: EvaluationData | None  # the run's data
    missing: str  # why there are none, if so
    device_lock: FairLock = field(default_factory=FairLock)
    _looked_images: OrderedDict[str, LookedImage] = field(default_factory=OrderedDict)
    _measured: OrderedDict[Any, Predictions] = field(default_factory=OrderedDict)
    _looked: CachedLook | None = None
    _calibration: Calibration | None = None
    _saved: tuple[tuple[int, ...], Intervention] | None = None
    _calibrating: threading.Lock = field(default_factory=threading.Lock)
    _measuring: threading.Lock = field(default_factory=threading.Lock)
    _saving: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, command: App) -> Viewer:
        accelerator, model = open_model(command.run, command.device)
        dataset, missing = None, ""
        try:
            dataset = evaluation_data(Evaluate(command.run, command.data, command.layout), model.run)
            rows = match_classes(model, dataset.rows, dataset.path)
            dataset = replace(dataset, rows=model.method.with_masks(rows))
        except UserError as error:
            if command.data is not None:
                raise
            missing = str(error)
        viewer = cls(command, accelerator, model, dataset, missing)
        viewer.saved  # noqa: B018 (raises now if it is invalid)
        return viewer

    @property
    def method(self) -> Any:
        return self.model.method

    @property
    def parts(self) -> int:
        return self.method.part_count

    @property
    def saved(self) -> Intervention:
        """The saved intervention of the run, which another program or user may change at any time."""
        path = self.model.run.folder / FILE
        if not self.parts or not path.exists():
            return Intervention()
        facts = path.stat()
        state = facts.st_mtime_ns, facts.st_size, facts.st_ino
        if self._saved is None or self._saved[0] != state:
            self._saved = state, load_intervention(self.model) or Intervention()
        return self._saved[1]

    @property
    def blind(self) -> bool:
        return self.method.blind

    @property
    def draws(self) -> bool:
        """Whether the model accepts a mask drawn by the user."""
        return self.method.accepts_masks and not (self.parts and not self.blind)

    # ---- images ------------------------------------------------------------------------------------------------------

    def read(self, path: Path, name: str | None = None) -> InputImage:
        """Read and preprocess a file, as `predict` does."""
        image = read_image(path, name)
        geometry = ResizeCrop.of(image.size, Preprocess.of(self.model.expects))
        return InputImage(geometry.image(image), Path(name or path).name)

    def examples(self) -> list[int]:
        """Rows of the run's data, of a split that was not trained on if there is one, interleaving the groups."""
        if self.dataset is None:
            return []
        rows = self.dataset.rows
        splits = [rows.split_indices(split) for split in ("val", "test", "train")]
        indices = next((indices for indices in splits if len(indices)), np.arange(0))
        return indices[interleave_groups(rows.cells[0][indices])].tolist()

    def example(self, row: int) -> InputImage:
        assert self.dataset is not None, "without data there are no examples"
        rows = self.dataset.rows
        sample = decode(rows, row, Preprocess.of(self.model.expects), mask=self.method.needs_masks)
        group = "" if rows.groups is None else rows.group_names[rows.groups[row]]
        return InputImage(sample.image, rows.images[row], rows.classes[rows.labels[row]], group, sample.mask)

    # ---- one image -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, image: InputImage) -> LookedImage:
        """Once per image, for all users."""
        with self.device_lock:
            looked = self._looked_images.get(image.key) or self._look_once(image)
            self._looked_images[image.key] = looked
            self._looked_images.move_to_end(image.key)
            while len(self._looked_images) > MAX_LOOKS:
                self._looked_images.popitem(last=False)
            return looked

    def _look_once(self, image: InputImage) -> LookedImage:
        method, images = self.method, image.pixels[None].to(self.accelerator.device).float() / 255
        if method.part_count:
            detections = method.detect(images)
            return LookedImage(images, detections, method.predict_from(images, detections), {})
        if method.needs_masks:
            if image.mask is None:
                return LookedImage(images, None, None, {})
            sight = method.look_at(images, image.mask[None].to(images.device))
        else:
            sight = method.look(images)
        return LookedImage(images, None, method.judge(images, sight), relevance(method, images) | method.maps(images))

    @torch.no_grad()
    def predict(
        self, image: InputImage, intervention: Intervention | None = None, mask: Tensor | None = None
    ) -> ShownPrediction:
        """Under an intervention, or with a mask, bool [h, w], as the sight. Stage 1 does not run again."""
        looked, intervention = self.look(image), intervention or Intervention()
        with self.device_lock:
            prediction = self._judge(looked, intervention, mask)
        before = None if looked.plain is None else looked.plain.probabilities[0].cpu()
        return ShownPrediction(looked.images, prediction.probabilities[0].cpu(), before, prediction.sight, looked.maps)

    def _judge(self, looked: LookedImage, intervention: Intervention, mask: Tensor | None) -> Prediction:
        if mask is not None:
            if not mask.any():
                raise UserError("the drawn mask is empty: draw on the image what the model may see")
            sight = self.method.look_at(looked.images, mask[None].to(looked.images.device))
            return self.method.judge(looked.images, sight)
        if looked.detections is not None and intervention.changes:
            intervention.check_part_numbers(self.parts)
            return self.method.predict_from(looked.images, looked.detections, intervention.correction)
        if looked.plain is None:
            raise UserError("this method takes a mask as input, and this image has none: draw what the model may see")
        return looked.plain

    # ---- interventions -----------------------------------------------------------------------------------------------

    def make_intervention(self, shown: Sequence[int], removed: float = 0.0) -> Intervention:
        """Drop all parts but those `shown`, and remove the percentage `removed` of the patches, those farthest from
        their part; everything else is as in the saved intervention."""
        before = self.saved
        drop = tuple(part for part in range(self.parts) if part not in shown)
        force = tuple(part for part in before.force if part in shown)
        intervention = replace(before, drop=drop, force=force, quantile=None, thresholds=None, facts={})
        if removed:
            q = round(1 - removed / 100, 6)
            limits = before.thresholds if q == before.quantile else self.calibration().sketch.result().quantile(q)
            intervention = replace(intervention, quantile=q, thresholds=limits)
        intervention.check_part_numbers(self.parts)
        return intervention

    def calibration(self) -> Calibration:
        """Starts in the background on the first call."""
        with self._calibrating:
            if self._calibration is None:
                self._calibration = Calibration()
                threading.Thread(target=self._calibrate, args=[self._calibration], daemon=True).start()
            return self._calibration

    def _calibrate(self, calibration: Calibration) -> None:
        try:
            batches = self._batches("train", self.command.limit)
            try:
                locked = self._with_lock(batches, calibration.set_progress)
                calibration.sketch.set_result(calibrate(self.method, locked, self.accelerator))
            finally:
                batches.close()
        except Exception as error:  # re-raised by those who wait for the result
            calibration.sketch.set_exception(error)

    def save(self, intervention: Intervention, names: dict[int, str] | None = None) -> Intervention:
        """Save it as `sightline intervene` does: `predict`, `evaluate` and other commands apply it from then on."""
        with self._saving:
            before = self.saved
            names = {part: stripped for part, name in (names or {}).items() if (stripped := name.strip())}
            intervention = replace(intervention, names=names)
            intervention.check_part_numbers(self.parts)
            facts = dict(before.facts) if intervention == replace(before, names=names) else {}
            if not facts and intervention.quantile is not None:
                facts = self._calibrated(before, intervention)
            return save_intervention(self.model, replace(intervention, facts=facts))

    def _calibrated(self, before: Intervention, intervention: Intervention) -> dict[str, Any]:
        if intervention.quantile == before.quantile and "calibrated" in before.facts:
            return {"calibrated": before.facts["calibrated"]}
        assert self.dataset is not None
        facts = calibration_facts(self.dataset, self.calibration().sketch.result())
        facts["calibrated"]["images"] = min(self.command.limit, len(self.dataset.rows.split_indices("train")))
        return facts

    # ---- validation data ---------------------------------------------------------------------------------------------

    def effects(self, interventions: Sequence[Intervention], progress: Progress | None = None) -> list[Effect]:
        """On validation data, as trained and under each intervention; stage 1 runs once for all calls."""
        with self._measuring:
            requested = [Intervention(), *(replace(intervention, names={}) for intervention in interventions)]
            keys = [_intervention_key(intervention) for intervention in requested]
            new = {k: one for k, one in zip(keys, requested, strict=True) if k not in self._measured}
            if new:
                self._measured.update(zip(new, self._predict_validation(list(new.values()), progress), strict=True))
            plain, *others = [self._measured[key] for key in keys]
            for key in keys:
                self._measured.move_to_end(key)
            while len(self._measured) > MAX_EFFECTS:
                self._measured.popitem(last=False)
        return [_effect(plain, None), *(_effect(one, plain) for one in others)]

    def _predict_validation(self, interventions: list[Intervention], progress: Progress | None) -> list[Predictions]:
        """Called by one thread at a time."""
        if self._looked is None:
            batches = self._with_lock(self._batches("val"))
            assert self.dataset is not None
            self._looked = CachedLook(self.method, self.dataset.rows, batches, self.accelerator, MAX_BYTES)
        cast(LockedBatches, self._looked.batches).progress = progress
        return self._looked(interventions)

    def _batches(self, split: str, most: int | None = None) -> Batches:
        if self.dataset is None:
            raise UserError(f"this needs the run's data. {self.missing}")
        indices = self.dataset.rows.split_indices(split)
        if not len(indices):
            raise UserError(f"{self.dataset.path}: no images in the split {split!r}, which is needed here")
        indices = indices if most is None else sample_evenly(indices, most)
        rows, expects = self.dataset.rows, self.model.expects
        batch, cache = self.command.batch, self.command.cache
        return inference_batches(rows, indices, expects, self.accelerator, batch=batch, workers=0, cache=cache)

    def _with_lock(self, batches: Batches, progress: Progress | None = None) -> Batches:
        return cast("Batches", LockedBatches(batches, self.device_lock, progress))


def _intervention_key(intervention: Intervention) -> tuple[object, ...]:
    return intervention.drop, intervention.force, intervention.quantile, intervention.thresholds


def _effect(ours: Predictions, plain: Predictions | None) -> Effect:
    objective = resolve_objective(ours, None)
    metrics = evaluate(ours)
    cells, worst = (metrics.classes, metrics.worst_class)
    if objective == "worst-group":
        assert metrics.worst_group is not None
        cells, worst = metrics.groups, metrics.worst_group
    if plain is None:
        return Effect(objective, worst, cells)
    return Effect(
        objective, worst, cells, gain_estimate(ours, plain, objective), accuracy_differences(ours, plain, objective)
    )


def relevance(method: Method, images: Tensor) -> dict[str, Tensor]:
    """The relevance map of a prediction that uses the whole image."""
    from ..where.relevance import MAPS, has_relevance_map

    return {"relevance": MAPS["gae"](method, images)} if has_relevance_map(method) else {}
