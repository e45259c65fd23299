"""The same things before other backgrounds: what a model makes of its own pictures when things and places change.

Every picture is asked about as it is, with the background of another picture (of the same kind, of any, of another
kind), without its background, and without its foreground. The foreground is what a mask says; where the data have none,
it is what the model itself looks at, which is a weaker test, and said.
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
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.groups import Cells
from ..metrics.inference import inference_batches, predictions_from_logits, sight_for, sight_for_prediction
from ..metrics.intervals import TAIL, resample, wilson
from ..metrics.localization import with_truth
from ..metrics.predictions import Predictions
from ..sight import Method
from ..vit.model import Input

MOST = 2000  # pictures, which are held in memory: enough for two points of uncertainty
EXAMPLES = 3
RESAMPLES = 2000
THOUSAND = 1000  # steps of progress
KINDS = ("original", "same", "random", "other", "foreground", "background")
Progress = Callable[[int], None] | None


@dataclass(frozen=True, eq=False)
class Swaps:
    """Answers to the same pictures in every condition of `KINDS` that could be made."""

    source: Literal["given", "discovered"]  # where foregrounds come from
    by: Literal["class", "group"]  # what makes two backgrounds of one kind
    kinds: tuple[str, ...]
    answers: dict[str, Predictions]
    examples: dict[str, Tensor]  # uint8 [m, 3, h, w]: the first pictures, in each condition
    notes: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.answers["original"])

    @property
    def gap(self) -> Estimate | None:
        """Accuracy on backgrounds of the same kind minus that on any (the background gap of Xiao et al. 2021)."""
        return difference(self.answers["same"], self.answers["random"]) if "same" in self.answers else None

    def changed(self, kind: str) -> Estimate:
        """How often the answer is another one than that to the picture as it is."""
        changed = self.answers[kind].predicted != self.answers["original"].predicted
        low, high = wilson(int(changed.sum()), self.n)
        return Estimate(changed.mean(), low, high, self.n, "Wilson")


def swaps(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    most: int = MOST,
    seed: int = 0,
    batch: int = 64,
    workers: int = 0,
    cache: Path | None = None,
    progress: Progress = None,
) -> Swaps:
    """At most so many of these rows, drawn at random, in every condition."""
    generator = np.random.default_rng(seed)
    told, notes = method.needs_masks, ()
    rows, chosen = method.with_masks(rows), np.asarray(indices)
    given = told or any(rows.masks[i] for i in chosen) if rows.masks is not None else told
    if given:
        chosen, notes = with_truth(rows, chosen)
    if len(chosen) > most:
        chosen = np.sort(generator.choice(chosen, most, replace=False))
    held = Held.of(method, rows, chosen, expects, accelerator, given, batch, workers, cache)
    held, more = held.usable(given)
    kinds, by, names = kinds_of_background(rows, held.indices)
    partners = {kind: partner(kinds, kind, generator) for kind in ("same", "random", "other")}
    shared = {kind: some for kind, some in partners.items() if (some >= 0).all()}
    examples = spread_over(rows.cells[0][held.indices], EXAMPLES)
    answers, drawn = {}, {}
    for number, kind in enumerate(wanted := [kind for kind in KINDS if kind not in partners or kind in shared]):
        logits = []
        for start in range(0, len(held), batch):
            at = np.arange(start, min(start + batch, len(held)))
            mixed, masks = held.mixed(at, kind, shared.get(kind), expects.mean, accelerator.device)
            with torch.no_grad(), accelerator.autocast():
                seen = sight_for_prediction(method, mixed, masks if told else None)
                logits.append(method.judge(mixed, seen).logits.float().cpu())
            if progress is not None:
                progress(round(THOUSAND * (number + (at[-1] + 1) / len(held)) / len(wanted)))
        answers[kind] = predictions_from_logits(rows, held.indices, torch.cat(logits).numpy())
        mixed, _ = held.mixed(examples, kind, shared.get(kind), expects.mean, "cpu")
        drawn[kind] = (mixed * 255).round().to(torch.uint8)
    words = {"same": "the same", "random": "any", "other": "another"}
    lost = [f"no background of {words[kind]} kind for some pictures" for kind in partners if kind not in shared]
    return Swaps("given" if given else "discovered", by, names, answers, drawn, (*notes, *more, *lost))


# ---- pictures and their foregrounds ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Held:
    """Pictures in memory, as the model expects them."""

    indices: np.ndarray  # into the rows
    images: Tensor  # uint8 [n, 3, h, w]
    masks: Tensor  # bool [n, h, w]

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    @torch.no_grad()
    def of(
        cls, method: Method, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator, given: bool,
        batch: int, workers: int, cache: Path | None,
    ) -> Held:  # fmt: skip
        images, masks = [], []
        with closing(
            inference_batches(
                rows, indices, expects, accelerator, batch=batch, workers=workers, cache=cache, masks=given
            )
        ) as batches:
            for some in batches.epoch(0):
                images.append(some.images.cpu())
                if given:
                    assert some.masks is not None
                    masks.append(some.masks.cpu())
                else:
                    seen = some.to(accelerator.device).images.float() / 255
                    with accelerator.autocast():
                        masks.append(sight_for(method, seen, None).visible(tuple(seen.shape[2:])).cpu())
        return cls(indices, torch.cat(images), torch.cat(masks))

    def usable(self, given: bool) -> tuple[Held, tuple[str, ...]]:
        """Those that have a foreground and a background, and what was left out."""
        share = self.masks.flatten(1).float().mean(dim=1)
        both = (share > 0) & (share < 1)
        if not both.any():
            sees_all = "the data have no masks, and the model's sight hides nothing; discover some with --masks"
            what = "the masks are empty" if given else f"{sees_all} tokencut:BACKBONE"
            raise UserError(f"there is no telling foreground from background: {what}")
        left = int((~both).sum())
        why = "its mask" if given else "its sight"
        notes = (f"left out, because {why} is empty or everything: {left:,} of {len(self):,} pictures",) * (left > 0)
        return Held(self.indices[both.numpy()], self.images[both], self.masks[both]), notes

    def mixed(
        self, at: np.ndarray, kind: str, partners: np.ndarray | None, mean: tuple[float, ...], device
    ) -> tuple[Tensor, Tensor]:
        """[b, 3, h, w] in a condition, and where the foreground is, or was."""

        def take(some: np.ndarray) -> tuple[Tensor, Tensor]:
            return self.images[some].to(device).float() / 255, self.masks[some].to(device)

        images, masks = take(at)
        if kind == "original":
            return images, masks
        if kind == "background":
            return painted_over(images, masks), masks
        if kind == "foreground":
            ground = images.new_tensor(mean).view(3, 1, 1).expand_as(images)
        else:
            assert partners is not None
            ground = painted_over(*take(partners[at]))
        return torch.where(masks[:, None], images, ground), masks


def painted_over(images: Tensor, gone: Tensor) -> Tensor:
    """Where `gone` [b, h, w], what lies around, blurred the more the farther away it is (pull and push)."""
    known = (~gone)[:, None].to(images)
    if min(images.shape[2:]) == 1 or bool(known.all()):
        total = known.sum(dim=(2, 3), keepdim=True)
        average = (images * known).sum(dim=(2, 3), keepdim=True) / total.clamp(min=1e-6)
        return torch.where(known > 0, images, torch.where(total > 0, average, 0.5))
    weight = F.avg_pool2d(known, 2, ceil_mode=True)
    coarse = F.avg_pool2d(images * known, 2, ceil_mode=True) / weight.clamp(min=1e-6)
    filled = painted_over(coarse, (weight == 0)[:, 0])
    wide = F.interpolate(filled, images.shape[2:], mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, wide)


# ---- whose background ------------------------------------------------------------------------------------------------


def kinds_of_background(
    rows: Rows, indices: np.ndarray
) -> tuple[np.ndarray, Literal["class", "group"], tuple[str, ...]]:
    """A number for each picture: what its group says besides the class, or without groups the class; and names."""
    labels = rows.labels[indices]
    if rows.groups is not None:
        pairs = zip(rows.groups[indices], labels, strict=True)
        said = [attribute_of(rows.group_names[group], rows.classes[label]) for group, label in pairs]
        names = sorted(set(said))
        if len(names) > 1:
            return np.array([names.index(one) for one in said]), "group", tuple(names)
    return labels, "class", tuple(rows.classes[label] for label in np.unique(labels))


def partner(kinds: np.ndarray, which: str, generator: np.random.Generator) -> np.ndarray:
    """For each picture another one, at random: of the same kind, of any, or of another; -1 where there is none."""
    places = np.arange(len(kinds))
    chosen = np.full(len(kinds), -1)
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        pool = {"same": own, "random": places, "other": np.flatnonzero(kinds != kind)}[which]
        if which == "other" and len(pool):
            chosen[own] = generator.choice(pool, len(own))
        elif len(pool) > 1:  # by a step from its own place, so that none is its own partner
            steps = generator.integers(1, len(pool), len(own))
            chosen[own] = pool[(np.searchsorted(pool, own) + steps) % len(pool)]
    return chosen


def spread_over(cells: np.ndarray, count: int) -> np.ndarray:
    """The first pictures of as many different cells as possible."""
    turn = np.empty(len(cells), dtype=np.int64)
    for cell in np.unique(cells):
        own = np.flatnonzero(cells == cell)
        turn[own] = np.arange(len(own))
    return np.lexsort((cells, turn))[:count]


def difference(ours: Predictions, theirs: Predictions, seed: int = 0) -> Estimate:
    """Of accuracies on the same pictures, drawn together."""
    cells = Cells.of(ours)
    weights = cells.sizes / len(ours)
    correct = [answers.correct[:, None] for answers in (ours, theirs)]
    (value, drawn), (other, others) = (
        sample.averages(weights) for sample in resample(correct, cells.of_image, RESAMPLES, seed)
    )
    low, high = np.quantile(drawn[:, 0] - others[:, 0], [TAIL, 1 - TAIL])
    return Estimate(value[0] - other[0], low, high, len(ours), "paired bootstrap over images", difference=True)
