"""Differences between rows of the A² study: weighted sums of rows on the same images, and where backbones attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from contrasts import ACCURACY, WORST, Figures, worst_group_gain
from evidence import STRATA, Evidence, Missing, drawn_estimate, mean_of
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES, evaluate_seeds
from sightline.metrics.intervals import resample, sum_over_runs
from sightline.metrics.predictions import Predictions, align_runs

Weighted = tuple[float, str, str]  # weight, row, part of the test images
TEST_PARTS = ("all", *STRATA, "displaced", "centred")
SETS_APART = 100  # between the seeds of two datasets: more than there are parts
DRAWN = "paired bootstrap over images within groups"


def weighted_contrast(
    evidence: Evidence, kind: str, terms: Sequence[Weighted], measure: str
) -> tuple[Figures, Estimate]:
    """The figure of every term and their weighted sum, on images that are drawn once for all rows."""
    blocks = {(row, part): evidence.predictions(kind, row, part) for _, row, part in terms}
    figures = {
        f"{row}{f', {part}' * (part != 'all')}": figure_of(some, measure) for (row, part), some in blocks.items()
    }
    (one, ours, part), *others = terms
    if measure == WORST and len(terms) == 2 and (one, others[0][0], others[0][2]) == (1, -1, part):
        return figures, worst_group_gain(("ours", blocks[ours, part]), ("theirs", blocks[others[0][1:]]))[1]
    value, draws = drawn_sum(blocks, terms, measure)
    n = sum({part: len(some[0]) for (_, part), some in blocks.items()}.values())
    return figures, drawn_estimate(value, draws, n, DRAWN + "; of minima, so biased" * (measure == WORST))


def difference_of_gains(
    evidence: Evidence, kinds: tuple[str, str], terms: Sequence[Weighted], measure: str
) -> tuple[Figures, Estimate]:
    """A weighted sum of rows on one dataset less the same on another: other images, so each is drawn by itself."""
    found = {}
    for seed, kind in enumerate(kinds):
        blocks = {(row, part): evidence.predictions(kind, row, part) for _, row, part in terms}
        n = len(next(iter(blocks.values()))[0])
        found[kind] = (*drawn_sum(blocks, terms, measure, SETS_APART * seed), n)
    figures = {f"gain, {kind}": drawn_estimate(*one, DRAWN) for kind, one in found.items()}
    (ours, mine, n), (theirs, other, m) = found.values()
    return figures, drawn_estimate(ours - theirs, mine - other, n + m, f"{DRAWN}, of each set apart")


def drawn_sum(
    blocks: dict[tuple[str, str], list[Predictions]], terms: Sequence[Weighted], measure: str, seed: int = 0
) -> tuple[float, np.ndarray]:
    """Part by part of the test images, which are drawn once for all rows: the sum, and RESAMPLES other draws of it."""
    value, draws = 0.0, np.zeros(RESAMPLES)
    for i, part in enumerate(TEST_PARTS):
        mine = [(weight, blocks[row, part]) for weight, row, of in terms if of == part]
        if not mine:
            continue
        every = align_runs([(f"run {k}", run) for k, run in enumerate((run for _, some in mine for run in some), 1)])
        runs = iter(every)
        correct = [np.stack([next(runs).correct for _ in some], axis=1) for _, some in mine]
        labels = every[0].labels if every[0].groups is None else every[0].groups
        _, cells, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        summed, drawn_again = 0.0, []
        for (weight, _), sample in zip(mine, resample(correct, cells, RESAMPLES, seed + 1 + i), strict=True):
            if measure == WORST:
                observed, drawn = sample.subset_accuracies(np.eye(len(sizes)))
                observed, drawn = observed.min(axis=1), drawn.min(axis=2)
            else:
                shares = sizes / sizes.sum() if measure == ACCURACY else np.full(len(sizes), 1 / len(sizes))
                observed, drawn = sample.weighted_mean(shares)
            summed += weight * observed.mean()
            drawn_again.append((weight, drawn, sample.runs))
        value, draws = value + float(summed), draws + sum_over_runs(drawn_again)
    return value, draws


def figure_of(runs: Sequence[Predictions], measure: str) -> Estimate:
    metrics = evaluate_seeds(runs)
    if measure == ACCURACY:
        return metrics.accuracy
    worst = metrics.worst_group or metrics.worst_class
    return worst if measure == WORST else metrics.mean_of_groups or metrics.balanced


OTHER_BLOCK = {
    "best": "the best block of the last half",  # on validation images
    "two thirds": "the block at two thirds",
}


@dataclass(frozen=True)
class Column:
    """A figure of every image: attention of a backbone in a block, counted from the end, or a difference of two."""

    backbone: str
    figure: str  # "mass", "hit", "registers"
    block: int = -1
    less: str | None = None  # the block to subtract: one of OTHER_BLOCK

    @property
    def words(self) -> str:
        less = f" minus {OTHER_BLOCK[self.less]}" if self.less else ""
        return f"{self.figure} of {self.backbone}, block {self.block}{less}"

    def values(self, evidence: Evidence, kind: str) -> np.ndarray:
        known = evidence.attention(kind, self.backbone)
        depth = 1 + max(int(name.split()[0]) for name in known if name[0].isdigit())
        found = known[self.name(self.block % depth)]
        if self.less is None:
            return found
        if self.less == "best":
            val = evidence.attention(kind, self.backbone, "val")
            return found - known[self.name(max(range(depth // 2, depth), key=lambda i: val[self.name(i)].mean()))]
        return found - known[self.name(max(0, round(depth * 2 / 3) - 1))]

    def name(self, block: int) -> str:
        return f"{block} registers" if self.figure == "registers" else f"{block} mean pixels {self.figure}"


def column_difference(evidence: Evidence, kind: str, ours: Column, theirs: Column | None) -> tuple[Figures, Estimate]:
    values = ours.values(evidence, kind)
    if theirs is None:
        return {ours.words: asdict(mean_of(values, difference=True))}, mean_of(values, difference=True)
    others = theirs.values(evidence, kind)
    shown = [evidence.attention(kind, one.backbone)["image"] for one in (ours, theirs)]
    if not np.array_equal(*shown):
        raise Missing(f"{ours.backbone} and {theirs.backbone} were not shown the same images")
    figures = {one.words: mean_of(some) for one, some in ((ours, values), (theirs, others))}
    return figures, mean_of(values - others, difference=True)
