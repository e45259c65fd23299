"""From answers to an honest table: every figure with its interval, its n, and how the interval was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ..errors import UserError
from .estimates import Estimate, Metrics
from .intervals import TAIL, Sample, areas, average, beaten, ends_of_minimum, minimum, over_runs, resample, wilson
from .predictions import Predictions, aligned

__all__ = ["SCORES", "Predictions", "Estimate", "Metrics", "across_seeds", "evaluate", "score", "wilson"]

RESAMPLES = 2000
TOO_WIDE = 0.10  # half a Wilson interval: a cell with a wider one is too small to conclude
FEW_SEEDS = 5
MOST_PAIRS = 400  # of groups, for AUC
BACKGROUNDS = ("", "same", "rand")


@dataclass(frozen=True, eq=False)
class Parts:
    """Sets of cells by name: the classes, or the groups, that occur."""

    names: list[str]
    numbers: np.ndarray  # [k], into all classes or groups
    sizes: np.ndarray  # [k], images
    shares: np.ndarray  # [k, cells], how much each cell weighs in the part

    def only(self, numbers: Sequence[int]) -> Parts:
        kept = np.flatnonzero(np.isin(self.numbers, numbers))
        return Parts([self.names[k] for k in kept], self.numbers[kept], self.sizes[kept], self.shares[kept])


@dataclass(frozen=True, eq=False)
class Cells:
    """The finest pieces that any figure is made of: the images of one label, group and background."""

    of_image: np.ndarray  # [n]
    sizes: np.ndarray  # [cells], and so the others
    labels: np.ndarray
    groups: np.ndarray
    backgrounds: np.ndarray  # into BACKGROUNDS

    @classmethod
    def of(cls, answers: Predictions) -> Cells:
        groups = np.zeros_like(answers.labels) if answers.groups is None else answers.groups
        most = int(groups.max()) + 1
        codes = (answers.labels * most + groups) * len(BACKGROUNDS) + _backgrounds(answers)
        codes, of_image, sizes = np.unique(codes, return_inverse=True, return_counts=True)
        rest, backgrounds = np.divmod(codes, len(BACKGROUNDS))
        return cls(of_image, sizes, *np.divmod(rest, most), backgrounds)

    def parts(self, numbers: np.ndarray, names: Sequence[str]) -> Parts:
        """By a number for each cell."""
        found = np.unique(numbers)
        members = (numbers == found[:, None]) * self.sizes
        sizes = members.sum(axis=1)
        return Parts([names[number] for number in found], found, sizes, members / sizes[:, None])


def _backgrounds(answers: Predictions) -> np.ndarray:
    if "background" in answers.extra:
        names, of_image = np.unique(np.array(answers.extra["background"], dtype=str), return_inverse=True)
        found = [re.fullmatch(r"(?:mixed[ _-])?(same|rand)(?:om)?", name.lower()) for name in names]
    elif answers.groups is not None:
        of_image = answers.groups
        found = [re.search(r"(?:^|/|mixed[ _-])(same|rand)(?:om)?$", name.lower()) for name in answers.group_names]
    else:
        return np.zeros_like(answers.labels)
    return np.array([BACKGROUNDS.index(match[1]) if match else 0 for match in found])[of_image]


def evaluate(
    answers: Predictions,
    *,
    train_group_counts: Mapping[str, int] | None = None,
    minority: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """Everything that can be measured on one run's answers.

    `train_group_counts` (images in training, by name of the group) gives the adjusted average and says which groups
    are a minority: for each label the rarest. `minority` names them by number instead.
    """
    return across_seeds(
        [answers], train_group_counts=train_group_counts, minority=minority, seed=seed, resamples=resamples
    )


def across_seeds(
    runs: Sequence[Predictions],
    *,
    train_group_counts: Mapping[str, int] | None = None,
    minority: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Metrics:
    """The mean over runs of one method that answered the same images; intervals over images and runs jointly."""
    runs = aligned([(f"run {number}", run) for number, run in enumerate(runs, 1)])
    first, cells = runs[0], Cells.of(runs[0])
    sample = resample([np.stack([run.correct for run in runs], axis=1)], cells.of_image, resamples, seed)[0]
    over = f"over images within {'classes' if first.groups is None else 'groups'}"
    over += f" and over {len(runs)} seeds" if len(runs) > 1 else ""
    how = f"bootstrap {over}"

    everything = cells.parts(np.zeros_like(cells.labels), ["all"])
    classes = cells.parts(cells.labels, first.classes)
    figures: dict[str, Any] = {
        "accuracy": _proportions(sample, everything, how)["all"],
        "balanced": average(*sample.averages(classes.shares.mean(axis=0)), sample.runs, len(first), how),
        "worst_class": _lowest(sample, classes, how),
        "classes": _proportions(sample, classes, how),
        "background_gap": _background_gap(sample, cells, how),
    }
    counts = _counts(train_group_counts, first.group_names)
    if minority is None and counts is not None:
        minority = minority_groups(cells, counts)
    if first.groups is not None:
        groups = cells.parts(cells.groups, first.group_names)
        figures |= _group_figures(sample, everything, groups, counts, minority or (), how)
    if len(first.classes) == 2:
        figures |= _auc_figures(runs, sample.runs, minority or (), f"DeLong's covariance {over}", seed)
    metrics = Metrics(first.split, len(first), len(runs), **figures)
    group_names = tuple(dict.fromkeys([*first.group_names, *(train_group_counts or ())]))
    return replace(metrics, warnings=tuple(_warnings(metrics, first, group_names, counts, minority)))


def _proportions(sample: Sample, parts: Parts, how: str) -> dict[str, Estimate]:
    values, sizes = (sample.observed @ parts.shares.T).mean(axis=0), parts.sizes.tolist()
    if len(sample.observed) == 1:
        right = np.rint(values * parts.sizes).astype(int).tolist()
        ends, how = [wilson(k, n) for k, n in zip(right, sizes, strict=True)], "Wilson"
    else:
        _, drawn = sample.parts(parts.shares)
        ends = np.quantile(over_runs(drawn, sample.runs), [TAIL, 1 - TAIL], axis=0).T
    every = zip(parts.names, values, ends, sizes, strict=True)
    return {name: Estimate(value, low, high, n, how) for name, value, (low, high), n in every}


def _lowest(sample: Sample, parts: Parts, how: str) -> Estimate:
    return minimum(*sample.parts(parts.shares), sample.runs, parts.names, parts.sizes, how)


def _group_figures(
    sample: Sample, everything: Parts, groups: Parts, counts: np.ndarray | None, minority: Sequence[int], how: str
) -> dict[str, Any]:
    n = int(groups.sizes.sum())
    (observed, drawn), (by_group, drawn_by_group) = sample.averages(everything.shares[0]), sample.parts(groups.shares)
    least, most, _ = ends_of_minimum(drawn_by_group - drawn[:, :, None], sample.runs)
    gap = (observed - by_group.min(axis=1)).mean()
    figures: dict[str, Any] = {
        "groups": _proportions(sample, groups, how),
        "mean_of_groups": average(*sample.averages(groups.shares.mean(axis=0)), sample.runs, n, how),
        "worst_group": _lowest(sample, groups, how),
        "group_gap": Estimate(gap, -most, -least, n, f"{how}; to a minimum, so biased high", difference=True),
    }
    rare = groups.only(minority)
    if rare.names:
        figures["minority_worst_group"] = _lowest(sample, rare, how)
    if counts is not None and counts[groups.numbers].sum():
        proportions = counts[groups.numbers] / counts[groups.numbers].sum()
        figures["adjusted"] = average(*sample.averages(proportions @ groups.shares), sample.runs, n, how)
    return figures


def _background_gap(sample: Sample, cells: Cells, how: str) -> Estimate | None:
    parts = cells.parts(cells.backgrounds, BACKGROUNDS).only([1, 2])
    if len(parts.names) < 2:
        return None
    same, rand = parts.shares
    return average(*sample.averages(same - rand), sample.runs, int(parts.sizes.sum()), how, difference=True)


def _counts(counts: Mapping[str, int] | None, group_names: Sequence[str]) -> np.ndarray | None:
    if counts is None or not group_names:
        return None
    if not {*counts} & {*group_names}:
        raise UserError(f"the groups in training, {_listed([*counts])}, are none of these: {_listed(group_names)}")
    return np.array([counts.get(name, 0) for name in group_names])


def minority_groups(cells: Cells, counts: np.ndarray) -> list[int] | None:
    """For each label the group that is rarest in training, of those that occur; None if groups mix labels."""
    pairs = sorted({*zip(cells.labels.tolist(), cells.groups.tolist(), strict=True)})
    if len({group for _, group in pairs}) < len(pairs):
        return None
    fewest: dict[int, int] = {}
    for label, group in pairs:
        fewest[label] = min(counts[group], fewest.get(label, counts[group]))
    return [group for label, group in pairs if counts[group] == fewest[label]]


def _auc_figures(
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
    observed, drawn = (array.reshape(*array.shape[:-2], -1) for array in areas(above, below, len(weights), seed))

    def together(positives: np.ndarray, negatives: np.ndarray) -> Estimate:
        """The AUC of several groups is the mean of their pairs', each weighing as much as it has pairs of images."""
        p, q = (
            [k * scores.shape[1] for k, scores in zip(kept, side, strict=True)]
            for kept, side in ((positives, above), (negatives, below))
        )
        shares = np.outer(p, q).ravel() / (sum(p) * sum(q))
        return average(observed @ shares, drawn @ shares, weights, int(sum(p) + sum(q)), how)

    figures = {"auc": together(positive >= 0, negative >= 0)}
    rare = np.isin(positive, minority), np.isin(negative, minority)
    if rare[0].any() and rare[1].any() and len(positive) * len(negative) > 1:
        figures["minority_auc"] = together(*rare)
    if len(positive) * len(negative) > 1:
        pairs = list(product(range(len(positive)), range(len(negative))))
        names = [f"{first.group_names[positive[p]]} against {first.group_names[negative[q]]}" for p, q in pairs]
        sizes = np.array([above[p].shape[1] + below[q].shape[1] for p, q in pairs])
        figures["worst_pair_auc"] = minimum(observed, drawn, weights, names, sizes, how)
    return figures


