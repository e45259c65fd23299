"""Background swaps: predictions on the same objects in front of other backgrounds.

Every image is classified as it is, with the background of another image (of the same kind, of any kind, of another
kind), with its background removed, and with its foreground removed. The foreground is the object mask; without masks
it is the model's own sight, which is a weaker test and is reported as such.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from ..data.rows import Rows, attribute_of
from ..data.sampling import interleave_groups
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import at_once, inference_batches, predictions_from_logits, sight_for, sight_for_prediction
from ..metrics.intervals import proportion
from ..metrics.localization import select_annotated
from ..metrics.predictions import Predictions
from ..sight import Method
from ..vit.model import Input
from .estimates import accuracy_difference

MAX_IMAGES = 2000  # held in memory; the interval is then about ± 2 points
EXAMPLES = 3
PROGRESS_STEPS = 1000
CONDITIONS = ("original", "same", "random", "other", "foreground", "background")
Progress = Callable[[int], None] | None


@dataclass(frozen=True, eq=False)
class SwapResults:
    """Predictions on the same images in every condition of `CONDITIONS` that is possible on these data."""

    source: Literal["given", "discovered"]  # of the foreground masks
    by: Literal["class", "group"]  # what defines the kind of a background
    kinds: tuple[str, ...]
    predictions: dict[str, Predictions]
    examples: dict[str, Tensor]  # uint8 [m, 3, h, w]: the first images, in each condition
    notes: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.predictions["original"])

    @property
    def gap(self) -> Estimate | None:
        """Accuracy with backgrounds of the same kind minus that with any (the background gap of Xiao et al. 2021)."""
        if "same" not in self.predictions:
            return None
        return accuracy_difference(self.predictions["same"], self.predictions["random"])

    def changed(self, condition: str) -> Estimate:
        """The fraction of images whose prediction differs from that on the original image."""
        return proportion(self.predictions[condition].predicted != self.predictions["original"].predicted)


def swap_backgrounds(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    most: int = MAX_IMAGES,
    seed: int = 0,
    batch: int = 64,
    workers: int = 0,
    cache: Path | None = None,
    progress: Progress = None,
) -> SwapResults:
    """Predict a random sample of at most `most` of these rows in every condition."""
    generator = np.random.default_rng(seed)
    notes: tuple[str, ...] = ()
    rows, chosen = method.with_masks(rows), np.asarray(indices)
    given = method.needs_masks or (rows.masks is not None and any(rows.masks[i] for i in chosen))
    if given:
        chosen, notes = select_annotated(rows, chosen)
    if len(chosen) > most:
        chosen = np.sort(generator.choice(chosen, most, replace=False))
    images = MaskedImages.load(method, rows, chosen, expects, accelerator, given, batch, workers, cache)
    images, left_out = images.usable(given)
    kinds, by, names = background_kinds(rows, images.indices)
    partners = {kind: choose_partners(kinds, kind, generator) for kind in ("same", "random", "other")}
    possible = {kind: chosen for kind, chosen in partners.items() if (chosen >= 0).all()}
    conditions = [condition for condition in CONDITIONS if condition not in partners or condition in possible]
    shown = interleave_groups(rows.cells[0][images.indices])[:EXAMPLES]
    predictions, examples, batch = {}, {}, at_once(batch, accelerator.device)
    for number, condition in enumerate(conditions):
        logits = []
        for start in range(0, len(images), batch):
            at = np.arange(start, min(start + batch, len(images)))
            mixed, masks = images.composite(at, condition, possible.get(condition), expects.mean, accelerator.device)
            with torch.no_grad(), accelerator.autocast():
                sight = sight_for_prediction(method, mixed, masks if method.needs_masks else None)
                logits.append(method.judge(mixed, sight).logits.float().cpu())
            if progress is not None:
                progress(round(PROGRESS_STEPS * (number + (at[-1] + 1) / len(images)) / len(conditions)))
        predictions[condition] = predictions_from_logits(rows, images.indices, torch.cat(logits).numpy())
        mixed, _ = images.composite(shown, condition, possible.get(condition), expects.mean, "cpu")
        examples[condition] = (mixed * 255).round().to(torch.uint8)
    words = {"same": "the same", "random": "any", "other": "another"}
    impossible = [
        f"some images have no partner with a background of {words[k]} kind" for k in words if k not in possible
    ]
    source = "given" if given else "discovered"
    return SwapResults(source, by, names, predictions, examples, (*notes, *left_out, *impossible))


# ---- images and their foregrounds ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MaskedImages:
    """Images in memory, preprocessed for the model, with their foreground masks."""

    indices: np.ndarray  # into the rows
    images: Tensor  # uint8 [n, 3, h, w]
    masks: Tensor  # bool [n, h, w]

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    @torch.no_grad()
    def load(
        cls, method: Method, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator, given: bool,
        batch: int, workers: int, cache: Path | None,
    ) -> MaskedImages:  # fmt: skip
        """With the rows' masks if `given`, otherwise with the method's own sight as the mask."""
        images, masks = [], []
        with closing(
            inference_batches(
                rows, indices, expects, accelerator, batch=batch, workers=workers, cache=cache, masks=given
            )
        ) as batches:
            for loaded in batches.epoch(0):
                images.append(loaded.images.cpu())
                if given:
                    assert loaded.masks is not None
                    masks.append(loaded.masks.cpu())
                else:
                    pixels = loaded.to(accelerator.device).images.float() / 255
                    with accelerator.autocast():
                        masks.append(sight_for(method, pixels, None).visible(tuple(pixels.shape[2:])).cpu())
        return cls(indices, torch.cat(images), torch.cat(masks))

    def usable(self, given: bool) -> tuple[MaskedImages, tuple[str, ...]]:
        """The images with both foreground and background, and a note about those left out."""
        foreground = self.masks.flatten(1).float().mean(dim=1)
        both = (foreground > 0) & (foreground < 1)
        if not both.any():
            reason = "the masks are empty or cover the whole image"
            if not given:
                reason = (
                    "the data have no masks and the model sees the whole image; create masks with --masks "
                    "tokencut:BACKBONE"
                )
            raise UserError(f"foreground and background cannot be separated: {reason}")
        left_out = int((~both).sum())
        source = "mask" if given else "sight"
        note = f"{left_out:,} of {len(self):,} images left out: their {source} is empty or covers the whole image"
        return MaskedImages(self.indices[both.numpy()], self.images[both], self.masks[both]), (note,) * (left_out > 0)

    def composite(
        self, at: np.ndarray, condition: str, partners: np.ndarray | None, mean: tuple[float, ...], device
    ) -> tuple[Tensor, Tensor]:
        """Images [b, 3, h, w] in a condition, and the masks of their original foregrounds."""

        def take(chosen: np.ndarray) -> tuple[Tensor, Tensor]:
            return self.images[chosen].to(device).float() / 255, self.masks[chosen].to(device)

        images, masks = take(at)
        if condition == "original":
            return images, masks
        if condition == "background":
            return inpaint(images, masks), masks
        if condition == "foreground":
            background = images.new_tensor(mean).view(3, 1, 1).expand_as(images)
        else:
            assert partners is not None
            background = inpaint(*take(partners[at]))
        return torch.where(masks[:, None], images, background), masks


def inpaint(images: Tensor, masked: Tensor) -> Tensor:
    """Fill `masked` [b, h, w] from the surroundings, increasingly blurred with distance (pull-push pyramid)."""
    known = (~masked)[:, None].to(images)
    if min(images.shape[2:]) == 1 or bool(known.all()):
        total = known.sum(dim=(2, 3), keepdim=True)
        average = (images * known).sum(dim=(2, 3), keepdim=True) / total.clamp(min=1e-6)
        return torch.where(known > 0, images, torch.where(total > 0, average, 0.5))
    weight = F.avg_pool2d(known, 2, ceil_mode=True)
    coarse = F.avg_pool2d(images * known, 2, ceil_mode=True) / weight.clamp(min=1e-6)
    filled = inpaint(coarse, (weight == 0)[:, 0])
    wide = F.interpolate(filled, images.shape[2:], mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, wide)


# ---- whose background ------------------------------------------------------------------------------------------------


def background_kinds(rows: Rows, indices: np.ndarray) -> tuple[np.ndarray, Literal["class", "group"], tuple[str, ...]]:
    """The kind of every image's background: the spurious attribute of its group, or without groups its class; and the
    names of the kinds."""
    labels = rows.labels[indices]
    if rows.groups is not None:
        pairs = zip(rows.groups[indices], labels, strict=True)
        attributes = [attribute_of(rows.group_names[group], rows.classes[label]) for group, label in pairs]
        names = sorted(set(attributes))
        if len(names) > 1:
            return np.array([names.index(one) for one in attributes]), "group", tuple(names)
    return labels, "class", tuple(rows.classes[label] for label in np.unique(labels))


def choose_partners(kinds: np.ndarray, which: str, generator: np.random.Generator) -> np.ndarray:
    """For each image a random other one whose background is of the same kind, any kind, or another; -1 if none."""
    everyone = np.arange(len(kinds))
    chosen = np.full(len(kinds), -1)
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        pool = {"same": own, "random": everyone, "other": np.flatnonzero(kinds != kind)}[which]
        if which == "other" and len(pool):
            chosen[own] = generator.choice(pool, len(own))
        elif len(pool) > 1:  # an offset from its own position, so that no image is its own partner
            steps = generator.integers(1, len(pool), len(own))
            chosen[own] = pool[(np.searchsorted(pool, own) + steps) % len(pool)]
    return chosen
