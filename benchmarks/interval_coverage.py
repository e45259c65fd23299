"""How often the 95 % intervals hold the truth, by simulation; and how often `--find` finds something in noise.

    PYTHONPATH=. python benchmarks/interval_coverage.py --draws 10000 --out benchmarks/results/trust.json \\
        --details benchmarks/results/interval_coverage.json

Two classes on two backgrounds, as the four groups of Waterbirds; each run shifts all accuracies by a random effect, so
that with several seeds the truth is the mean over runs. Every draw is a new test set and new runs. Intervals that are
not about groups (means over images, their paired differences, ratios of sums) are tried on values of 50 images.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.trust import commit, record
from scipy.stats import multivariate_normal, norm

from sightline.explain.estimates import bootstrap_mean
from sightline.explain.segmentation import pooled_miou
from sightline.interventions.search import Search, accuracy_differences, search
from sightline.metrics.classification import BINS, classify
from sightline.metrics.comparison import paired_gains
from sightline.metrics.coverage import mean_of
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate_seeds
from sightline.metrics.localization import bootstrap_metrics
from sightline.metrics.predictions import Predictions

CLASSES, GROUPS = ("land", "water"), ("land/same", "land/rand", "water/rand", "water/same")
SIZES = np.array([200, 80, 40, 120])
LABELS = np.repeat([0, 0, 1, 1], SIZES)
GROUP_OF = np.repeat(np.arange(4), SIZES)
ACCURACY = norm.ppf([0.96, 0.85, 0.70, 0.92])  # on the probit scale, on which runs differ
GAIN = 0.15  # of the second method, on that scale
SPREAD = 0.15  # standard deviation of runs
SEPARATION = 1.8  # of the classes' scores, for the area under the ROC curve


def simulated(shift: float, generator: np.random.Generator, noise: np.ndarray) -> Predictions:
    """One run. Images that are hard for one run are hard for others: half of the variance belongs to the image."""
    own = generator.normal(size=len(LABELS))
    easy = (noise + own) / np.sqrt(2) < (ACCURACY + shift)[GROUP_OF]
    predicted = np.where(easy, LABELS, 1 - LABELS)
    score = 1 / (1 + np.exp(-(SEPARATION * (LABELS - 0.5) + (noise + own) / np.sqrt(2))))
    probabilities = np.stack([1 - score, score], axis=1).astype(np.float32)
    images = [str(i) for i in range(len(LABELS))]
    return Predictions(images, LABELS, probabilities, predicted, CLASSES, GROUP_OF, GROUPS, "test", {})


def truth(gain: float = 0.0, spread: float = SPREAD) -> dict[str, float]:
    """The means over runs, of which the intervals speak."""
    group = norm.cdf((ACCURACY + gain) / np.sqrt(1 + spread**2))
    overall = group @ SIZES / SIZES.sum()
    by_class = [np.average(group[at], weights=SIZES[at]) for at in ([0, 1], [2, 3])]
    same, rand = (np.average(group[at], weights=SIZES[at]) for at in ([0, 3], [1, 2]))
    named = {f"group {name}": value for name, value in zip(GROUPS, group, strict=True)}
    return named | {
        "accuracy": overall, "balanced": np.mean(by_class), "worst_class": min(by_class), "worst_group": group.min(),
        "mean_of_groups": group.mean(), "group_gap": overall - group.min(), "background_gap": same - rand,
        "auc": norm.cdf(SEPARATION / np.sqrt(2)),
    }  # fmt: skip


# Intervals of minima are wider on purpose: the lower end allows for the bias of a minimum, the upper for candidates.
MINIMA = ("worst_class", "worst_group", "group_gap", "worst gain")
MEANS = ("accuracy", "balanced", "mean_of_groups", "background_gap", "accuracy gain", *(f"group {g}" for g in GROUPS))
KINDS = {"proportions, means and their differences": MEANS, "AUROC": ("auc",), "minima and gaps to them": MINIMA}


# One run's predictions, class by class; and values of images.
CLASSWISE = ("precision", "recall", "F1", "macro F1")
VALUEWISE = ("mean of images", "paired difference of means", "visible fraction", "IoU", "pooled IoU", "mIoU")
OTHERS = {
    "precision, recall, F1, of one run": CLASSWISE,
    "the calibration error (ECE), of one run": ("ECE",),
    "differences in group accuracy, of one run": ("group difference",),
    "means over 50 images, their differences, and ratios of sums": VALUEWISE,
}
IMAGES = 50
# The mean of the product of two values of an image, Φ(0.4 + (a + b) / √2) with the same a: the chance that both of two
# standard normal numbers with correlation 1/4 are below 0.4 / √2.
TOGETHER = float(multivariate_normal.cdf([0.4 / np.sqrt(2)] * 2, cov=[[1, 0.25], [0.25, 1]]))

Counts = dict[str, tuple[int, int]]  # by kind of interval: held the truth, tried


class Held:
    """Which intervals hold the truth."""

    def __init__(self) -> None:
        self.flags: dict[str, list[bool]] = {}

    def note(self, name: str, estimate: Estimate | None, value: float) -> None:
        assert estimate is not None
        self.flags.setdefault(name, []).append(bool(estimate.low - 1e-9 <= value <= estimate.high + 1e-9))

    def counts(self) -> Counts:
        return {name: (sum(flags), len(flags)) for name, flags in self.flags.items()}


def coverage(seeds: int, draws: int, number: int = 0, resamples: int = 700) -> Counts:
    """Of the metrics of several runs of one method, and of its gains over another."""
    spread = SPREAD if seeds > 1 else 0.0
    generator, held = np.random.default_rng([number, seeds]), Held()
    expected, better = truth(0, spread), truth(GAIN, spread)
    for draw in range(draws):
        noise = generator.normal(size=len(LABELS))
        shifts = generator.normal(0, spread, size=(2, seeds)) if spread else np.zeros((2, seeds))
        ours = [simulated(shift, generator, noise) for shift in shifts[0]]
        theirs = [simulated(GAIN + shift, generator, noise) for shift in shifts[1]]
        metrics = evaluate_seeds(ours, seed=draw, resamples=resamples)
        for name, value in expected.items():
            held.note(
                name, metrics.groups[name.removeprefix("group ")] if "/" in name else getattr(metrics, name), value
            )
        gains = paired_gains(theirs, ours, resamples, draw)
        for name, kind, gain in zip(("accuracy", "worst_group"), ("accuracy gain", "worst gain"), gains, strict=True):
            held.note(kind, gain, better[name] - expected[name])
    return held.counts()


def classwise_coverage(draws: int, number: int = 0) -> Counts:
    """Of precision, recall, F1 and the calibration error of one run, and of differences in group accuracy."""
    generator, held = np.random.default_rng([number, 50]), Held()
    right = truth(0, 0.0), truth(GAIN, 0.0)
    hits = np.array([np.dot([right[0][f"group {g}"] for g in GROUPS[at]], SIZES[at]) for at in (slice(2), slice(2, 4))])
    wrong = np.array([SIZES[:2].sum(), SIZES[2:].sum()]) - hits
    f1 = 2 * hits / (2 * hits + wrong + wrong[::-1])
    error = expected_calibration_error(np.random.default_rng([number, 51]))
    for draw in range(draws):
        noise = generator.normal(size=len(LABELS))
        ours, theirs = simulated(0.0, generator, noise), simulated(GAIN, generator, noise)
        found = classify(ours, draw)
        for k, name in enumerate(CLASSES):
            held.note("precision", found.scores[name].precision, hits[k] / (hits[k] + wrong[1 - k]))
            held.note("recall", found.scores[name].recall, hits[k] / (hits[k] + wrong[k]))
            held.note("F1", found.scores[name].f1, f1[k])
        held.note("macro F1", found.macro_f1, f1.mean())
        held.note("ECE", found.calibration_error, error)
        for name, gain in accuracy_differences(theirs, ours, "worst-group", draw).items():
            held.note("group difference", gain, right[1][f"group {name}"] - right[0][f"group {name}"])
    return held.counts()


def expected_calibration_error(generator: np.random.Generator, sets: int = 2000) -> float:
    """Of the population, whose bins have no noise."""
    runs = [simulated(0.0, generator, generator.normal(size=len(LABELS))) for _ in range(sets)]
    confidence = np.concatenate([run.probabilities.max(axis=1) for run in runs]).astype(float)
    gaps = np.concatenate([run.correct for run in runs]) - confidence
    of_bin = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(of_bin, weights=gaps, minlength=BINS)).sum() / len(gaps))


def valuewise_coverage(draws: int, number: int = 0) -> Counts:
    """Of means over images, and of ratios of sums over images."""
    generator, held = np.random.default_rng([number, 60]), Held()
    for _ in range(draws):
        image = generator.normal(size=IMAGES)  # what the values of one image have in common
        ours, theirs = (norm.cdf(0.4 + (image + generator.normal(size=IMAGES)) / np.sqrt(2)) for _ in range(2))
        mean = norm.cdf(0.4 / np.sqrt(2))
        held.note("mean of images", bootstrap_mean(ours), mean)
        held.note("paired difference of means", bootstrap_mean(ours, theirs), 0.0)
        held.note("visible fraction", mean_of(theirs), mean)
        both = ours * theirs  # large objects are found better: the ratio of the means is not the mean of the ratios
        columns = {
            "pixel_iou": np.stack([ours, np.ones(IMAGES)], axis=1), "pooled_iou": np.stack([both, theirs], axis=1),
        }  # fmt: skip
        figures = bootstrap_metrics(columns)
        held.note("IoU", figures["pixel_iou"], mean)
        held.note("pooled IoU", figures["pooled_iou"], TOGETHER / mean)
        counts = np.stack([both, theirs, 1 - theirs, 1 - both], axis=1)
        held.note("mIoU", pooled_miou(counts), (TOGETHER / mean + (1 - mean) / (1 - TOGETHER)) / 2)
    return held.counts()


def false_discoveries(sets: int, number: int = 0, parts: int = 6, resamples: int = 2000) -> tuple[int, int]:
    """In how many sets `--find` takes a step, and names a suspect, although every removal only adds noise."""
    generator, found, named = np.random.default_rng([number, 99]), 0, 0
    for _ in range(sets):
        noise = generator.normal(size=len(LABELS))

        def predict(options: Sequence[object], noise: np.ndarray = noise) -> list[Predictions]:
            return [simulated(0.0, generator, noise) for _ in options]

        result: Search = search(predict, parts, {}, objective="worst-group", resamples=resamples)
        found, named = found + result.steps[0].taken, named + (result.suspect is not None)
    return found, named


def keep(out: Path | None, details: Path | None, seeds: int, kinds: dict[str, tuple[str, ...]], counts: Counts) -> None:
    """Print every kind of interval; a row for each of their families, and the details."""
    for name, (held, tried) in counts.items():
        print(f"{seeds} seed(s), {name}: {held / tried:.1%} of {tried:,}", flush=True)
    for kind, names in kinds.items():
        tried = sum(counts[name][1] for name in names)
        missed = tried - sum(counts[name][0] for name in names)
        if out is not None:
            over = f", {seeds} seed{'s' * (seeds > 1)}" if kinds is KINDS else ""
            record(out, f"95 % intervals of {kind}{over}", tried, missed)
    if details is not None:
        old = json.loads(details.read_text()) if details.exists() else []
        new = [
            {"interval": name, "seeds": seeds, "tried": tried, "held": held, "commit": commit()}
            for name, (held, tried) in counts.items()
        ]
        known = {(one["interval"], one["seeds"]) for one in new}
        rows = [one for one in old if (one["interval"], one["seeds"]) not in known] + new
        details.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="test sets for each number of seeds")
    parser.add_argument("--sets", type=int, default=200, help="sets of noise for --find; 0: none")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="numbers of runs")
    parser.add_argument("--others", action=argparse.BooleanOptionalAction, default=True, help="also other intervals")
    parser.add_argument("--out", type=Path, help="JSON file for the rows of the result: tried, and not held")
    parser.add_argument("--details", type=Path, help="JSON file with one object for each kind of interval")
    options = parser.parse_args()
    commit()
    for seeds in options.seeds:
        keep(options.out, options.details, seeds, KINDS, coverage(seeds, options.draws))
    if options.others:
        counts = classwise_coverage(options.draws) | valuewise_coverage(options.draws)
        keep(options.out, options.details, 1, OTHERS, counts)
    if options.sets:
        found, named = false_discoveries(options.sets)
        print(f"--find in noise: {found} of {options.sets} take a step, {named} name a suspect")
        if options.out is not None:
            record(options.out, "intervene --find in noise", options.sets, found)
            record(options.out, "intervene --find in noise, suspects", options.sets, named)
    return 0


if __name__ == "__main__":
    sys.exit(main())
