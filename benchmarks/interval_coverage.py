"""How often the 95 % intervals hold the truth, by simulation; and how often `--find` finds something in noise.

    PYTHONPATH=. python benchmarks/interval_coverage.py --draws 10000 --out benchmarks/results/trust.json

Two classes on two backgrounds, as the four groups of Waterbirds; each run shifts all accuracies by a random effect, so
that with several seeds the truth is the mean over runs. Every draw is a new test set and new runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.trust import record
from scipy.stats import norm

from sightline.interventions.search import search
from sightline.metrics.comparison import compare
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


def covers(low: float, high: float, value: float) -> bool:
    return bool(low - 1e-9 <= value <= high + 1e-9)


def coverage(seeds: int, draws: int, number: int = 0, resamples: int = 1000) -> dict[str, tuple[int, int]]:
    """Held the truth, and tried, of every kind of interval."""
    spread = SPREAD if seeds > 1 else 0.0
    generator, held = np.random.default_rng([number, seeds]), dict[str, list[bool]]()
    expected, better = truth(0, spread), truth(GAIN, spread)
    for draw in range(draws):
        noise = generator.normal(size=len(LABELS))
        shifts = generator.normal(0, spread, size=(2, seeds)) if spread else np.zeros((2, seeds))
        ours = [simulated(shift, generator, noise) for shift in shifts[0]]
        theirs = [simulated(GAIN + shift, generator, noise) for shift in shifts[1]]
        reference, entry = compare({"a": ours, "b": theirs}, seed=draw, resamples=resamples).entries
        metrics = reference.metrics
        for name, value in expected.items():
            estimate = metrics.groups[name.removeprefix("group ")] if "/" in name else getattr(metrics, name)
            held.setdefault(name, []).append(covers(estimate.low, estimate.high, value))
        for name, gain in (("accuracy", entry.accuracy_gain), ("worst_group", entry.worst_gain)):
            assert gain is not None
            kind = "accuracy gain" if name == "accuracy" else "worst gain"
            held.setdefault(kind, []).append(covers(gain.low, gain.high, better[name] - expected[name]))
    return {name: (sum(flags), len(flags)) for name, flags in held.items()}


def false_discoveries(sets: int, number: int = 0, parts: int = 6, resamples: int = 2000) -> int:
    """In how many sets `--find` takes a step although every removal only adds noise."""
    generator, found = np.random.default_rng([number, 99]), 0
    for _ in range(sets):
        noise = generator.normal(size=len(LABELS))

        def predict(options: Sequence[object], noise: np.ndarray = noise) -> list[Predictions]:
            return [simulated(0.0, generator, noise) for _ in options]

        found += search(predict, parts, {}, objective="worst-group", resamples=resamples).steps[0].taken
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="test sets for each number of seeds")
    parser.add_argument("--sets", type=int, default=200, help="sets of noise for --find")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="numbers of runs")
    parser.add_argument("--out", type=Path, help="JSON file for the rows of the result: tried, and not held")
    options = parser.parse_args()
    for seeds in options.seeds:
        counts = coverage(seeds, options.draws)
        for name, (held, tried) in counts.items():
            print(f"{seeds} seed(s), {name}: {held / tried:.1%} of {tried:,}", flush=True)
        for kind, names in KINDS.items():
            tried = sum(counts[name][1] for name in names)
            missed = tried - sum(counts[name][0] for name in names)
            if options.out is not None:
                record(options.out, f"95 % intervals of {kind}, {seeds} seed{'s' * (seeds > 1)}", tried, missed)
    found = false_discoveries(options.sets)
    print(f"--find in noise: {found} of {options.sets}")
    if options.out is not None:
        record(options.out, "intervene --find in noise", options.sets, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
