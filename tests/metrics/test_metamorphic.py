"""What must not change the metrics: the order of images, the names and the order of classes and groups; and what
repeating every image changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.metrics.groups import evaluate
from sightline.metrics.predictions import Predictions

VALUES = ("accuracy", "balanced", "worst_class", "worst_group", "mean_of_groups", "group_gap", "auc")


@st.composite
def predictions(draw) -> Predictions:
    """Two classes, two backgrounds, every group with an image."""
    n = draw(st.integers(12, 60))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = np.concatenate([np.arange(4), generator.integers(0, 4, n - 4)])
    labels = groups // 2
    scores = generator.random((n, 2)).round(draw(st.integers(1, 3)))  # with ties
    probabilities = ((scores + 0.01) / (scores + 0.01).sum(axis=1, keepdims=True)).astype(np.float32)
    names = ("a/x", "a/y", "b/x", "b/y")
    images = [f"{i}.png" for i in range(n)]
    return Predictions(images, labels, probabilities, probabilities.argmax(1), ("a", "b"), groups, names, "test", {})


def values(made: Predictions) -> dict[str, float]:
    metrics = evaluate(made, resamples=100)
    found = {name: getattr(metrics, name) for name in VALUES}
    cells = {f"class {name}": one for name, one in metrics.classes.items()}
    cells |= {f"group {name}": one for name, one in metrics.groups.items()}
    return {name: float(one.value) for name, one in (found | cells).items() if one is not None}


def taken(made: Predictions, at: np.ndarray) -> Predictions:
    return replace(
        made, images=[f"{k}-{made.images[i]}" for k, i in enumerate(at)], labels=made.labels[at],
        probabilities=made.probabilities[at], predicted=made.predicted[at], groups=made.groups[at],
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(predictions(), st.randoms(use_true_random=False))
def test_the_order_of_images_does_not_matter(made, random):
    order = list(range(len(made.labels)))
    random.shuffle(order)
    assert values(taken(made, np.array(order))) == pytest.approx(values(made), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(predictions(), st.integers(2, 4))
def test_repeating_every_image_changes_no_value_and_narrows_intervals(made, times):
    again = taken(made, np.tile(np.arange(len(made.labels)), times))
    assert values(again) == pytest.approx(values(made), abs=1e-12)
    once, more = evaluate(made).accuracy, evaluate(again).accuracy
    assert more.high - more.low < once.high - once.low


@settings(max_examples=25, deadline=None)
@given(predictions())
def test_the_order_of_classes_does_not_matter(made):
    """With the classes exchanged, the positive class is the other one, so the area under the curve stays, too."""
    other = replace(
        made, classes=made.classes[::-1], labels=1 - made.labels, predicted=1 - made.predicted,
        probabilities=made.probabilities[:, ::-1].copy(),
    )  # fmt: skip
    assert values(other) == pytest.approx(values(made), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(predictions(), st.permutations(range(4)))
def test_the_order_and_names_of_groups_do_not_matter(made, order):
    number_of = np.argsort(order)
    names = tuple(made.group_names[k] for k in order)
    assert values(replace(made, groups=number_of[made.groups], group_names=names)) == pytest.approx(values(made))
    renamed = replace(made, group_names=tuple(name.upper() for name in made.group_names))
    assert sorted(values(renamed).values()) == pytest.approx(sorted(values(made).values()))


@settings(max_examples=25, deadline=None)
@given(predictions())
def test_right_and_wrong_exchanged_gives_the_complement(made):
    wrong = replace(made, predicted=1 - made.predicted)
    assert values(wrong)["accuracy"] == pytest.approx(1 - values(made)["accuracy"])
    assert values(wrong)["balanced"] == pytest.approx(1 - values(made)["balanced"])


@settings(max_examples=25, deadline=None)
@given(predictions(), st.floats(0.1, 5.0))
def test_the_area_under_the_curve_depends_on_the_order_of_scores_only(made, power):
    scores = made.probabilities[:, 1].astype(np.float64) ** power
    other = replace(made, probabilities=np.stack([1 - scores, scores], axis=1))
    assert values(other)["auc"] == pytest.approx(values(made)["auc"], abs=0.02), "up to ties of rounded scores"
