"""How far a figure can be trusted: 95 % intervals for proportions, averages, minima and areas under the ROC curve.

A proportion of one run has Wilson's interval. The rest is drawn again and again: images within their cell and, where
there are several runs, the runs. Each cell is drawn from as if one more of its images were right and one more wrong,
so that a cell without a single mistake has an interval too; averages are then centred on the observed value again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from .estimates import Estimate

TAIL = 0.025  # beyond each end of an interval
MOST_DRAWN = 4_000_000  # numbers at once, for memory's sake


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval (95 % by default) for a proportion; (0, 1) when nothing was counted.

    >>> [round(bound, 3) for bound in wilson(0, 20)]
    [0.0, 0.161]
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, eq=False)
class Sample:
    """Accuracies of S runs in every cell: as they are, and as R other draws of images and runs would have them."""

    observed: np.ndarray  # [S, cells]
    drawn: np.ndarray  # [R, S, cells]
    centre: np.ndarray  # [S, cells], of `drawn`
    runs: np.ndarray  # [R, S], weights

    def averages(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A weighted sum of the cells, [S] and [R, S], the draws centred on the observed."""
        observed = self.observed @ weights
        return observed, self.drawn @ weights + (observed - self.centre @ weights)

    def parts(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accuracies in k sets of cells, whose shares are [k, cells]: [S, k] and [R, S, k], not centred."""
        resamples, runs, cells = self.drawn.shape
        drawn = self.drawn.reshape(-1, cells) @ shares.T  # one large product is much faster than many small ones
        return self.observed @ shares.T, drawn.reshape(resamples, runs, -1)


def resample(correct: Sequence[np.ndarray], cells: np.ndarray, resamples: int, seed: int) -> list[Sample]:
    """One sample per block of runs, bool [n, S] each: the images drawn are the same for all, the runs are its own."""
    generator = np.random.default_rng(seed)
    counts = [block.shape[1] for block in correct]
    added = np.repeat(list(product((False, True), repeat=len(counts))), counts, axis=1)
    sizes = np.bincount(cells)
    by_cell = np.concatenate(correct, axis=1)[np.argsort(cells, kind="stable")]
    observed, centre, drawn = [], [], []
    for n, piece in zip(sizes, np.split(by_cell, np.cumsum(sizes)[:-1]), strict=True):
        patterns, times = np.unique(piece, axis=0, return_counts=True)
        patterns = np.concatenate([patterns, added]).astype(np.float64)
        chances = np.concatenate([times, np.full(len(added), 2 / len(added))]) / (n + 2)
        observed.append(piece.mean(axis=0))
        centre.append(chances @ patterns)
        drawn.append(_drawn(n, chances, patterns, resamples, generator))
    columns = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    observed, centre, drawn = (np.stack(part, axis=-1) for part in (observed, centre, drawn))
    weights = [_run_weights(count, resamples, generator) for count in counts]
    return [Sample(observed[k], drawn[:, k], centre[k], w) for k, w in zip(columns, weights, strict=True)]


def _drawn(
    n: int, chances: np.ndarray, patterns: np.ndarray, resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """[R, S]: accuracies on n images, drawn by which runs get them right: nothing else about an image matters."""
    step = max(1, MOST_DRAWN // len(chances))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return np.concatenate([generator.multinomial(n, chances, size=size) @ patterns for size in sizes]) / n


def _run_weights(count: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """[R, S]: runs drawn with replacement, stretched by the variance that so small a sample lacks."""
    if count == 1:
        return np.ones((resamples, 1))
    weights = generator.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    return 1 / count + (weights - 1 / count) * math.sqrt(count / (count - 1))


def over_runs(drawn: np.ndarray, runs: np.ndarray) -> np.ndarray:
    return np.einsum("rs...,rs->r...", drawn, runs)


def average(
    observed: np.ndarray, drawn: np.ndarray, runs: np.ndarray, n: int, how: str, *, difference: bool = False
) -> Estimate:
    """The mean over runs of one figure, [S] and [R, S]."""
    low, high = np.quantile(over_runs(drawn, runs), [TAIL, 1 - TAIL])
    return Estimate(observed.mean(), low, high, n, how, difference=difference)


def minimum(
    observed: np.ndarray, drawn: np.ndarray, runs: np.ndarray, names: Sequence[str], sizes: np.ndarray, how: str
) -> Estimate:
    """The lowest of k figures, [S, k] and [R, S, k], in each run, and then the mean over runs."""
    worst = int(observed.mean(axis=0).argmin())
    low, high, rivals = ends_of_minimum(drawn, runs)
    how += "; a minimum of noisy numbers, so biased low"
    how += f", the upper end allowing for {rivals} that could be it" if rivals > 1 else ""
    return Estimate(observed.min(axis=1).mean(), low, high, int(sizes[worst]), how, names[worst])


def ends_of_minimum(drawn: np.ndarray, runs: np.ndarray) -> tuple[float, float, int]:
    """Low end, high end, and how many could be the lowest of k figures, [R, S, k].

    The draws of a minimum lie lower still than itself, so they give the low end only. The high end is the lowest of
    the single figures' high ends, at a level divided by how many of them could be the lowest.
    """
    single = over_runs(drawn, runs)
    rivals = _rivals(single)
    low = np.quantile(over_runs(drawn.min(axis=2), runs), TAIL)
    high = np.quantile(single[:, rivals], 1 - TAIL / len(rivals), axis=0).min()
    return float(low), float(high), len(rivals)


def _rivals(single: np.ndarray) -> np.ndarray:
    """Which of k figures, [R, k], could be the lowest."""
    lows, highs = np.quantile(single, [TAIL, 1 - TAIL], axis=0)
    return np.flatnonzero(lows <= highs.min())


def least_gain(first: np.ndarray, first_runs: np.ndarray, second: np.ndarray, second_runs: np.ndarray) -> float:
    """The low end of min(first) - min(second), figures [R, S, k] drawn on the same images.

    It is the largest of min(first) - second, so it is treated as in `ends_of_minimum`, turned over.
    """
    single = over_runs(second, second_runs)
    rivals = _rivals(single)
    gains = over_runs(first.min(axis=2), first_runs)[:, None] - single[:, rivals]
    return float(np.quantile(gains, TAIL / len(rivals), axis=0).max())


def beaten(scores: np.ndarray, rivals: np.ndarray) -> np.ndarray:
    """The share of rivals below each score, ties counting half."""
    rivals = np.sort(rivals)
    return (np.searchsorted(rivals, scores, "left") + np.searchsorted(rivals, scores, "right")) / (2 * len(rivals))


def areas(
    positives: Sequence[np.ndarray], negatives: Sequence[np.ndarray], resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """AUC of every group of positives, scores [S, n], against every group of negatives: [S, P, Q] and [R, S, P, Q].

    Drawn from the normal distribution with the covariance of DeLong et al. 1988.
    """
    generator = np.random.default_rng(seed)
    wins = [np.array([[beaten(*scores) for scores in zip(p, q, strict=True)] for q in negatives]) for p in positives]
    losses = [
        np.array([[1 - beaten(*scores) for scores in zip(q, p, strict=True)] for p in positives]) for q in negatives
    ]
    observed = np.stack([np.sort(shares).mean(axis=-1).T for shares in wins], axis=1)
    drawn = np.repeat(observed[None], resamples, axis=0)
    for p, shares in enumerate(wins):
        drawn[:, :, p] += _noise(shares, resamples, generator)
    for q, shares in enumerate(losses):
        drawn[:, :, :, q] += _noise(shares, resamples, generator)
    return observed, drawn


def _noise(shares: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """[R, S, K]: how the means of shares [K, S, n] would move with other images, one more beating all and one none."""
    k, s, n = shares.shape
    rows = shares.reshape(k * s, n)
    rows = rows[:, np.lexsort(rows)]  # so that the order of the images cannot matter
    rows = np.concatenate([rows, np.zeros((k * s, 1)), np.ones((k * s, 1))], axis=1)
    covariance = np.atleast_2d(np.cov(rows, bias=True)) / n
    noise = generator.multivariate_normal(np.zeros(k * s), covariance, resamples, check_valid="ignore", method="eigh")
    return noise.reshape(resamples, k, s).transpose(0, 2, 1)
