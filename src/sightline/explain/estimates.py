"""Means, proportions and paired differences over images, with 95 % intervals."""

from __future__ import annotations

import numpy as np

from ..metrics.estimates import Estimate
from ..metrics.groups import RESAMPLES, Cells
from ..metrics.intervals import TAIL, resample
from ..metrics.predictions import Predictions

DIFFERENCE_RESAMPLES = 2000


def bootstrap_mean(values: np.ndarray, less: np.ndarray | None = None, *, maximum: float = 1.0) -> Estimate:
    """Mean over images of values in [0, maximum], or of the paired difference to `less`, by bootstrap over images."""
    blocks = [column[:, None] / maximum for column in (values, less) if column is not None]
    samples = resample(blocks, np.zeros(len(values), dtype=np.int64), RESAMPLES, 0)
    (value, draws), *rest = [sample.weighted_mean(np.ones(1)) for sample in samples]
    for other_value, other_draws in rest:
        value, draws = value - other_value, draws - other_draws
    low, high = np.quantile(draws[:, 0], [TAIL, 1 - TAIL])
    how = f"{'paired ' * (less is not None)}bootstrap over images"
    return Estimate(maximum * value[0], maximum * low, maximum * high, len(values), how, difference=less is not None)


def accuracy_difference(ours: Predictions, theirs: Predictions, seed: int = 0) -> Estimate:
    """Difference in accuracy on the same images, by paired bootstrap stratified by group."""
    cells = Cells.of(ours)
    weights = cells.sizes / len(ours)
    correct = [predictions.correct[:, None] for predictions in (ours, theirs)]
    (value, draws), (other_value, other_draws) = (
        sample.weighted_mean(weights) for sample in resample(correct, cells.of_image, DIFFERENCE_RESAMPLES, seed)
    )
    low, high = np.quantile(draws[:, 0] - other_draws[:, 0], [TAIL, 1 - TAIL])
    how = "paired bootstrap over images"
    return Estimate(value[0] - other_value[0], low, high, len(ours), how, difference=True)
