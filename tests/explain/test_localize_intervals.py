"""Intervals of the localisation figures."""

import numpy as np
import pytest

from sightline.explain.localize import localize
from sightline.metrics.localization import bootstrap_metrics

from .test_localize import EXPECTS, LeftHalf, accelerator, rows, toy  # noqa: F401 (fixtures)


def test_intervals_cover_the_true_mean_at_about_their_nominal_rate():
    generator = np.random.default_rng(1)
    held = 0
    for seed in range(200):
        values = generator.beta(4, 2, 60)
        found = bootstrap_metrics({"pixel_iou": np.stack([values, np.ones(60)], axis=1)}, resamples=300, seed=seed)
        held += found["pixel_iou"].low <= 2 / 3 <= found["pixel_iou"].high
    assert 180 <= held <= 199


def test_a_figure_without_a_single_miss_has_an_interval_too():
    found = bootstrap_metrics({"hit x": np.ones((20, 2))}, resamples=500)["hit x"]
    assert found.value == found.high == 1
    assert 0.75 < found.low < 1
    none = bootstrap_metrics({"hit x": np.tile([0.0, 1.0], (20, 1))}, resamples=500)["hit x"]
    assert none.value == none.low == 0
    assert none.high == pytest.approx(1 - found.low, abs=0.06)


def test_figures_that_are_the_same_in_every_image_have_no_width(rows, accelerator):  # noqa: F811
    """Coverage and entropy do not vary over images here."""
    found = localize(LeftHalf(), rows, rows.split_indices("test"), EXPECTS, accelerator, resamples=100)
    for one in (found.figures["coverage"], found.maps["left"]["entropy"]):
        assert one.high - one.low < 1e-12
    assert found.figures["coverage"].value == 0.5
    assert found.maps["left"]["mass"].high - found.maps["left"]["mass"].low > 0.01