def _warnings(
    metrics: Metrics,
    answers: Predictions,
    group_names: Sequence[str],
    counts: np.ndarray | None,
    minority: Sequence[int] | None,
) -> Iterator[str]:
    split = f"the split {answers.split!r}"
    for kind, names, cells in (
        ("classes", answers.classes, metrics.classes),
        ("groups", group_names, metrics.groups),
    ):
        missing = [name for name in names if name not in cells]
        if missing and cells:
            yield f"{split} has no images of {_listed(missing)}: its figures are about the other {kind}"
        small = [f"{name} (n {e.n})" for name, e in cells.items() if _half_width(e) > TOO_WIDE]
        if small:
            yield f"{kind} too small to conclude, more than {100 * TOO_WIDE:.0f} points uncertain: {_listed(small)}"
    if answers.groups is None:
        yield "no groups are known, so nothing is said about the worst of them"
    elif counts is None and minority is None:
        yield "training counts are not known: no adjusted average, no minority groups"
    elif metrics.minority_worst_group is None:
        why = "groups mix labels" if minority is None else f"{split} has none of their images"
        yield f"nothing is said about minority groups: {why}"
    if len(answers.classes) == 2 and metrics.auc is None:
        yield f"AUC is undefined: {split} has images of {next(iter(metrics.classes))} only"
    elif metrics.auc and metrics.minority_worst_group and metrics.minority_auc is None:
        yield "AUC on minority groups is undefined: it needs positives and negatives in (not too many) such groups"
    if 1 < metrics.seeds < FEW_SEEDS:
        yield f"{metrics.seeds} seeds say little about how seeds differ: the intervals are rough"


