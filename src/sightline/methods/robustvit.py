"""RobustViT: a trained classifier is fine-tuned so that its relevance lies on the object and not on the background.

A few masks are enough, annotated or made by a saliency method. The result is a plain classifier: it sees everything,
needs no masks, and what it has learned is in its weights. RRR, GradMask and MaskTune start the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.relevance import Pointed, Robustvit, Tuned
from ..data.batches import TransformedBatches
from ..data.images import read_row_mask
from ..datasets.imagenet import imagenet_classes
from ..errors import UserError
from ..sight import Sight
from ..training.trainable import StepInfo, TrainBatch, TrainContext
from ..vit.model import Input, ViT
from ..vit.weights import Origin, load_backbone, weights_sha256
from ..where.attention import min_max_scale
from ..where.relevance import KINDS, Relevance, images_per_pass
from .base import fitted_input, record_backbone, resized_input
from .erm import Classifier, build_erm
from .given_mask import (
    AddMasks,
    MaskSource,
    absolute_mask_source,
    check_saliency_weights,
    find_masks,
    mask_writer,
    saliency,
)
from .restore import restore

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.augment import Augment
    from ..data.batches import Batch, Batches
    from ..data.rows import Rows
    from ..training.run_folder import Run

TEMPERATURES = {"deit-b16": 0.65, "deit-s16": 0.55}  # of the confidence loss, as published; 1 for all others


class MaskSupervisedClassifier(Classifier):
    """A classifier that is trained with masks and needs none afterwards."""

    trains_with_masks = True
    needs_masks = True
    accepts_masks = True
    uses_sight = False

    def __init__(self, vit: ViT, add_masks: AddMasks, *, masks_mark_background: bool = False):
        super().__init__(vit)
        self.source, self.masks_mark_background = MaskSource(add_masks, None), masks_mark_background

    def with_masks(self, rows: Rows) -> Rows:
        assert self.source.add_masks is not None
        return self.source.add_masks(rows)

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:  # noqa: ARG002 (masks supervise, they hide nothing)
        return Sight.everything(images)

    def make_train_batch(self, batch: Batch, augment: Augment, info: StepInfo) -> TrainBatch:
        """Masks are inverted before augmentation, which fills what comes in from outside the image as background."""
        return super().make_train_batch(replace(batch, masks=self.object_masks(batch)), augment, info)

    def object_masks(self, batch: Batch) -> Tensor:
        """bool [b, h, w], True on the object; all False for an image without a mask."""
        assert batch.masks is not None
        assert batch.has_mask is not None
        return ~batch.masks & batch.has_mask[:, None, None] if self.masks_mark_background else batch.masks


class RobustViT(MaskSupervisedClassifier):
    """The relevance is supervised by masks, and the prediction is held to itself or to the label."""

    def __init__(self, vit: ViT, add_masks: AddMasks, config: Robustvit, temperature: float = 1.0):
        super().__init__(vit, add_masks, masks_mark_background=config.mask_marks == "background")
        self.config, self.temperature = config, temperature

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.masks is not None
        return {name: loss.mean() for name, loss in self.losses(batch.images, batch.labels, batch.masks).items()}

    def losses(self, images: Tensor, labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
        """[B] each; by default `loss` is 0.8 · (2 · background + 0.3 · foreground) + 0.2 · classification loss."""
        config, found = self.config, self.relevance(images, labels)
        maps = F.interpolate(found.maps[:, None].float(), masks.shape[1:], mode="bilinear")[:, 0]
        maps = min_max_scale(maps, (1, 2))
        background, foreground = background_loss(maps, masks), foreground_loss(maps, masks)
        if config.classification_target == "prediction":
            classification = confidence_loss(found.logits, self.temperature)
        else:
            classification = F.cross_entropy(found.logits.float(), labels, reduction="none")
        relevance = config.background_weight * background + config.foreground_weight * foreground
        # Also where a weight is 0: distributed training expects a gradient, if only 0, for every parameter.
        loss = config.relevance_weight * relevance + config.classification_weight * classification
        return {"loss": loss, "background": background, "foreground": foreground, "classification": classification}

    def relevance(self, images: Tensor, labels: Tensor) -> Relevance:
        """Of the true class, as published; the ablations (rollout, attention) do not depend on the class."""
        options = {"second_order": self.config.double_backward} if self.config.relevance == "gae" else {}
        return KINDS[self.config.relevance](self.vit, images, labels, **options)

    def validate(self, val_batches: Batches, context: TrainContext, select: str) -> dict[str, float]:
        """With `--select relevance`: 1 minus the mean loss over the validation images that have a mask."""
        if select != "relevance":
            return super().validate(val_batches, context, select)
        total = torch.zeros(2, device=context.accelerator.device, dtype=torch.float64)

        def add_losses(batch: Batch) -> None:
            masks = self.object_masks(batch)
            has_mask = masks.flatten(1).any(dim=1)
            images = batch.images[has_mask].float() / 255
            count = max(self.config.batch, images_per_pass(self.vit, images))
            chunks = (tensor.split(count) for tensor in (images, batch.labels[has_mask], masks[has_mask]))
            with torch.enable_grad(), context.accelerator.autocast():
                for chunk in zip(*chunks, strict=True):
                    if len(chunk[0]):
                        total[0] += self.losses(*chunk)["loss"].detach().double().sum()
            total[1] += has_mask.sum()

        observed = cast("Batches", ObservedBatches(val_batches, context.accelerator.device, add_losses))
        scores = super().validate(observed, context, "balanced")
        loss, count = context.accelerator.reduce(total, "sum").tolist()
        return scores | {"relevance": 1 - loss / max(count, 1)}


@dataclass(eq=False)
class ObservedBatches(TransformedBatches):
    """Calls `observe` on every batch before it is predicted, so that images are decoded only once."""

    device: torch.device
    observe: Callable[[Batch], None]

    def epoch(self, number: int) -> Iterator[Batch]:
        for batch in self.batches.epoch(number):
            moved = batch.to(self.device)
            self.observe(moved)
            yield moved


# ---- losses ----------------------------------------------------------------------------------------------------------


def background_loss(maps: Tensor, masks: Tensor) -> Tensor:
    """[B]: squared relevance outside the mask, averaged over all pixels (RobustViT eq. 1)."""
    return (maps * ~masks).square().mean(dim=(1, 2))


def foreground_loss(maps: Tensor, masks: Tensor) -> Tensor:
    """[B]: squared difference of relevance from 1 inside the mask, averaged over all pixels (RobustViT eq. 2)."""
    return ((1 - maps) * masks).square().mean(dim=(1, 2))


def confidence_loss(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[B]: cross-entropy with the model's own current prediction (RobustViT eq. 4)."""
    return F.cross_entropy(logits.float() / temperature, logits.argmax(dim=1), reduction="none")


