"""Whether the sight makes sense: how much of the image it covers, whether it prefers the border, and whether the rest
of the image would do as well.

None of this needs true masks. It says when a sight is suspicious, not that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ..data.batches import TransformedBatches
from .estimates import Estimate
from .inference import (
    inference_batches,
    map_batches,
    predict_batches,
    predictions_from_logits,
    sample_evenly,
    sight_for,
)
from .intervals import percentile_tail, proportion

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.batches import Batch, Batches
    from ..data.rows import Rows
    from ..sight import Method
    from ..vit.model import Input
    from .predictions import Predictions

PLAUSIBLE_COVERAGE = 0.02, 0.8  # mean fraction of the image that objects cover
EVERYTHING = 0.98  # coverage from which nothing is hidden
BORDER = 0.125  # width of the border zone, as a fraction of the side
PREFERS_BORDER = 1.1  # times as visible as the whole image
OFTEN_EMPTY = 0.01  # fraction of images in which nothing is seen
BINS = 10  # of the histogram
IMAGES = 512  # at most, evenly spaced
FEW = 64  # images, after every epoch of training
BATCH = 32


@dataclass(frozen=True)
class SightSummary:
    """How much is seen of n images."""

    coverage: Estimate  # mean over images
    spread: float  # standard deviation over images
    border: float | None  # visible fraction of the border zone over that of the image; 1: no preference
    empty: Estimate  # fraction of images in which nothing is seen
    everything: Estimate  # in which (nearly) everything is seen
    histogram: tuple[int, ...]  # images by coverage, in bins of equal width from 0 to 1
    groups: dict[str, Estimate] = field(default_factory=dict)  # mean coverage
    classes: dict[str, Estimate] = field(default_factory=dict)
    accuracy: Estimate | None = None  # on these images
    rest: Estimate | None = None  # accuracy when the model is shown what it hides, and nothing else

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SightSummary:
        def estimate(one: Mapping[str, Any] | None) -> Estimate | None:
            return None if one is None else Estimate(**one)

        read: dict[str, Any] = dict(values) | {"histogram": tuple(values["histogram"])}
        read |= {name: estimate(values[name]) for name in ("coverage", "empty", "everything", "accuracy", "rest")}
        read |= {kind: {name: Estimate(**one) for name, one in values[kind].items()} for kind in ("groups", "classes")}
        return cls(**read)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What it sees, in words."""
        mean, n = self.coverage.value, self.coverage.n
        if self.everything.value > 0.5:
            return f"It sees everything in {percent(self.everything.value)} of images, {percent(mean)} on average."
        where = ""
        if self.border is not None and mean > 0:
            where = ", the border as often as the rest"
            if self.border <= 1 / PREFERS_BORDER:
                where = ", rather its middle than its border"
            elif self.border >= PREFERS_BORDER:
                where = ", rather its border than its middle"
        return f"It sees {percent(mean)} of the image on average (± {percent(self.spread)}, n = {n:,}){where}."

    @property
    def suspicions(self) -> list[str]:
        """Why the sight is probably wrong, if it is, and what to do about it."""
        return [f"{reason}: {remedy}" for reason, remedy in self._suspicions()]

    def _suspicions(self) -> Iterator[tuple[str, str]]:
        low, high = PLAUSIBLE_COVERAGE
        mean = self.coverage.value
        if mean >= high:
            yield (
                f"It sees {percent(mean)} of the image, so it hides hardly anything",
                "try more --parts, another --selector-size, or early-mask with given masks",
            )
        elif mean <= low:
            yield (
                f"It sees only {percent(mean)} of the image, which is hardly an object",
                "try another --selector-size, another backbone, or early-mask with given masks",
            )
        if self.empty.value > OFTEN_EMPTY:
            yield (
                f"It sees nothing in {percent(self.empty.value)} of images, and their predictions carry no information",
                "do not rely on them",
            )
        if self.border is not None and self.border >= PREFERS_BORDER and mean < high:
            yield (
                f"It prefers the border of the image ({self.border:.1f} times as visible as the whole): it probably "
                "looks at the background",
                "look at the images in the report; try another seed, or early-mask with given masks",
            )
        if self.rest_suffices:
            assert self.rest is not None
            assert self.accuracy is not None
            yield (
                f"What it hides predicts the class as well as what it sees ({self.rest.value_text} "
                f"{self.rest.interval} against {self.accuracy.value_text}, n = {self.rest.n:,})",
                "either it looks at the wrong thing, or the background gives the class away in these data, too",
            )

    @property
    def rest_suffices(self) -> bool:
        """Whether the accuracy from the hidden content is not significantly below that from the sight."""
        if self.rest is None or self.accuracy is None or self.everything.value > 0.5:
            return False
        return self.rest.high >= self.accuracy.value


def percent(fraction: float) -> str:
    """Without decimals, unless it would round to 0 or 100."""
    fraction = round(fraction, 6)
    digits = 0 if 0.01 <= fraction <= 0.99 or fraction in (0, 1) else 1
    return f"{100 * fraction:.{digits}f} %"


def border_zone(size: tuple[int, int]) -> Tensor:
    """bool [h, w]: the pixels near the border."""
    near = [torch.arange(n).add(0.5).div(n) for n in size]
    y, x = ((one < BORDER) | (one > 1 - BORDER) for one in near)
    return y[:, None] | x


def visible_fractions(visible: Tensor) -> Tensor:
    """[B, 2]: the fraction of the image and of its border zone that is visible, from bool [B, h, w]."""
    zone = border_zone((visible.shape[1], visible.shape[2])).to(visible.device)
    return torch.stack([visible.float().mean(dim=(1, 2)), visible[:, zone].float().mean(dim=1)], dim=1)


