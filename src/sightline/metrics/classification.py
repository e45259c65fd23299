"""Which classes are confused, precision, recall and F1 of each, and calibration."""

from __future__ import annotations

import numpy as np

from .estimates import Classification, ClassScores, Estimate, ReliabilityBin
from .intervals import TAIL, wilson
from .predictions import Predictions

BINS = 15  # of confidence, of equal width (Guo et al. 2017)
RESAMPLES = 1000
NONE = ""  # the prediction of none of the classes


def classify(predictions: Predictions, seed: int = 0) -> Classification:
    """Confusions, scores and calibration of one run."""
    names, C = predictions.classes, len(predictions.classes)
    matrix = np.zeros((C, C + 1), dtype=np.int64)  # the last column: none of the classes
    np.add.at(matrix, (predictions.labels, predictions.predicted), 1)
    confusion = {
        names[i]: {(*names, NONE)[j]: int(matrix[i, j]) for j in np.flatnonzero(matrix[i])}
        for i in np.flatnonzero(matrix.sum(axis=1))
    }
    scores, macro = scores_of(matrix, names, seed)
    error, bins = calibration(predictions, seed)
    return Classification(confusion, scores, macro, error, bins)


def f1_of(matrix: np.ndarray) -> np.ndarray:
    """[..., C]: F1 = 2 TP / (2 TP + FP + FN); NaN where a class neither occurs nor is predicted."""
    C = matrix.shape[-2]
    hits = np.diagonal(matrix, axis1=-2, axis2=-1)[..., :C].astype(float)
    both = matrix.sum(axis=-1) + matrix[..., :C].sum(axis=-2)
    return np.divide(2 * hits, both, out=np.full_like(hits, np.nan), where=both > 0)


def scores_of(matrix: np.ndarray, names: tuple[str, ...], seed: int) -> tuple[dict[str, ClassScores], Estimate]:
    """Intervals of precision and recall are Wilson's; those of F1 resample the images of every class. Precision varies
    less than a proportion of the images predicted as a class, because the number of images of each class is given: so
    many more images it counts as."""
    C, labelled, predicted = len(names), matrix.sum(axis=1), matrix.sum(axis=0)
    generator, present = np.random.default_rng(seed), np.flatnonzero(labelled)
    draws = np.zeros((RESAMPLES if C <= 50 else RESAMPLES // 10, C, C + 1), dtype=np.int64)
    for i in present:
        draws[:, i] = generator.multinomial(labelled[i], matrix[i] / labelled[i], size=len(draws))
    observed, drawn = f1_of(matrix), f1_of(draws)

    def proportion(hits: int, n: int) -> Estimate | None:
        return Estimate(hits / n, *wilson(hits, n), n, "Wilson") if n else None

    def precision(i: int) -> Estimate | None:
        hits, n = int(matrix[i, i]), int(predicted[i])
        counts_as = 1 / variance_ratio(matrix[:, i], labelled, i) if 0 < hits < n else 1.0
        how = "Wilson, within classes"
        return Estimate(hits / n, *wilson(counts_as * hits, counts_as * n), n, how) if n else None

    def f1(i: int) -> Estimate:
        low, high = np.nanquantile(drawn[:, i], [TAIL, 1 - TAIL])
        return Estimate(observed[i], low, high, int(labelled[i]), "bootstrap over images within classes")

    scores = {
        names[i]: ClassScores(precision(i), proportion(int(matrix[i, i]), int(labelled[i])), f1(i)) for i in present
    }
    low, high = np.nanquantile(np.nanmean(drawn[:, present], axis=1), [TAIL, 1 - TAIL])
    n, how = int(labelled.sum()), "bootstrap over images within classes"
    return scores, Estimate(float(np.nanmean(observed[present])), low, high, n, how)


def variance_ratio(predicted: np.ndarray, labelled: np.ndarray, i: int) -> float:
    """The variance of the precision of class i, of so many images of every label that were predicted as it, where the
    number of images of each label is given, to that where it is not (by the delta method). Rates are those of one more
    right and one more wrong image, as in `intervals`."""
    spread = predicted * (1 - (predicted + 1) / (labelled + 2))  # of a count
    hits, misses = predicted[i], predicted.sum() - predicted[i]
    own, others = spread[i] / hits, (spread.sum() - spread[i]) / misses
    return float((misses * own + hits * others) / (hits + misses))


def calibration(predictions: Predictions, seed: int) -> tuple[Estimate, tuple[ReliabilityBin, ...]]:
    """Expected calibration error: the mean over images of |accuracy − confidence| in the bin of their confidence
    (Guo et al. 2017)."""
    confidence = predictions.probabilities.max(axis=1).astype(float)
    correct, n = predictions.correct.astype(float), len(predictions)
    of_bin = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = correct - confidence
    sizes = np.bincount(of_bin, minlength=BINS)
    generator = np.random.default_rng(seed)
    drawn = np.zeros(RESAMPLES // 5)
    for k in range(len(drawn)):
        chosen = generator.integers(n, size=n)
        drawn[k] = np.abs(np.bincount(of_bin[chosen], weights=gaps[chosen], minlength=BINS)).sum() / n
    value = np.abs(np.bincount(of_bin, weights=gaps, minlength=BINS)).sum() / n
    # The error of a resample is biased upwards, as that of the sample is: the interval is moved by the mean bias.
    low, high = np.quantile(drawn - (drawn.mean() - value), [TAIL, 1 - TAIL])
    bins = tuple(
        ReliabilityBin(
            k / BINS, (k + 1) / BINS, int(sizes[k]), float(confidence[of_bin == k].mean()),
            float(correct[of_bin == k].mean()),
        )
        for k in np.flatnonzero(sizes)
    )  # fmt: skip
    how = f"bootstrap over images, re-centred; {BINS} bins; biased high in small samples"
    return Estimate(value, low, high, n, how), bins
