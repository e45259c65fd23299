"""RobustViT: a trained classifier goes on training, so that its relevance lies on the thing and not around it.

A few masks are enough, or none that a person drew. The run is a plain classifier: it sees everything, needs no masks,
and what it has learnt is in its weights. RRR, GradMask and MaskTune begin the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.relevance import Pointed, Robustvit, Tuned
from ..data.batches import OnTheWay
from ..data.images import read_mask_file
from ..errors import UserError
from ..sight import Look, Sight
from ..training.context import StepInfo, TrainBatch, TrainContext
from ..vit.model import Input, ViT
from ..vit.weights import weights_sha256
from ..where.relevance import KINDS, Relevance, fit_at_once
from .base import record_backbone
from .erm import Classifier, build_erm
from .given_mask import Source, Tell, from_anywhere, masks_in, saliency, same_saliency
from .restore import restore

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.augment import Augment
    from ..data.batches import Batch, Batches
    from ..data.rows import Rows
    from ..training.run_folder import Run

TEMPERATURES = {"deit-b16": 0.65, "deit-s16": 0.55}  # of the confidence, as published; 1 for all others


class Shown(Classifier):
    """A classifier that is shown masks while it learns, and never afterwards."""

    trains_with_masks = True
    needs_masks = True
    accepts_masks = True
    uses_sight = False

    def __init__(self, vit: ViT, told: Tell, *, bright_background: bool = False):
        super().__init__(vit)
        self.source, self.bright_background = Source(told, None), bright_background

    def with_masks(self, rows: Rows) -> Rows:
        assert self.source.told is not None
        return self.source.told(rows)

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:  # noqa: ARG002 (masks teach, they do not show)
        return Sight.everything(images)

    def lesson(self, batch: Batch, augment: Augment, when: StepInfo) -> TrainBatch:
        """Masks are turned over before they are moved: what comes into the picture from outside is background."""
        return super().lesson(replace(batch, masks=self.things(batch)), augment, when)

    def things(self, batch: Batch) -> Tensor:
        """bool [b, h, w], True on the thing; nothing is, where a picture has no mask."""
        assert batch.masks is not None
        assert batch.has_mask is not None
        return ~batch.masks & batch.has_mask[:, None, None] if self.bright_background else batch.masks


class RobustViT(Shown):
    """Relevance is held to masks, and the answer to itself."""

    def __init__(self, vit: ViT, told: Tell, config: Robustvit, temperature: float = 1.0):
        super().__init__(vit, told, bright_background=config.bright == "background")
        self.config, self.temperature = config, temperature

    def forward(self, lesson: TrainBatch) -> dict[str, Tensor]:
        assert lesson.masks is not None
        return {name: each.mean() for name, each in self.losses(lesson.images, lesson.labels, lesson.masks).items()}

    def losses(self, images: Tensor, labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
        """[B] each; `loss` is 0.8 · (2 · background + 0.3 · foreground) + 0.2 · answer unless told otherwise."""
        config, found = self.config, self.relevance(images, labels)
        maps = stretched(F.interpolate(found.maps[:, None].float(), masks.shape[1:], mode="bilinear")[:, 0])
        outside, inside = background_loss(maps, masks), foreground_loss(maps, masks)
        if config.answer == "confidence":
            answer = confidence_loss(found.logits, self.temperature)
        else:
            answer = F.cross_entropy(found.logits.float(), labels, reduction="none")
        explaining = config.background * outside + config.foreground * inside
        # Also where something weighs nothing: processes expect a gradient, if only 0, of every weight.
        loss = config.explaining * explaining + config.answering * answer
        return {"loss": loss, "background": outside, "foreground": inside, "answer": answer}

    def relevance(self, images: Tensor, labels: Tensor) -> Relevance:
        """Of the true class, as published; the ablations know no class."""
        more = {"second_order": self.config.second_order} if self.config.relevance == "gae" else {}
        return KINDS[self.config.relevance](self.vit, images, labels, **more)

    def validate(self, exam: Batches, desk: TrainContext, select: str) -> dict[str, float]:
        """With `relevance`: 1 minus the mean loss of the validation pictures that have a mask."""
        if select != "relevance":
            return super().validate(exam, desk, select)
        total = torch.zeros(2, device=desk.accelerator.device, dtype=torch.float64)

        def add_losses(batch: Batch) -> None:
            masks = self.things(batch)
            has = masks.flatten(1).any(dim=1)
            images = batch.images[has].float() / 255
            at_once = max(self.config.batch, fit_at_once(self.vit, images))
            parts = (each.split(at_once) for each in (images, batch.labels[has], masks[has]))
            with torch.enable_grad(), desk.accelerator.autocast():
                for part in zip(*parts, strict=True):
                    if len(part[0]):
                        total[0] += self.losses(*part)["loss"].detach().double().sum()
            total[1] += has.sum()

        seen = cast("Batches", AlsoAsked(exam, desk.accelerator.device, add_losses))
        found = super().validate(seen, desk, "balanced")
        loss, count = desk.accelerator.reduce(total, "sum").tolist()
        return found | {"relevance": 1 - loss / max(count, 1)}


@dataclass(eq=False)
class AlsoAsked(OnTheWay):
    """About something else, too, before they are answered: so they are decoded once."""

    device: torch.device
    ask: Callable[[Batch], None]

    def epoch(self, number: int) -> Iterator[Batch]:
        for batch in self.batches.epoch(number):
            moved = batch.to(self.device)
            self.ask(moved)
            yield moved


# ---- losses ----------------------------------------------------------------------------------------------------------


def background_loss(maps: Tensor, masks: Tensor) -> Tensor:
    """[B]: relevance outside the mask, squared, over all pixels (RobustViT eq. 1)."""
    return (maps * ~masks).square().mean(dim=(1, 2))


def foreground_loss(maps: Tensor, masks: Tensor) -> Tensor:
    """[B]: what relevance lacks of 1 inside the mask, squared, over all pixels (RobustViT eq. 2)."""
    return ((1 - maps) * masks).square().mean(dim=(1, 2))


def confidence_loss(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[B]: cross-entropy with what the model itself answers at the moment (RobustViT eq. 4)."""
    return F.cross_entropy(logits.float() / temperature, logits.argmax(dim=1), reduction="none")


