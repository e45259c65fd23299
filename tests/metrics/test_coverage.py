"""Whether a sight makes sense: coverage, preference for the border, and whether the rest would do."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sightline.metrics.coverage import SightSummary, summarize, visible_fractions
from sightline.metrics.intervals import proportion


def square(low: int, high: int, side: int = 32) -> torch.Tensor:
    visible = torch.zeros(1, side, side, dtype=torch.bool)
    visible[:, low:high, low:high] = True
    return visible


def test_fractions_of_the_image_and_of_its_border():
    everything, middle, border = square(0, 32), square(8, 24), ~square(4, 28)
    (whole, at_border), (centre, none), (frame, all_) = (
        visible_fractions(one)[0].tolist() for one in (everything, middle, border)
    )
    assert (whole, at_border) == (1, 1)
    assert (centre, none) == (0.25, 0)
    assert frame == pytest.approx(1 - 0.75**2)
    assert all_ == 1


def summary(coverage: float, border: float | None = None, right: float = 0.9, rest: float | None = 0.5) -> SightSummary:
    fractions = np.full(400, coverage)
    found = summarize(fractions, fractions if border is None else np.full(400, border))
    accuracies = {"accuracy": proportion(np.arange(400) < 400 * right)}
    if rest is not None:
        accuracies["rest"] = proportion(np.arange(400) < 400 * rest)
    return replace(found, **accuracies)


def test_a_plausible_sight_raises_no_suspicion():
    found = summary(0.3, 0.1)
    assert found.suspicions == []
    assert found.sentence == (
        "It sees 30 % of the image on average (± 0 %, n = 400), rather its middle than its border."
    )
    assert sum(found.histogram) == 400


@pytest.mark.parametrize(
    ("found", "suspicion"),
    [
        (summary(0.95), "sees 95 % of the image, so it hides hardly anything"),
        (summary(0.01), "sees only 1 % of the image"),
        (summary(0.0), "sees nothing in 100 % of images"),
        (summary(0.5, 0.7), "prefers the border of the image (1.4 times"),
        (summary(0.3, 0.1, right=0.7, rest=0.68), "What it hides predicts the class as well"),
    ],
)
def test_each_failure_is_named_with_a_remedy(found, suspicion):
    assert any(suspicion in one and ": " in one for one in found.suspicions)


def test_seeing_everything_is_said_in_words_and_says_nothing_about_the_rest():
    found = summary(1.0, rest=0.9)
    assert found.sentence.startswith("It sees everything in 100 % of images")
    assert not found.rest_suffices


def test_it_survives_json():
    found = summary(0.3, 0.1)
    assert SightSummary.from_dict(json.loads(json.dumps(found.to_dict()))) == found
