"""Answers with known figures."""

import numpy as np

from sightline.metrics.estimates import METRIC_LABELS, Estimate, Metrics
from sightline.metrics.predictions import Predictions

BIRDS = ("landbird", "waterbird")
PLACES = ("landbird on land", "landbird on water", "waterbird on land", "waterbird on water")
IN_TRAINING = dict(zip(PLACES, (3498, 184, 56, 1057), strict=True))


def made(right, sizes, classes=BIRDS, group_names=PLACES, **more) -> Predictions:
    """Groups of these sizes, of which so many are right; the groups share out the classes evenly, in order."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    correct = np.concatenate([np.arange(n) < k for k, n in zip(right, sizes, strict=True)])
    labels = groups * len(classes) // len(sizes)
    return answered(labels, correct, classes, groups, group_names, **more)


def answered(labels, correct, classes=BIRDS, groups=None, group_names=(), **more) -> Predictions:
    predicted = np.where(correct, labels, (labels + 1) % len(classes))
    probabilities = np.full((len(labels), len(classes)), 0.1 / (len(classes) - 1), dtype=np.float32)
    probabilities[np.arange(len(labels)), predicted] = 0.9
    images = [f"{number:06}.jpg" for number in range(len(labels))]
    return Predictions(images, labels, probabilities, predicted, classes, groups, group_names, **more)


def scored(margins, labels, groups=None, group_names=()) -> Predictions:
    logits = np.stack([np.zeros(len(margins)), margins], axis=1).astype(np.float32)
    images = [f"{number:06}.jpg" for number in range(len(margins))]
    return Predictions.from_logits(images, np.asarray(labels), logits, BIRDS, groups, group_names)


def chances(generator, accuracies, sizes, **more) -> Predictions:
    return made(generator.binomial(sizes, accuracies), sizes, **more)


def shuffled(predictions: Predictions, seed: int) -> Predictions:
    return predictions.take(np.random.default_rng(seed).permutation(len(predictions)))


def estimates(metrics: Metrics) -> list[Estimate]:
    figures = [getattr(metrics, name) for name in METRIC_LABELS if getattr(metrics, name)]
    return [*figures, *metrics.classes.values(), *metrics.groups.values()]
