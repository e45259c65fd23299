"""Confusions, precision, recall, F1 and calibration, against scikit-learn and values computed by hand."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_fscore_support

from sightline.metrics.classification import classify, scores_of
from sightline.metrics.estimates import Classification
from sightline.metrics.predictions import NO_CLASS, Predictions


def predicted_as(labels, predicted, classes=("a", "b", "c"), confidence=None) -> Predictions:
    n, C = len(labels), len(classes)
    confidence = np.full(n, 0.9) if confidence is None else np.asarray(confidence)
    probabilities = np.repeat(((1 - confidence) / (C - 1))[:, None], C, axis=1).astype(np.float32)
    probabilities[np.arange(n), np.maximum(predicted, 0)] = confidence
    images = [f"{k}.jpg" for k in range(n)]
    return Predictions(images, np.asarray(labels), probabilities, np.asarray(predicted), classes)


def test_scores_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    labels = generator.integers(3, size=400)
    predicted = np.where(generator.random(400) < 0.7, labels, generator.integers(3, size=400))
    found = classify(predicted_as(labels, predicted))
    values = precision_recall_fscore_support(labels, predicted)
    for k, name in enumerate("abc"):
        one = found.scores[name]
        assert [one.precision.value, one.recall.value, one.f1.value] == pytest.approx([v[k] for v in values[:3]])
        assert one.f1.low < one.f1.value < one.f1.high
        assert one.recall.n == (labels == k).sum()
    assert found.macro_f1.value == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert found.macro_f1.high - found.macro_f1.low < 0.12
    assert sum(sum(row.values()) for row in found.confusion.values()) == 400


def test_confusions_are_sorted_and_none_of_the_classes_counts_as_one():
    found = classify(predicted_as([0, 0, 0, 1, 1, 2], [1, 1, 0, NO_CLASS, 1, 2]))
    assert found.confusion == {"a": {"a": 1, "b": 2}, "b": {"b": 1, "": 1}, "c": {"c": 1}}
    assert found.top_confusions(1) == [("a", "b", 2, 3)]
    assert found.scores["c"].precision.value == 1


def test_the_interval_of_precision_has_the_stated_coverage():
    """Where the number of images of each class is given. As a proportion of the images predicted as the class it would
    cover 98 %."""
    generator, held = np.random.default_rng(0), []
    labels = np.repeat([0, 1], [280, 160])
    for _ in range(1000):
        predicted = np.where(generator.random(440) < np.repeat([0.93, 0.86], [280, 160]), labels, 1 - labels)
        matrix = np.bincount(2 * labels + predicted, minlength=4).reshape(2, 2)
        scores, _ = scores_of(np.pad(matrix, ((0, 0), (0, 1))), ("a", "b"), 0)
        one = scores["b"].precision
        held.append(one.low <= 160 * 0.86 / (160 * 0.86 + 280 * 0.07) <= one.high)
    assert 0.93 <= np.mean(held) <= 0.97


def test_precision_of_very_few_images_has_a_wide_interval():
    one = classify(predicted_as([0, 0, 1], [0, 0, 0])).scores["a"].precision
    assert one.value == pytest.approx(2 / 3)
    assert one.high - one.low > 0.5


def test_a_class_that_is_never_predicted_has_no_precision():
    found = classify(predicted_as([0, 1, 1], [1, 1, 1]))
    assert found.scores["a"].precision is None
    assert found.scores["a"].f1.value == 0
    assert "c" not in found.scores


def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy():
    n = 3000
    right = np.arange(n) % 10 < 6
    labels, predicted = np.zeros(n, dtype=int), np.where(right, 0, 1)
    found = classify(predicted_as(labels, predicted, confidence=np.full(n, 0.9)))
    assert found.calibration_error.value == pytest.approx(0.3, abs=1e-6)
    assert found.calibration_error.low < 0.3 < found.calibration_error.high
    (one,) = found.reliability
    assert (one.n, one.confidence, one.accuracy) == (n, pytest.approx(0.9), pytest.approx(0.6))
    calibrated = classify(predicted_as(labels, predicted, confidence=np.full(n, 0.6)))
    assert calibrated.calibration_error.value < 1e-6


def test_it_survives_json():
    found = classify(predicted_as([0, 0, 1, 2, 2], [0, 1, 1, 2, 0]))
    assert Classification.from_dict(json.loads(json.dumps(asdict(found)))) == found
