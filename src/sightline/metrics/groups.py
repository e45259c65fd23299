"""Group metrics of predictions: accuracy, worst-group accuracy, AUROC and others, each with an interval and its n."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ..errors import UserError
from .estimates import Estimate, Metrics
from .intervals import (
    TAIL,
    Sample,
    mean_estimate,
    mean_over_runs,
    minimum_estimate,
    minimum_interval,
    placement_values,
    resample,
    resample_auc,
    wilson,
)  # fmt: skip
from .predictions import Predictions, align_runs

RESAMPLES = 2000
TOO_WIDE = 0.10  # half-width of a Wilson interval above which a group is called too small
FEW_SEEDS = 5
MOST_PAIRS = 400  # of groups, for AUROC
BACKGROUNDS = ("", "same", "rand")


@dataclass(frozen=True, eq=False)
class Subsets:
    """Named subsets of the cells: the classes, or the groups, that have images."""

    names: list[str]
    numbers: np.ndarray  # [k], into all classes or groups
    sizes: np.ndarray  # [k], images
    weights: np.ndarray  # [k, cells]: the accuracy in a subset is this weighted mean of its cells' accuracies

    def only(self, numbers: Sequence[int]) -> Subsets:
        kept = np.flatnonzero(np.isin(self.numbers, numbers))
        return Subsets([self.names[k] for k in kept], self.numbers[kept], self.sizes[kept], self.weights[kept])


@dataclass(frozen=True, eq=False)
class Cells:
    """The finest subsets that any metric is made of: the images of one label, group and background."""

    of_image: np.ndarray  # [n]
    sizes: np.ndarray  # [cells], as are the others
    labels: np.ndarray
    groups: np.ndarray
    backgrounds: np.ndarray  # into BACKGROUNDS

    @classmethod
    def of(cls, predictions: Predictions) -> Cells:
        groups = np.zeros_like(predictions.labels) if predictions.groups is None else predictions.groups
        most = int(groups.max()) + 1
        codes = (predictions.labels * most + groups) * len(BACKGROUNDS) + _backgrounds(predictions)
        codes, of_image, sizes = np.unique(codes, return_inverse=True, return_counts=True)
        rest, backgrounds = np.divmod(codes, len(BACKGROUNDS))
        return cls(of_image, sizes, *np.divmod(rest, most), backgrounds)

    def subsets(self, numbers: np.ndarray, names: Sequence[str]) -> Subsets:
        """The cells with equal `numbers` [cells] together; `names` are by number."""
        present = np.unique(numbers)
        members = (numbers == present[:, None]) * self.sizes
        sizes = members.sum(axis=1)
        return Subsets([names[number] for number in present], present, sizes, members / sizes[:, None])

    def worst_of(self, predictions: Predictions, kind: str) -> Subsets:
        """The subsets of which the worst counts: `kind` is "group" or "class"."""
        if kind == "group":
            return self.subsets(self.groups, predictions.group_names)
        return self.subsets(self.labels, predictions.classes)


def _backgrounds(predictions: Predictions) -> np.ndarray:
    """[n], into BACKGROUNDS: from the column `background`, or from the names of the groups."""
    if "background" in predictions.extra:
        names, of_image = np.unique(np.array(predictions.extra["background"], dtype=str), return_inverse=True)
        matches = [re.fullmatch(r"(?:mixed[ _-])?(same|rand)(?:om)?", name.lower()) for name in names]
    elif predictions.groups is not None:
        of_image, names = predictions.groups, predictions.group_names
        matches = [re.search(r"(?:^|/|mixed[ _-])(same|rand)(?:om)?$", name.lower()) for name in names]
    else:
        return np.zeros_like(predictions.labels)
    return np.array([BACKGROUNDS.index(match[1]) if match else 0 for match in matches])[of_image]


def evaluate(
    predictions: Predictions,
    *,
    train_group_counts: Mapping[str, int] | None = None,
    minority: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """All metrics of one run's predictions.

    `train_group_counts` (training images by group name) gives the adjusted average accuracy and the minority groups,
    the rarest group of each label. `minority` lists their numbers instead.
    """
    return evaluate_seeds(
        [predictions], train_group_counts=train_group_counts, minority=minority, seed=seed, resamples=resamples
    )


def evaluate_seeds(
    runs: Sequence[Predictions],
    *,
    train_group_counts: Mapping[str, int] | None = None,
    minority: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """Mean metrics over runs of one method on the same images; intervals over images and runs jointly."""
    runs = align_runs([(f"run {number}", run) for number, run in enumerate(runs, 1)])
    first, cells = runs[0], Cells.of(runs[0])
    sample = resample([np.stack([run.correct for run in runs], axis=1)], cells.of_image, resamples, seed)[0]
    over = f"over images within {'classes' if first.groups is None else 'groups'}"
    over += f" and over {len(runs)} seeds" if len(runs) > 1 else ""
    how = f"bootstrap {over}"

    everything = cells.subsets(np.zeros_like(cells.labels), ["all"])
    classes = cells.worst_of(first, "class")
    balanced = sample.weighted_mean(classes.weights.mean(axis=0))
    values: dict[str, Any] = {
        "accuracy": _proportions(sample, everything, how)["all"],
        "balanced": mean_estimate(*balanced, sample.runs, len(first), how),
        "worst_class": _worst(sample, classes, how),
        "classes": _proportions(sample, classes, how),
        "background_gap": _background_gap(sample, cells, how),
    }
    counts = _counts(train_group_counts, first.group_names)
    if minority is None and counts is not None:
        minority = minority_groups(cells, counts)
    if first.groups is not None:
        groups = cells.worst_of(first, "group")
        values |= _group_metrics(sample, everything, groups, counts, minority or (), how)
    if len(first.classes) == 2:
        values |= _auc_metrics(runs, sample.runs, minority or (), f"DeLong's covariance {over}", seed)
    metrics = Metrics(first.split, len(first), len(runs), **values)
    group_names = tuple(dict.fromkeys([*first.group_names, *(train_group_counts or ())]))
    return replace(
        metrics,
        warnings=tuple(_warnings(metrics, first, group_names)),
        remarks=tuple(_remarks(metrics, first, counts, minority)),
    )


def _proportions(sample: Sample, subsets: Subsets, how: str) -> dict[str, Estimate]:
    """The accuracy in each subset."""
    values, sizes = (sample.observed @ subsets.weights.T).mean(axis=0), subsets.sizes.tolist()
    if len(sample.observed) == 1:
        correct = np.rint(values * subsets.sizes).astype(int).tolist()
        ends, how = [wilson(k, n) for k, n in zip(correct, sizes, strict=True)], "Wilson"
    else:
        _, drawn = sample.subset_accuracies(subsets.weights)
        ends = np.quantile(mean_over_runs(drawn, sample.runs), [TAIL, 1 - TAIL], axis=0).T
    rows = zip(subsets.names, values, ends, sizes, strict=True)
    return {name: Estimate(value, low, high, n, how) for name, value, (low, high), n in rows}


def _worst(sample: Sample, subsets: Subsets, how: str) -> Estimate:
    accuracies = sample.subset_accuracies(subsets.weights)
    return minimum_estimate(*accuracies, sample.runs, subsets.names, subsets.sizes, how)


def _group_metrics(
    sample: Sample, everything: Subsets, groups: Subsets, counts: np.ndarray | None, minority: Sequence[int], how: str
) -> dict[str, Any]:
    n = int(groups.sizes.sum())
    observed, drawn = sample.weighted_mean(everything.weights[0])
    by_group, drawn_by_group = sample.subset_accuracies(groups.weights)
    least, most, _ = minimum_interval(drawn_by_group - drawn[:, :, None], sample.runs)
    gap = (observed - by_group.min(axis=1)).mean()
    values: dict[str, Any] = {
        "groups": _proportions(sample, groups, how),
        "mean_of_groups": mean_estimate(*sample.weighted_mean(groups.weights.mean(axis=0)), sample.runs, n, how),
        "worst_group": _worst(sample, groups, how),
        "group_gap": Estimate(gap, -most, -least, n, f"{how}; to a minimum, so biased high", difference=True),
    }
    rare = groups.only(minority)
    if rare.names:
        values["minority_worst_group"] = _worst(sample, rare, how)
    if counts is not None and counts[groups.numbers].sum():
        proportions = counts[groups.numbers] / counts[groups.numbers].sum()
        values["adjusted"] = mean_estimate(*sample.weighted_mean(proportions @ groups.weights), sample.runs, n, how)
    return values


def _background_gap(sample: Sample, cells: Cells, how: str) -> Estimate | None:
    subsets = cells.subsets(cells.backgrounds, BACKGROUNDS).only([1, 2])
    if len(subsets.names) < 2:
        return None
    same, rand = subsets.weights
    n = int(subsets.sizes.sum())
    return mean_estimate(*sample.weighted_mean(same - rand), sample.runs, n, how, difference=True)


def _counts(counts: Mapping[str, int] | None, group_names: Sequence[str]) -> np.ndarray | None:
    if counts is None or not group_names:
        return None
    if not {*counts} & {*group_names}:
        known = f"training has {_listed([*counts])}, this data has {_listed(group_names)}"
        raise UserError(f"no group of the training data is in this data: {known}; use the same group names")
    return np.array([counts.get(name, 0) for name in group_names])


def minority_groups(cells: Cells, counts: np.ndarray) -> list[int] | None:
    """For each label its rarest group in training, among those that have images; None if groups mix labels."""
    pairs = sorted({*zip(cells.labels.tolist(), cells.groups.tolist(), strict=True)})
    if len({group for _, group in pairs}) < len(pairs):
        return None
    fewest: dict[int, int] = {}
    for label, group in pairs:
        fewest[label] = min(counts[group], fewest.get(label, counts[group]))
    return [group for label, group in pairs if counts[group] == fewest[label]]


def _auc_metrics(
    runs: Sequence[Predictions], weights: np.ndarray, minority: Sequence[int], how: str, seed: int
) -> dict[str, Estimate]:
    first = runs[0]
    groups = np.zeros_like(first.labels) if first.groups is None else first.groups
    negative, positive = (np.unique(groups[first.labels == label]) for label in (0, 1))
    if len(negative) * len(positive) > MOST_PAIRS:
        groups, negative, positive = np.zeros_like(groups), np.zeros(1, dtype=int), np.zeros(1, dtype=int)
    if not len(negative) * len(positive):
        return {}
    margins = np.stack([run.margins for run in runs])
    above = [margins[:, (first.labels == 1) & (groups == group)] for group in positive]
    below = [margins[:, (first.labels == 0) & (groups == group)] for group in negative]
    drawn_once = resample_auc(above, below, len(weights), seed, common=True)
    observed, drawn = (array.reshape(*array.shape[:-2], -1) for array in drawn_once)

    def pooled(positives: np.ndarray, negatives: np.ndarray) -> Estimate:
        """The AUROC of several groups: the mean over pairs of groups, weighted by their number of image pairs."""
        p, q = (
            [k * scores.shape[1] for k, scores in zip(kept, side, strict=True)]
            for kept, side in ((positives, above), (negatives, below))
        )
        counts, total = np.outer(p, q).ravel(), sum(p) * sum(q)  # divided last, so that no mean of ones exceeds one
        return mean_estimate(observed @ counts / total, drawn @ counts / total, weights, int(sum(p) + sum(q)), how)

    values = {"auc": pooled(positive >= 0, negative >= 0)}
    rare = np.isin(positive, minority), np.isin(negative, minority)
    if rare[0].any() and rare[1].any() and len(positive) * len(negative) > 1:
        values["minority_auc"] = pooled(*rare)
    if len(positive) * len(negative) > 1:
        pairs = list(product(range(len(positive)), range(len(negative))))
        names = [f"{first.group_names[positive[p]]} against {first.group_names[negative[q]]}" for p, q in pairs]
        sizes = np.array([above[p].shape[1] + below[q].shape[1] for p, q in pairs])
        values["worst_pair_auc"] = minimum_estimate(observed, drawn, weights, names, sizes, how)
    return values


def _warnings(metrics: Metrics, predictions: Predictions, group_names: Sequence[str]) -> Iterator[str]:
    split = f"split {predictions.split!r}"
    for kind, names, cells in (
        ("classes", predictions.classes, metrics.classes),
        ("groups", group_names, metrics.groups),
    ):
        missing = [name for name in names if name not in cells]
        if missing and cells:
            yield f"{split} has no images of {_listed(missing)}: its metrics cover only the other {kind}"
        small = [f"{name} (n {e.n})" for name, e in cells.items() if _half_width(e) > TOO_WIDE]
        if small:
            limit = f"uncertainty above ±{100 * TOO_WIDE:.0f} points"
            yield f"{kind} too small for conclusions, {limit}: {_listed(small)}"
    if predictions.groups is None:
        yield "no group labels: worst-group accuracy is not available"
    if 1 < metrics.seeds < FEW_SEEDS:
        yield f"{metrics.seeds} seeds are few to estimate the variance between seeds: the intervals are rough"


def _remarks(
    metrics: Metrics, predictions: Predictions, counts: np.ndarray | None, minority: Sequence[int] | None
) -> Iterator[str]:
    split = f"split {predictions.split!r}"
    if predictions.groups is not None and counts is None and minority is None:
        yield "training group counts are unknown: no adjusted average accuracy, no minority groups"
    elif predictions.groups is not None and metrics.minority_worst_group is None:
        why = "groups mix labels" if minority is None else f"{split} has no images of them"
        yield f"no metrics on minority groups: {why}"
    if len(predictions.classes) == 2 and metrics.auc is None:
        yield f"AUROC is undefined: {split} has only images of {next(iter(metrics.classes))}"
    elif metrics.auc and metrics.minority_worst_group and metrics.minority_auc is None:
        yield "AUROC on minority groups is undefined: it needs positives and negatives in (not too many) such groups"


def _half_width(estimate: Estimate) -> float:
    low, high = wilson(round(estimate.value * estimate.n), estimate.n)
    return (high - low) / 2


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- scores for checkpoint selection and tuning ----------------------------------------------------------------------


def _accuracies(p: Predictions, of: np.ndarray) -> np.ndarray:
    """The accuracy in every class or group that has images, given the number `of` each image."""
    sizes = np.bincount(of)
    return (np.bincount(of, weights=p.correct) / np.maximum(sizes, 1))[sizes > 0]


def _worst_group(p: Predictions) -> float:
    if p.groups is None:
        raise UserError(f"worst-group needs group labels, but split {p.split!r} has none: choose another score")
    return float(_accuracies(p, p.groups).min())


def _auc(p: Predictions) -> float:
    if len(p.classes) != 2 or len(np.unique(p.labels)) != 2:
        raise UserError(f"auc needs images of exactly two classes in split {p.split!r}: choose another score")
    margins, positive = p.margins, p.labels == 1
    return float(placement_values(margins[positive], margins[~positive]).mean())


SCORES: dict[str, Callable[[Predictions], float]] = {
    "balanced": lambda p: float(_accuracies(p, p.labels).mean()),
    "accuracy": lambda p: float(p.correct.mean()),
    "worst-group": _worst_group,
    "worst-class": lambda p: float(_accuracies(p, p.labels).min()),
    "auc": _auc,
}


def score(predictions: Predictions, name: str = "balanced") -> float:
    """One number to select a model by, higher is better; `balanced` needs no group labels."""
    if name not in SCORES:
        raise UserError(f"unknown score {name!r}: choose one of {', '.join(SCORES)}")
    return round(SCORES[name](predictions), 9)  # so that equally good models tie despite rounding errors of their means
