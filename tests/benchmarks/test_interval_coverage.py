"""The simulation of intervals: its truth is right, it finds intervals that are too narrow, and ours hold."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.interval_coverage import (
    GAIN,
    GROUPS,
    KINDS,
    OTHERS,
    SPREAD,
    classwise_coverage,
    coverage,
    false_discoveries,
    keep,
    simulated,
    truth,
    valuewise_coverage,
)

from benchmarks import interval_coverage as simulation
from sightline.metrics.groups import evaluate_seeds


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
        metrics = evaluate_seeds(*given, **named)
        one = metrics.accuracy
        return replace(metrics, accuracy=replace(one, low=one.value - 1e-3, high=one.value + 1e-3))

    monkeypatch.setattr(simulation, "evaluate_seeds", narrow)
    held, tried = coverage(1, 30, resamples=100)["accuracy"]
    assert held / tried < 0.5


def test_find_finds_little_in_noise():
    taken, suspects = false_discoveries(20, resamples=500)
    assert taken <= 4
    assert suspects <= 4


def test_intervals_that_are_not_about_groups_hold_the_truth():
    counts = classwise_coverage(60) | valuewise_coverage(60)
    assert set(counts) == {name for names in OTHERS.values() for name in names}
    for name, (held, tried) in counts.items():
        assert held / tried > 0.85, name


def test_a_family_is_a_row_and_a_kind_of_interval_has_its_own_coverage(tmp_path):
    counts = {name: (90, 100) for names in KINDS.values() for name in names}
    for _ in range(2):
        keep(tmp_path / "rows.json", tmp_path / "details.json", 2, KINDS, counts)
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows["95 % intervals of AUROC, 2 seeds"]["failed"] == 10
    details = json.loads((tmp_path / "details.json").read_text())
    assert len(details) == len(counts)
    assert {(one["seeds"], one["tried"], one["held"]) for one in details} == {(2, 100, 90)}