def _half_width(estimate: Estimate) -> float:
    low, high = wilson(round(estimate.value * estimate.n), estimate.n)
    return (high - low) / 2


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _accuracies(answers: Predictions, of: np.ndarray) -> np.ndarray:
    sizes = np.bincount(of)
    return (np.bincount(of, weights=answers.correct) / np.maximum(sizes, 1))[sizes > 0]


def _worst_group(answers: Predictions) -> float:
    if answers.groups is None:
        raise UserError(f"worst-group needs group labels, and the split {answers.split!r} has none: choose another")
    return float(_accuracies(answers, answers.groups).min())


def _auc(answers: Predictions) -> float:
    if len(answers.classes) != 2 or len(np.unique(answers.labels)) != 2:
        raise UserError(f"auc needs images of exactly two classes in the split {answers.split!r}: choose another")
    margins, positive = answers.margins, answers.labels == 1
    return float(beaten(margins[positive], margins[~positive]).mean())


SCORES: dict[str, Callable[[Predictions], float]] = {
    "balanced": lambda answers: float(_accuracies(answers, answers.labels).mean()),
    "accuracy": lambda answers: float(answers.correct.mean()),
    "worst-group": _worst_group,
    "worst-class": lambda answers: float(_accuracies(answers, answers.labels).min()),
    "auc": _auc,
}


def score(answers: Predictions, name: str = "balanced") -> float:
    """One number to choose a model by, higher is better; `balanced` needs no group labels."""
    if name not in SCORES:
        raise UserError(f"there is no score {name!r}: choose one of {', '.join(SCORES)}")
    return round(SCORES[name](answers), 9)  # what is equally good must tie, however its mean was rounded
