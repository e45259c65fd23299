"""Whether a sight makes sense: coverage, preference for the border, and whether the rest would do."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sightline.config import Ifam
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.erm import Classifier
from sightline.methods.ifam import IFam, make_predictor
from sightline.metrics.coverage import (
    SightSummary,
    measure_sight,
    predict_and_measure,
    summarize,
    visible_fractions,
)
from sightline.metrics.inference import inference_batches, predict_rows
from sightline.metrics.intervals import proportion
from sightline.vit.model import Input

from ..conftest import small_vit


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


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return read_rows(write_toy(tmp_path_factory.mktemp("toy") / "toy", train=8, val=8, test=40, size=32))


@pytest.mark.parametrize("most", [7, 100])
def test_looking_once_gives_the_same_as_predicting_and_measuring_one_after_the_other(rows, most):
    settings, vit, calls = Ifam(Path("data"), parts=3, sight="patches"), small_vit(classes=0), []
    method = IFam(make_selector(vit, settings, 2), make_predictor(vit, settings, 2), PartSettings.of(settings)).eval()
    indices, expects, accelerator = rows.split_indices("test")[::-1], Input(size=(32, 32)), Accelerator(cpu=True)
    expected = predict_rows(method, rows, indices, expects, accelerator, batch=6)
    seen = measure_sight(method, rows, indices, expects, accelerator, batch=6, most=most)
    look, method.look = method.look, lambda images: calls.append(len(images)) or look(images)
    with closing(inference_batches(rows, indices, expects, accelerator, batch=6, workers=0)) as batches:
        predictions, summary = predict_and_measure(method, rows, batches, accelerator, most=most)
    assert sum(calls) == len(indices)
    assert predictions.images == expected.images
    assert np.allclose(predictions.probabilities, expected.probabilities, atol=1e-5)
    assert summary.coverage.n == min(most, len(indices))
    assert summary == seen


def test_a_method_that_sees_everything_is_only_asked_for_predictions(rows):
    method, expects, accelerator = Classifier(small_vit(classes=2)), Input(size=(32, 32)), Accelerator(cpu=True)
    indices = rows.split_indices("test")
    with closing(inference_batches(rows, indices, expects, accelerator, batch=6, workers=0)) as batches:
        predictions, summary = predict_and_measure(method, rows, batches, accelerator)
    assert summary is None
    assert len(predictions) == 40