def stretched(maps: Tensor) -> Tensor:
    """From 0 to 1 in each picture; the gradient goes through both ends."""
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return (maps - low) / (high - low).clamp(min=torch.finfo(maps.dtype).tiny ** 0.5)


# ---- what it begins with ---------------------------------------------------------------------------------------------


def begun(config: Tuned, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[ViT, Input]:
    """A trained classifier for these classes: of a run, or weights with their own head. run.json says which."""
    if bool(config.start) == bool(config.backbone):
        raise UserError(
            f"{config.method} goes on with a trained classifier: say which with --from RUN (such as one of `sightline "
            "train erm`), or with --backbone, if its weights have a head for these classes; not both"
        )
    if config.compile and isinstance(config, Pointed):
        raise UserError(f"--compile: {config.method} looks into blocks, which compiled ones do not allow; leave it out")
    vit, expects = of_run(config, rows) if config.start else with_own_head(config, rows)
    patch = vit.config.patch
    if config.size is not None:
        if config.size < patch or config.size % patch:
            near = max(1, config.size // patch) * patch
            raise UserError(f"--size {config.size}: must be a multiple of the patch, {patch}, such as {near}")
        expects = replace(expects, size=(config.size, config.size))
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        before = str(Path(config.started_from).resolve()) if config.start else None
        run.note(began_with={"run": before, "weights": weights_sha256(vit)[:16]})
    return vit, expects


def of_run(config: Tuned, rows: Rows) -> tuple[ViT, Input]:
    from ..vit.weights import Origin

    model = restore(config.started_from)
    if not isinstance(model.method, Classifier):
        raise UserError(
            f"--from {config.started_from}: a {model.run.facts['method']} run; {config.method} goes on with one that "
            "sees everything, such as erm, probe or dfr"
        )
    if model.classes != rows.classes:
        raise UserError(
            f"--from {config.started_from}: knows {len(model.classes)} classes ({', '.join(model.classes[:3])} …), and "
            f"these data have {len(rows.classes)} ({', '.join(rows.classes[:3])} …); they must be the same"
        )
    vit = model.method.vit
    of = model.run.facts.get("backbone") or {}
    vit.origin = Origin(of.get("name"), of.get("file", ""), of.get("repository"), of.get("revision"))
    return vit, model.expects


def with_own_head(config: Tuned, rows: Rows) -> tuple[ViT, Input]:
    from ..datasets.imagenet import imagenet_classes
    from ..vit.weights import load_backbone

    vit = load_backbone(config.backbone)
    if vit.config.classes != len(rows.classes):
        head = f"a head for {vit.config.classes:,} classes" if vit.config.classes else "no head"
        raise UserError(
            f"--backbone {config.backbone}: has {head}, and these data have {len(rows.classes):,} classes; train a "
            "classifier first (`sightline train erm`), and go on with --from RUN"
        )
    names = tuple(imagenet_classes().values())
    if set(rows.classes) == set(names) and rows.classes != names:
        raise UserError(
            f"{config.data}: has ImageNet's classes in another order than the head of {config.backbone}; read it with "
            "--layout imagenet, or call classes by their wnids"
        )
    return vit, vit.config.input


# ---- what it learns from ---------------------------------------------------------------------------------------------


def pupils(rows: Rows, candidates: np.ndarray, config: Pointed) -> np.ndarray:
    """Which of the candidates are learnt from: so many classes, and so many pictures of each, drawn by the seed."""
    generator = np.random.default_rng([config.seed, 9])
    present = np.unique(rows.labels[candidates])
    chosen = present if config.classes is None else generator.permutation(present)[: config.classes]
    found = []
    for label in np.sort(chosen):
        of_class = candidates[rows.labels[candidates] == label]
        found.append(of_class if config.per_class is None else generator.permutation(of_class)[: config.per_class])
    return np.sort(np.concatenate(found)) if found else candidates[:0]


def having(rows: Rows, split: str) -> np.ndarray:
    """The rows of a split that have a mask."""
    at = rows.where(split)
    return at[[bool(rows.masks and rows.masks[i]) for i in at]]


def told_by(rows: Rows, config: Pointed, make: Callable[[Rows], Rows] | None) -> Rows:
    """The pictures that are learnt from, with their masks, and all of the other splits. Masks that have to be made are
    made for those and for the validation data."""
    if make is None and config.masks != "data":
        rows = replace(rows, masks=masks_in(rows, Path(config.masks)))
    candidates = rows.where("train") if make is not None else having(rows, "train")
    if not len(candidates):
        raise UserError(
            f"{rows.name}: no training picture has a mask; give a mask column, --masks FOLDER, or --masks "
            "tokencut:BACKBONE, which needs none"
        )
    learnt = pupils(rows, candidates, config) if make is not None else shown(rows, candidates, config)
    rows = rows.take(np.concatenate([learnt, rows.where("val"), rows.where("test")]))
    if make is not None:
        at = np.concatenate([rows.where("train"), rows.where("val")])
        made = make(rows.take(at))
        assert made.masks is not None
        masks = dict(zip(at.tolist(), made.masks, strict=True))
        rows = replace(rows, masks=[masks.get(i, "") for i in range(len(rows))], notes=made.notes)
    validating = having(rows, "val")
    if config.select == "relevance" and all(shows_nothing(rows, int(i), config) for i in validating):
        what = "all masks of validation pictures are empty" if len(validating) else "no validation picture has a mask"
        raise UserError(f"--select relevance: {what}; select by balanced, for one")
    return rows


def shown(rows: Rows, candidates: np.ndarray, config: Pointed) -> np.ndarray:
    """`pupils`, drawn anew while some have a mask of nothing, from which relevance would learn to be nowhere."""
    void: set[int] = set()
    while True:
        left = candidates[[int(i) not in void for i in candidates]]
        if not len(left):
            assert rows.masks is not None
            raise UserError(
                f"{rows.name}: every mask of the training pictures is empty, as {rows.masks[candidates[0]]}; the thing "
                "has to be brighter than half (255, or 1 beside 0 in a lossless file), or say --bright background"
            )
        learnt = pupils(rows, left, config)
        found = {int(i) for i in learnt if shows_nothing(rows, int(i), config)}
        if not found:
            return learnt
        void |= found


def shows_nothing(rows: Rows, index: int, config: Pointed) -> bool:
    mask = read_mask_file(rows, index)
    assert mask is not None
    bright = np.asarray(mask)
    return not (bright if config.bright == "thing" else ~bright).any()


def check_hopeless_masks(config: Pointed) -> None:
    for flag, number in (("--per-class", config.per_class), ("--classes", config.classes)):
        if number is not None and number < 1:
            raise UserError(f"{flag} {number}: must be at least 1")
    if config.bright == "background" and config.masks == "data":
        raise UserError(
            "--bright background: in the data's own masks the thing is bright, and everything else reads them so; turn "
            "them over, or give these with --masks FOLDER"
        )


def teller(config: Pointed, rows: Rows, expects: Input, run: Run, accelerator: Accelerator) -> Tell:
    """What gives the rows their masks; run.json says which, and which pictures are learnt from."""
    check_hopeless_masks(config)
    where, make, seen_by = saliency(config.masks, config.seed), None, {}
    if where is not None:
        seen_by = {"saliency_sha256": same_saliency(where, run.facts)}
        make = maker(where, config, expects, run, accelerator)
    tell = partial(told_by, config=config, make=make)
    told = tell(rows)  # so that what is missing is said now
    if accelerator.is_main_process:
        learnt = told.where("train")
        classes = [told.classes[label] for label in np.unique(told.labels[learnt])]
        chosen = config.per_class is not None or config.classes is not None
        pictures = {"pictures": [told.images[i] for i in learnt]} if chosen else {}
        run.note(masks=from_anywhere(config.masks), learnt_from={"n": len(learnt), "classes": classes} | pictures)
        run.note(**seen_by)
    return tell


def maker(where: Look, config: Tuned, expects: Input, run: Run, accelerator: Accelerator) -> Callable[[Rows], Rows]:
    """Writes masks once, for this run or, with --cache, for others too."""
    from ..where.mask_files import write_masks

    home = config.cache or run.folder / "masks"
    return partial(write_masks, where, expects=expects, folder=home, accelerator=accelerator, workers=config.workers)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_robustvit(config: Robustvit, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_hopeless_losses(config)
    vit, expects = begun(config, rows, run, accelerator)
    temperature = config.temperature or TEMPERATURES.get(vit.origin.name or "", 1.0)
    tell = teller(config, rows, expects, run, accelerator)
    if accelerator.is_main_process:
        run.note(temperature=temperature)
    return RobustViT(vit, tell, config, temperature), expects


def check_hopeless_losses(config: Robustvit) -> None:
    settings = asdict(config)
    for name in ("background", "foreground", "explaining", "answering"):
        if not settings[name] >= 0:
            raise UserError(f"--{name} {settings[name]}: must not be negative; 0 leaves it out")
    if not config.explaining * (config.background + config.foreground) and not config.answering:
        raise UserError("nothing would be learnt: leave --background, --foreground or --answering on")
    if config.temperature is not None and not config.temperature > 0:
        raise UserError(f"--temperature {config.temperature}: must be above 0")
    if config.second_order and config.relevance != "gae":
        raise UserError(f"--second-order: {config.relevance} has no gradients in it; that is for gae")


build_robustvit: Any = build_erm