def has_sight(method: Method) -> bool:
    """Whether there is a sight to judge at all."""
    return method.uses_sight and not method.sees_everything


def judges_the_rest(method: Method) -> bool:
    """Whether the prediction from the hidden content can be made: the method is blind, and takes any mask."""
    return method.blind and method.accepts_masks


@torch.no_grad()
def measure_sight(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int = 64,
    workers: int = 0,
    most: int = IMAGES,
) -> SightSummary | None:
    """On at most `most` of these rows, evenly spaced; None for methods that see everything. On every process."""
    if not has_sight(method):
        return None
    rows, chosen = method.with_masks(rows), sample_evenly(indices, most)
    batches = inference_batches(
        rows, chosen, expects, accelerator, batch=batch, workers=workers, masks=method.needs_masks
    )
    with closing(batches):
        return summary_of(rows, chosen, observe(method, batches, accelerator, chosen))


@torch.no_grad()
def predict_and_measure(
    method: Method, rows: Rows, batches: Batches, accelerator: Accelerator, *, most: int = IMAGES
) -> tuple[Predictions, SightSummary | None]:
    """As `predict_batches` and `measure_sight` on the same rows, but every image is looked at once."""
    if not has_sight(method):
        return predict_batches(method, rows, batches, accelerator), None
    at = sample_evenly(np.arange(len(batches.indices)), most)
    chosen = batches.indices[at]
    observed = observe(method, batches, accelerator, chosen)
    predictions = predictions_from_logits(rows, batches.indices, observed[:, 2 : 2 + len(rows.classes)])
    return predictions, summary_of(rows, chosen, observed[at])


@torch.no_grad()
def mean_coverage(
    method: Method, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator, most: int = FEW
) -> tuple[float, float]:
    """The mean and the standard deviation of the visible fraction, on a few of these rows."""
    rows, chosen = method.with_masks(rows), sample_evenly(indices, most)
    batch = max(BATCH, accelerator.num_processes)

    def look(images: Tensor, masks: Tensor | None) -> Tensor:
        return sight_for(method, images, masks).coverage((images.shape[2], images.shape[3]))

    with closing(
        inference_batches(rows, chosen, expects, accelerator, batch=batch, workers=0, masks=method.needs_masks)
    ) as batches:
        seen = map_batches(look, batches, accelerator)
    return float(seen.mean()), float(seen.std())


def observe(method: Method, batches: Batches, accelerator: Accelerator, rest_of: np.ndarray) -> np.ndarray:
    """[n, 2 + C (+ C)]: fractions visible, the logits, and those of the rest where it can be judged: for the rows
    `rest_of`, NaN for others."""
    rest, numbered = judges_the_rest(method), NumberedBatches(batches)

    def look(images: Tensor, masks: Tensor | None) -> Tensor:
        sight = sight_for(method, images, masks)
        visible = sight.visible((images.shape[2], images.shape[3]))
        logits = method.judge(images, sight).logits.float()
        columns = [visible_fractions(visible), logits]
        if rest:
            of_rest, some = torch.full_like(logits, torch.nan), torch.from_numpy(np.isin(numbered.present, rest_of))
            if some.any():
                chosen, hidden = images[some], ~visible[some]
                of_rest[some] = method.judge(chosen, method.look_at(chosen, hidden)).logits.float()
            columns.append(of_rest)
        return torch.cat(columns, dim=1)

    return map_batches(look, cast("Batches", numbered), accelerator)


@dataclass(eq=False)
class NumberedBatches(TransformedBatches):
    """Batches that say which rows the present one has."""

    present: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in self.batches.epoch(epoch):
            self.present = batch.indices.cpu().numpy()
            yield batch


def summary_of(rows: Rows, order: np.ndarray, observed: np.ndarray) -> SightSummary:
    C = len(rows.classes)
    coverage, border, logits, rest = np.split(observed, [1, 2, 2 + C], axis=1)
    correct = predictions_from_logits(rows, order, logits).correct
    summary = summarize(coverage[:, 0], border[:, 0])
    by_class = mean_by(coverage[:, 0], rows.labels[order], rows.classes)
    by_group = {} if rows.groups is None else mean_by(coverage[:, 0], rows.groups[order], rows.group_names)
    of_rest = proportion(predictions_from_logits(rows, order, rest).correct) if rest.shape[1] else None
    return replace(summary, groups=by_group, classes=by_class, accuracy=proportion(correct), rest=of_rest)


def summarize(coverage: np.ndarray, border: np.ndarray | None = None) -> SightSummary:
    """From the visible fraction [n] of every image, and of its border zone."""
    mean = float(coverage.mean())
    counts = np.histogram(coverage, bins=BINS, range=(0, 1))[0]
    return SightSummary(
        mean_of(coverage),
        float(coverage.std()),
        float(border.mean()) / mean if border is not None and mean > 0 else None,
        proportion(coverage == 0),
        proportion(coverage >= EVERYTHING),
        tuple(counts.tolist()),
    )


def mean_by(values: np.ndarray, of: np.ndarray, names: tuple[str, ...]) -> dict[str, Estimate]:
    return {names[k]: mean_of(values[of == k]) for k in np.unique(of)}


def mean_of(values: np.ndarray) -> Estimate:
    generator, n = np.random.default_rng(0), len(values)
    means = values[generator.integers(n, size=(500, n))].mean(axis=1)
    tail = percentile_tail(n)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(values.mean()), low, high, n, "bootstrap over images")
