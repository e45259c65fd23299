"""95 % intervals for proportions, means, minima (worst group) and areas under the ROC curve.

A proportion of one run has Wilson's interval. Everything else is bootstrapped: images are resampled within their cell
and, with several runs, their mean deviates as Student's t says, and as what the runs have in common on these images.
Each cell is resampled as if it had one more correct and one more wrong image, so that a cell without a single error has
an interval too; means are then centred on the observed value again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.special import ndtr, stdtrit

from .estimates import Estimate

TAIL = 0.025  # probability beyond each end of an interval
SMALLEST = 1e-24  # variance
# The variance of runs, x times the noise over images, counts as x · xᵖ / (xᵖ + c): with p and c by degrees of freedom
# under which the coverage of means is flattest over all x, found by numerical integration.
DEGREES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
POWERS = (4.165, 4.617, 3.451, 1.558, 0.924, 0.755, 0.638, 0.579)
CONSTANTS = (0.002, 0.003, 0.03, 0.281, 0.312, 0.245, 0.16, 0.103)
MOST_DRAWN = 4_000_000  # numbers at once, to bound memory


def wilson(successes: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval (95 % by default) for a proportion; (0, 1) for n = 0. Both may be an effective number.

    >>> [round(bound, 3) for bound in wilson(0, 20)]
    [0.0, 0.161]
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def percentile_tail(n: int) -> float:
    """Where a percentile interval of the means of resamples ends, so that it covers 95 % for few images, too: as far
    out as Student's t, and the missing n / (n - 1) of the variance (Hesterberg 2015, expanded percentile interval).

    >>> round(percentile_tail(10), 4), round(percentile_tail(1000), 4)
    (0.0086, 0.0247)
    """
    return float(ndtr(stdtrit(n - 1, TAIL) * math.sqrt(n / (n - 1)))) if n > 1 else 0.0


def proportion(flags: np.ndarray) -> Estimate:
    """The fraction of images that are flagged."""
    n = len(flags)
    return Estimate(float(flags.mean()), *wilson(int(flags.sum()), n), n, "Wilson")


@dataclass(frozen=True, eq=False)
class Sample:
    """Accuracies of S runs in every cell: observed, and in R bootstrap resamples of images and runs."""

    observed: np.ndarray  # [S, cells]
    drawn: np.ndarray  # [R, S, cells]
    centre: np.ndarray  # [S, cells], the expectation of `drawn`
    runs: np.ndarray  # [R, S], weights of the runs

    def weighted_mean(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A weighted sum over the cells, [S] and [R, S], with the resamples centred on the observed value."""
        observed = self.observed @ weights
        return observed, self.drawn @ weights + (observed - self.centre @ weights)

    def subset_accuracies(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accuracies in k subsets of the cells with weights [k, cells]: [S, k] and [R, S, k], not centred."""
        resamples, runs, cells = self.drawn.shape
        drawn = self.drawn.reshape(-1, cells) @ weights.T  # one large product is much faster than many small ones
        return self.observed @ weights.T, drawn.reshape(resamples, runs, -1)


def resample(correct: Sequence[np.ndarray], cells: np.ndarray, resamples: int, seed: int) -> list[Sample]:
    """One sample per block of runs, bool [n, S] each; all blocks share the resampled images, each has its own runs."""
    generator = np.random.default_rng(seed)
    counts = [block.shape[1] for block in correct]
    added = np.repeat(list(product((False, True), repeat=len(counts))), counts, axis=1)
    sizes = np.bincount(cells)
    by_cell = np.concatenate(correct, axis=1)[np.argsort(cells, kind="stable")]
    observed, centre, drawn = [], [], []
    for n, cell in zip(sizes, np.split(by_cell, np.cumsum(sizes)[:-1]), strict=True):
        patterns, times = np.unique(cell, axis=0, return_counts=True)
        patterns = np.concatenate([patterns, added]).astype(np.float64)
        chances = np.concatenate([times, np.full(len(added), 2 / len(added))]) / (n + 2)
        mean = chances @ patterns
        observed.append(cell.mean(axis=0))
        centre.append(mean)
        noise = _draw_accuracies(n, chances, patterns, resamples, generator) - mean
        drawn.append(mean + _common_noise(noise, (patterns - mean).T * chances @ (patterns - mean) / n, counts))
    columns = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    observed, centre, drawn = (np.stack(values, axis=-1) for values in (observed, centre, drawn))
    weights = [run_weights(count, resamples, generator) for count in counts]
    return [Sample(observed[k], drawn[:, k], centre[k], w) for k, w in zip(columns, weights, strict=True)]


def _draw_accuracies(
    n: int, chances: np.ndarray, patterns: np.ndarray, resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """[R, S]: accuracies on n resampled images. An image is drawn as its pattern, the runs that classify it correctly,
    because nothing else about it matters."""
    step = max(1, MOST_DRAWN // len(chances))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return np.concatenate([generator.multinomial(n, chances, size=size) @ patterns for size in sizes]) / n


def _common_noise(noise: np.ndarray, covariance: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """[R, S]: the part of the noise of S runs, in blocks of so many, that all runs of a block have in common because
    their images are the same. What each run, or pair of runs of two blocks, has by itself is in the variance between
    runs already."""
    if max(counts) == 1:
        return noise
    block = np.repeat(np.eye(len(counts)), counts, axis=0)  # [S, blocks]
    size, number = block @ counts, np.concatenate([np.arange(count) for count in counts])
    other = (number[:, None] != number) | (size[:, None] != size) | (size == 1)
    common = (block.T @ (covariance * other) @ block) / (block.T @ other @ block)
    average = block / counts
    narrowed = _square_root(common) @ np.linalg.pinv(_square_root(average.T @ covariance @ average), rcond=1e-6)
    return noise @ average @ narrowed.T @ block.T


def _square_root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(values.clip(0)) @ vectors.T


def run_weights(count: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """[R, S]: weights that sum to 1, under which the mean of any S values x deviates from their mean by SD(x) / √S
    times a draw from Student's t with S - 1 degrees of freedom: so few runs do not tell their variance, and a bootstrap
    of them would cover much less than 95 %."""
    if count == 1:
        return np.ones((resamples, 1))
    normal = generator.normal(size=(resamples, count))
    normal -= normal.mean(axis=1, keepdims=True)
    chi_square = generator.chisquare(count - 1, size=(resamples, 1))
    return 1 / count + normal / np.sqrt(count * chi_square)


def mean_over_runs(drawn: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """[R, ...]: the mean over runs of a metric, [R, S, ...], whose noise over images is common to all runs."""
    return sum_over_runs([(1.0, drawn, runs)])


def sum_over_runs(terms: Sequence[tuple[float, np.ndarray, np.ndarray]]) -> np.ndarray:
    """[R, ...]: a weighted sum of means over runs, each term with other runs.

    The variance v of runs has the degrees of freedom of Welch 1947. Student's t of a few and the noise over images
    together cover more than either, 98.8 % at two runs; so v is reduced where it is small beside that noise. For one
    mean this covers 94 to 96 % at two runs and 95 % ± 0.3 at three, whatever the ratio of the two. Differences between
    two methods cover up to 97.5 %: their runs are not assumed to vary equally.
    """
    means = np.sum([weight * drawn.mean(axis=1) for weight, drawn, _ in terms], axis=0)
    several = [(weight, drawn, runs, runs.shape[1]) for weight, drawn, runs in terms if runs.shape[1] > 1]
    if not several:
        return means
    each = [weight**2 * drawn.var(axis=1).mean(axis=0) / (count - 1) for weight, drawn, _, count in several]
    variance = np.maximum(np.sum(each, axis=0), SMALLEST)
    inverse = np.sum([v**2 / (count - 1) for v, (*_, count) in zip(each, several, strict=True)], axis=0) / variance**2
    degrees = 1 / np.maximum(inverse, SMALLEST)
    deviation = np.sum(
        [weight * np.einsum("rs...,rs->r...", drawn, runs - 1 / count) for weight, drawn, runs, count in several],
        axis=0,
    )
    if len(several) > 1:
        levels = (deviation.argsort(axis=0).argsort(axis=0) + 0.5) / len(deviation)
        deviation = np.sqrt(variance) * stdtrit(degrees, levels)
    counted = (variance / np.maximum(means.var(axis=0), SMALLEST)) ** np.interp(degrees, DEGREES, POWERS)
    return means + deviation * np.sqrt(counted / (counted + np.interp(degrees, DEGREES, CONSTANTS)))


def mean_estimate(
    observed: np.ndarray, drawn: np.ndarray, runs: np.ndarray, n: int, how: str, *, difference: bool = False
) -> Estimate:
    """The mean over runs of one metric, [S] and [R, S]."""
    low, high = np.quantile(mean_over_runs(drawn, runs), [TAIL, 1 - TAIL])
    return Estimate(observed.mean(), low, high, n, how, difference=difference)


def minimum_estimate(
    observed: np.ndarray, drawn: np.ndarray, runs: np.ndarray, names: Sequence[str], sizes: np.ndarray, how: str
) -> Estimate:
    """The minimum of k metrics, [S, k] and [R, S, k], in each run, then the mean over runs."""
    worst = int(observed.mean(axis=0).argmin())
    low, high, candidates = minimum_interval(drawn, runs)
    how += "; a minimum of noisy numbers, so biased low"
    how += f", the upper end allowing for {candidates} that could be it" if candidates > 1 else ""
    return Estimate(observed.min(axis=1).mean(), low, high, int(sizes[worst]), how, names[worst])


def minimum_interval(drawn: np.ndarray, runs: np.ndarray) -> tuple[float, float, int]:
    """Lower end, upper end, and the number of metrics that could be the minimum of k metrics, [R, S, k].

    The minimum of resamples is biased even lower than the observed minimum, so it gives only the lower end. The upper
    end is the lowest of the single metrics' upper ends, at a level divided by the number of candidates.
    """
    single = mean_over_runs(drawn, runs)
    candidates = _minimum_candidates(single, TAIL)
    low = np.quantile(mean_over_runs(drawn.min(axis=2), runs), TAIL)
    high = np.quantile(single[:, candidates], 1 - TAIL / len(candidates), axis=0).min()
    return float(low), float(high), len(candidates)


def _minimum_candidates(single: np.ndarray, tail: float) -> np.ndarray:
    """Which of k metrics, [R, k], could be the lowest."""
    lows, highs = np.quantile(single, [tail, 1 - tail], axis=0)
    return np.flatnonzero(lows <= highs.min())


def gain_lower_bound(
    first: np.ndarray, first_runs: np.ndarray, second: np.ndarray, second_runs: np.ndarray, tail: float = TAIL
) -> float:
    """The lower end of min(first) - min(second), for metrics [R, S, k] of the same resampled images.

    The gain is the largest of min(first) - second over the candidates for the minimum of the second, so the level is
    divided by their number, as in `minimum_interval`.
    """
    single = mean_over_runs(second, second_runs)
    candidates = _minimum_candidates(single, tail)
    lowest = np.repeat(first.min(axis=2)[:, :, None], len(candidates), axis=2)
    gains = sum_over_runs([(1.0, lowest, first_runs), (-1.0, second[:, :, candidates], second_runs)])
    return float(np.quantile(gains, tail / len(candidates), axis=0).max())


def placement_values(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The fraction of the other class's scores below each score, ties counting half. Their mean is the AUC."""
    others = np.sort(others)
    return (np.searchsorted(others, scores, "left") + np.searchsorted(others, scores, "right")) / (2 * len(others))


def resample_auc(
    positives: Sequence[np.ndarray],
    negatives: Sequence[np.ndarray],
    resamples: int,
    seed: int,
    *,
    common: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """AUC of every group of positives, scores [S, n], against every group of negatives: [S, P, Q] and [R, S, P, Q].

    Drawn from the normal distribution with the covariance of DeLong et al. 1988; if asked for, only the noise that all
    runs have in common.
    """
    generator = np.random.default_rng(seed)

    def placements(groups: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.array([[placement_values(*run) for run in zip(p, q, strict=True)] for q in others]) for p in groups]

    wins, losses = placements(positives, negatives), [1 - values for values in placements(negatives, positives)]
    observed = np.stack([np.sort(values).mean(axis=-1).T for values in wins], axis=1)
    drawn = np.repeat(observed[None], resamples, axis=0)
    for p, values in enumerate(wins):
        drawn[:, :, p] += _draw_noise(values, resamples, generator, common)
    for q, values in enumerate(losses):
        drawn[:, :, :, q] += _draw_noise(values, resamples, generator, common)
    return observed, drawn


def _draw_noise(placements: np.ndarray, resamples: int, generator: np.random.Generator, common: bool) -> np.ndarray:
    """[R, S, K]: sampling noise of the means of placements [K, S, n]; at least that of one more image that beats all
    others and one that beats none."""
    k, s, n = placements.shape
    rows = placements.reshape(k * s, n)
    rows = rows[:, np.lexsort(rows)]  # so that the order of the images cannot matter
    mean = rows.mean(axis=1)
    covariance = np.atleast_2d(np.cov(rows, bias=True)) / n
    least = (np.outer(mean, mean) + np.outer(1 - mean, 1 - mean)) / n**2
    covariance += max(0.0, 1 - covariance.trace() / least.trace()) * least
    if common and s > 1:
        by_run = covariance.reshape(k, s, k, s)
        covariance = (by_run.sum(axis=(1, 3)) - by_run.trace(axis1=1, axis2=3)) / (s * (s - 1))
    noise = generator.multivariate_normal(
        np.zeros(len(covariance)), covariance, resamples, check_valid="ignore", method="eigh"
    )
    return np.broadcast_to(noise.reshape(resamples, k, -1).transpose(0, 2, 1), (resamples, s, k))