# ---- the classifier to start from ------------------------------------------------------------------------------------


def load_starting_classifier(config: Tuned, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[ViT, Input]:
    """A trained classifier for these classes, of a run or of a backbone with its own head; recorded in run.json."""
    if bool(config.init_from) == bool(config.backbone):
        raise UserError(
            f"{config.method} fine-tunes a trained classifier: give either --init-from RUN (such as one of `sightline "
            "train erm`), or --backbone, if its weights have a head for these classes"
        )
    if config.compile and isinstance(config, Pointed):
        raise UserError(f"--compile: {config.method} needs the attention inside blocks, which compiled blocks hide")
    vit, expects = load_run_classifier(config, rows) if config.init_from else load_backbone_with_head(config, rows)
    if config.size is not None:
        expects = replace(expects, size=resized_input(vit, config.size, "the model").size)
    expects = fitted_input(expects, config.fit)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        before = str(Path(config.started_from).resolve()) if config.init_from else None
        run.note(began_with={"run": before, "weights": weights_sha256(vit)[:16]})
    return vit, expects


def load_run_classifier(config: Tuned, rows: Rows) -> tuple[ViT, Input]:
    model = restore(config.started_from)
    if not isinstance(model.method, Classifier):
        raise UserError(
            f"--init-from {config.started_from}: a {model.run.facts['method']} run; {config.method} starts from one "
            "that sees everything, such as erm, probe or dfr"
        )
    if model.classes != rows.classes:
        raise UserError(
            f"--init-from {config.started_from}: has {len(model.classes)} classes ({', '.join(model.classes[:3])} …), "
            f"and the dataset has {len(rows.classes)} ({', '.join(rows.classes[:3])} …); they must be the same"
        )
    vit, origin = model.method.vit, model.run.facts.get("backbone") or {}
    vit.origin = Origin(origin.get("name"), origin.get("file", ""), origin.get("repository"), origin.get("revision"))
    return vit, model.expects


def load_backbone_with_head(config: Tuned, rows: Rows) -> tuple[ViT, Input]:
    vit = load_backbone(config.backbone)
    if vit.config.classes != len(rows.classes):
        head = f"a head for {vit.config.classes:,} classes" if vit.config.classes else "no head"
        raise UserError(
            f"--backbone {config.backbone}: has {head}, and the dataset has {len(rows.classes):,} classes; train a "
            "classifier first (`sightline train erm`), and start from it with --init-from RUN"
        )
    names = tuple(imagenet_classes().values())
    if set(rows.classes) == set(names) and rows.classes != names:
        raise UserError(
            f"{config.data}: has ImageNet's classes in another order than the head of {config.backbone}; read it with "
            "--layout imagenet, or name classes by their wnids"
        )
    return vit, vit.config.input


# ---- the masks to train with -----------------------------------------------------------------------------------------


def sample_training_images(rows: Rows, candidates: np.ndarray, config: Pointed) -> np.ndarray:
    """A random subset of the candidates: `--mask-classes` classes and `--masks-per-class` images of each."""
    generator = np.random.default_rng([config.seed, 9])
    present = np.unique(rows.labels[candidates])
    classes = present if config.mask_classes is None else generator.permutation(present)[: config.mask_classes]
    chosen = []
    for label in np.sort(classes):
        members, count = candidates[rows.labels[candidates] == label], config.masks_per_class
        chosen.append(members if count is None else generator.permutation(members)[:count])
    return np.sort(np.concatenate(chosen)) if chosen else candidates[:0]


def rows_with_masks(rows: Rows, split: str) -> np.ndarray:
    """The indices of a split whose rows have a mask."""
    at = rows.split_indices(split)
    return at[[bool(rows.masks and rows.masks[i]) for i in at]]


def add_training_masks(rows: Rows, config: Pointed, make: AddMasks | None) -> Rows:
    """The training images with their masks, and all images of the other splits. `make` makes masks where these do not
    exist yet, for the training and validation images."""
    if make is None and config.masks != "data":
        rows = replace(rows, masks=find_masks(rows, Path(config.masks)))
    candidates = rows.split_indices("train") if make is not None else rows_with_masks(rows, "train")
    if not len(candidates):
        raise UserError(
            f"{rows.name}: no training image has a mask; give a mask column, --masks FOLDER, or --masks "
            "tokencut:BACKBONE, which needs no annotation"
        )
    sample = sample_training_images if make is not None else sample_nonempty_masks
    chosen = sample(rows, candidates, config)
    rows = rows.take(np.concatenate([chosen, rows.split_indices("val"), rows.split_indices("test")]))
    if make is not None:
        at = np.concatenate([rows.split_indices("train"), rows.split_indices("val")])
        made = make(rows.take(at))
        assert made.masks is not None
        masks = dict(zip(at.tolist(), made.masks, strict=True))
        rows = replace(rows, masks=[masks.get(i, "") for i in range(len(rows))], notes=made.notes)
    validation = rows_with_masks(rows, "val")
    if config.select == "relevance" and all(mask_is_empty(rows, int(i), config) for i in validation):
        problem = "all validation masks are empty" if len(validation) else "no validation image has a mask"
        raise UserError(f"--select relevance: {problem}; use --select balanced")
    return rows


def sample_nonempty_masks(rows: Rows, candidates: np.ndarray, config: Pointed) -> np.ndarray:
    """`sample_training_images`, repeated until no mask is empty: those would teach relevance to be nowhere."""
    empty: set[int] = set()
    while True:
        left = candidates[[int(i) not in empty for i in candidates]]
        if not len(left):
            assert rows.masks is not None
            raise UserError(
                f"{rows.name}: all training masks are empty, such as {rows.masks[candidates[0]]}; the object must be "
                "brighter than half (255, or 1 beside 0 in a lossless file), or use --mask-marks background"
            )
        chosen = sample_training_images(rows, left, config)
        found = {int(i) for i in chosen if mask_is_empty(rows, int(i), config)}
        if not found:
            return chosen
        empty |= found


def mask_is_empty(rows: Rows, index: int, config: Pointed) -> bool:
    mask = read_row_mask(rows, index)
    assert mask is not None
    bright = np.asarray(mask)
    return not (bright if config.mask_marks == "object" else ~bright).any()


def check_mask_config(config: Pointed) -> None:
    if config.mask_marks == "background" and config.masks == "data":
        raise UserError(
            "--mask-marks background: the dataset's own masks mark the object, here and everywhere else; invert them, "
            "or give inverted ones with --masks FOLDER"
        )


def mask_provider(config: Pointed, rows: Rows, expects: Input, run: Run, accelerator: Accelerator) -> AddMasks:
    """`add_training_masks` for this configuration; run.json records which masks and images are used."""
    check_mask_config(config)
    where, make, fingerprint = saliency(config.masks, config.seed), None, {}
    if where is not None:
        fingerprint = {"saliency_sha256": check_saliency_weights(where, run.facts)}
        make = mask_writer(where, config, expects, run, accelerator)
    add_masks = partial(add_training_masks, config=config, make=make)
    masked = add_masks(rows)  # missing masks are reported now
    if accelerator.is_main_process:
        chosen = masked.split_indices("train")
        facts: dict[str, Any] = {
            "n": len(chosen),
            "classes": [masked.classes[label] for label in np.unique(masked.labels[chosen])],
        }
        if config.masks_per_class is not None or config.mask_classes is not None:
            facts["images"] = [masked.images[i] for i in chosen]
        run.note(masks=absolute_mask_source(config.masks), learnt_from=facts, **fingerprint)
    return add_masks


# ---- making ----------------------------------------------------------------------------------------------------------


def make_robustvit(config: Robustvit, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_loss_config(config)
    vit, expects = load_starting_classifier(config, rows, run, accelerator)
    temperature = config.temperature or TEMPERATURES.get(vit.origin.name or "", 1.0)
    add_masks = mask_provider(config, rows, expects, run, accelerator)
    if accelerator.is_main_process:
        run.note(temperature=temperature)
    return RobustViT(vit, add_masks, config, temperature), expects


def check_loss_config(config: Robustvit) -> None:
    weight = config.relevance_weight * (config.background_weight + config.foreground_weight)
    if not weight and not config.classification_weight:
        raise UserError(
            "all losses are disabled: set --background-weight, --foreground-weight or --classification-weight"
        )
    if config.double_backward and config.relevance != "gae":
        raise UserError(f"--double-backward: is for gae; {config.relevance} has no gradients in it")


build_robustvit: Any = build_erm
