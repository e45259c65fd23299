"""The simulation of intervals: its truth is right, it finds intervals that are too narrow, and ours hold."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.interval_coverage import GAIN, GROUPS, KINDS, SPREAD, coverage, false_discoveries, simulated, truth

from benchmarks import interval_coverage as simulation
from sightline.metrics.comparison import compare


def test_the_truth_is_the_mean_of_many_runs():
    generator = np.random.default_rng(0)
    runs = [
        simulated(GAIN + generator.normal(0, SPREAD), generator, generator.normal(size=440)) for _ in range(2000)
    ]  # fmt: skip
    right = np.mean([run.correct for run in runs], axis=0)
    for number, name in enumerate(GROUPS):
        assert right[runs[0].groups == number].mean() == pytest.approx(truth(GAIN)[f"group {name}"], abs=0.01)


def test_intervals_of_one_run_hold_the_truth():
    for name, (held, tried) in coverage(1, 60, resamples=300).items():
        assert held / tried > 0.85, name


def test_intervals_over_seeds_are_neither_too_narrow_nor_too_wide():
    counts = coverage(2, 60, resamples=300)
    for name, (held, tried) in counts.items():
        assert held / tried > 0.85, name
    held, tried = np.sum([counts[name] for name in KINDS["proportions, means and their differences"]], axis=0)
    assert held / tried < 0.98


def test_intervals_that_are_too_narrow_are_found(monkeypatch):
    def narrow(*given, **named):
        found = compare(*given, **named)
        first, second = found.entries
        one = first.metrics.accuracy
        accuracy = replace(one, low=one.value - 1e-3, high=one.value + 1e-3)
        return replace(found, entries=(replace(first, metrics=replace(first.metrics, accuracy=accuracy)), second))

    monkeypatch.setattr(simulation, "compare", narrow)
    held, tried = coverage(1, 30, resamples=100)["accuracy"]
    assert held / tried < 0.5


def test_find_finds_little_in_noise():
    assert false_discoveries(20, resamples=500) <= 4
