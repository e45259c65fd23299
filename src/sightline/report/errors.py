"""Where errors concentrate: in which groups and classes, and whether the size of the sight matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..metrics.estimates import Estimate
from ..metrics.intervals import proportion
from ..metrics.predictions import Predictions

MAX_ROWS = 6
FEW = 20  # images below which nothing is compared


@dataclass(frozen=True)
class ErrorShare:
    """One group or class: its fraction of all errors, beside its fraction of all images."""

    name: str
    errors: int
    of_errors: float
    of_images: float

    @property
    def excess(self) -> float:
        return self.of_errors - self.of_images


@dataclass(frozen=True)
class ErrorConcentration:
    kind: str  # group or class
    errors: int
    shares: list[ErrorShare]  # where most errors are, first
    sentences: list[str]


def error_concentration(predictions: Predictions, coverage: np.ndarray | None = None) -> ErrorConcentration:
    """`coverage` [n] is the visible fraction of every image, for methods that hide something."""
    wrong = ~predictions.correct
    kind, of, names = "class", predictions.labels, predictions.classes
    if predictions.groups is not None:
        kind, of, names = "group", predictions.groups, predictions.group_names
    total = int(wrong.sum())
    counts, sizes = np.bincount(of[wrong], minlength=len(names)), np.bincount(of, minlength=len(names))
    shares = [
        ErrorShare(names[k], int(counts[k]), counts[k] / max(1, total), sizes[k] / len(of))
        for k in np.flatnonzero(sizes)
    ]
    shares.sort(key=lambda one: -one.errors)
    return ErrorConcentration(kind, total, shares[:MAX_ROWS], [*sentences(kind, shares, total, predictions, coverage)])


def sentences(
    kind: str, shares: list[ErrorShare], total: int, predictions: Predictions, coverage: np.ndarray | None
) -> Iterator[str]:
    if not total:
        yield "There are no errors."
        return
    first = max(shares, key=lambda one: one.excess)
    if first.excess > 0:
        yield (
            f"{100 * first.of_errors:.0f} % of the {total:,} errors are in the {kind} {first.name}, which has "
            f"{100 * first.of_images:.0f} % of the images."
        )
    if coverage is None or len(coverage) < 4 * FEW or np.ptp(coverage) == 0:
        return
    low, high = np.quantile(coverage, [0.25, 0.75])
    least, most = (accuracy(predictions, chosen) for chosen in (coverage <= low, coverage >= high))
    if least is not None and most is not None:
        apart = least.high < most.low or most.high < least.low
        yield (
            f"Where it sees least (a quarter of the images, up to {100 * low:.0f} % visible) its accuracy is "
            f"{least.value_text} {least.interval}, where it sees most (from {100 * high:.0f} % on) {most.value_text} "
            f"{most.interval}{'' if apart else '; not a clear difference'}."
        )


def accuracy(predictions: Predictions, chosen: np.ndarray) -> Estimate | None:
    return proportion(predictions.correct[chosen]) if chosen.sum() >= FEW else None
