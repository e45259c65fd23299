"""Group metrics against values computed by hand, and the warnings and the headline that go with them."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from sightline.errors import UserError
from sightline.metrics.estimates import Estimate, Metrics, read_metrics
from sightline.metrics.groups import SCORES, evaluate, score
from sightline.metrics.intervals import wilson
from sightline.metrics.tables import details_table

from ..answering import BIRDS, IN_TRAINING, PLACES, answered, made, scored

# Metrics


def test_metrics_are_those_computed_by_hand():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)), train_group_counts=IN_TRAINING)
    assert metrics.accuracy.value == pytest.approx(29 / 39)
    assert metrics.balanced.value == pytest.approx((24 / 30 + 5 / 9) / 2)
    assert metrics.mean_of_groups.value == pytest.approx((0.9 + 0.6 + 0.25 + 0.8) / 4)
    assert metrics.adjusted.value == pytest.approx((3498 * 0.9 + 184 * 0.6 + 56 * 0.25 + 1057 * 0.8) / 4795)
    assert [metrics.classes[name].value for name in BIRDS] == pytest.approx([24 / 30, 5 / 9])
    assert [metrics.groups[name].value for name in PLACES] == pytest.approx([0.9, 0.6, 0.25, 0.8])
    assert (metrics.worst_group.value, metrics.worst_group.of, metrics.worst_group.n) == (0.25, PLACES[2], 4)
    assert (metrics.worst_class.of, metrics.worst_class.n) == ("waterbird", 9)
    assert metrics.group_gap.value == pytest.approx(29 / 39 - 0.25)
    assert (metrics.n, metrics.seeds, metrics.split) == (39, 1, "test")


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (15, 148, 0.0624, 0.1605), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_agrees_with_published_values(successes, n, low, high):  # the last two: Newcombe 1998
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_proportions_of_one_run_have_wilson_intervals():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)))
    assert (metrics.groups[PLACES[0]].low, metrics.groups[PLACES[0]].high) == pytest.approx(wilson(18, 20))
    assert (metrics.accuracy.low, metrics.accuracy.high) == pytest.approx(wilson(29, 39))
    assert {e.how for e in [metrics.accuracy, *metrics.groups.values(), *metrics.classes.values()]} == {"Wilson"}


def test_minority_groups_are_each_labels_rarest_in_training():
    predictions = made((90, 70, 80, 60), (100, 100, 100, 100))
    metrics = evaluate(predictions, train_group_counts=IN_TRAINING)
    assert metrics.worst_group.of == "waterbird on water"
    assert (metrics.minority_worst_group.of, metrics.minority_worst_group.value) == ("landbird on water", 0.7)
    assert metrics.minority_worst_group == evaluate(predictions, minority=[1, 2]).minority_worst_group
    assert evaluate(predictions, minority=[2]).minority_worst_group.of == "waterbird on land"


def test_a_group_unseen_in_training_is_a_minority():
    counts = dict.fromkeys(PLACES[1:3], 50)
    metrics = evaluate(made((9, 8, 7, 6), (10, 10, 10, 10)), train_group_counts=counts)
    assert metrics.minority_worst_group.of == "waterbird on water"


def test_without_training_counts_there_are_no_minority_groups():
    metrics = evaluate(made((9, 8, 7, 6), (10, 10, 10, 10)))
    assert metrics.adjusted is None
    assert metrics.minority_worst_group is None
    assert any("training group counts are unknown" in warning for warning in metrics.remarks)


def test_a_prediction_that_is_no_class_counts_as_wrong():
    predictions = made((10, 10, 10, 10), (10, 10, 10, 10))
    predicted = predictions.predicted.copy()
    predicted[:4] = -1
    assert evaluate(replace(predictions, predicted=predicted)).accuracy.value == pytest.approx(0.9)


@pytest.mark.parametrize("words", [("mixed_same", "mixed_rand", "original"), ("same", "random", "none")])
def test_background_gap_is_same_minus_random(words):
    correct = np.repeat([True, False, True, False, True], [90, 10, 60, 40, 50])
    background = np.repeat(words, [100, 100, 50]).tolist()
    predictions = answered(np.arange(250) % 2, correct, extra={"background": background})
    gap = evaluate(predictions).background_gap
    assert (gap.value, gap.n, gap.difference) == (pytest.approx(0.3), 200, True)
    assert 0.17 < gap.low < 0.2 < 0.4 < gap.high < 0.43  # Newcombe's interval: 0.181, 0.409


def test_background_gap_is_found_in_the_names_of_groups():
    predictions = made(
        (9, 5, 8, 6), (10, 10, 10, 10), group_names=("a mixed_same", "a mixed_rand", "b mixed-same", "b x")
    )
    assert evaluate(predictions).background_gap.value == pytest.approx(17 / 20 - 5 / 10)
    assert evaluate(made((9, 5, 8, 6), (10, 10, 10, 10))).background_gap is None


def test_background_gap_is_found_in_the_groups_that_the_builder_makes():
    places = ("original", "other", "rand", "same")  # of which a test split has no `other`
    names = tuple(f"{bird}/{place}" for bird in BIRDS for place in places)
    predictions = made((9, 0, 5, 8, 9, 0, 6, 10), (10, 0, 10, 10, 10, 0, 10, 10), group_names=names)
    gap = evaluate(predictions, train_group_counts=dict.fromkeys(names, 5)).background_gap
    assert (gap.value, gap.n) == (pytest.approx(18 / 20 - 11 / 20), 40)
    words = ("stork/the same", "stork/random walk", "same/land", "rand/land")
    assert evaluate(made((9, 5, 8, 6), (10, 10, 10, 10), group_names=words)).background_gap is None


def test_a_damaged_metrics_file_is_named(tmp_path):
    path = tmp_path / "metrics.json"
    with pytest.raises(UserError, match="no such file"):
        read_metrics(path)
    for text in ("{", "[]", "{}", '{"splits": []}', '{"splits": {"test": {"n": 1}}}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"metrics\.json: damaged .*; remove it and evaluate again"):
            read_metrics(path)
    whole = {"splits": {"test": evaluate(made((9, 5), (10, 10), group_names=PLACES[:2])).to_dict()}}
    path.write_text(json.dumps(whole))
    assert read_metrics(path) == whole


# AUC


def test_auc_is_scikit_learns_and_pairs_are_as_defined():
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 4, 400)
    labels, margins = groups // 2, np.round(generator.normal(groups * 0.5, 1), 1)  # rounded: with ties
    metrics = evaluate(scored(margins, labels, groups, PLACES), train_group_counts=IN_TRAINING)
    assert metrics.auc.value == pytest.approx(roc_auc_score(labels, margins))
    rare = (groups == 1) | (groups == 2)
    assert metrics.minority_auc.value == pytest.approx(roc_auc_score(labels[rare], margins[rare]))
    assert metrics.minority_auc.n == rare.sum()
    pairs = [(groups == p) | (groups == q) for p in (2, 3) for q in (0, 1)]
    worst = min(roc_auc_score(labels[pair], margins[pair]) for pair in pairs)
    assert metrics.worst_pair_auc.value == pytest.approx(worst)
    assert metrics.worst_pair_auc.of == "waterbird on land against landbird on water"


def test_auc_on_minority_groups_by_hand():
    groups = np.array([0, 0, 1, 1, 2, 2, 3])
    margins = [-9, -8, 1, 3, 2, 4, 9]  # of the pairs (2, 4) against (1, 3), three are in order
    metrics = evaluate(scored(margins, groups // 2, groups, PLACES), train_group_counts=IN_TRAINING)
    assert metrics.minority_auc.value == 0.75
    assert metrics.auc.value == pytest.approx(11 / 12)


def test_auc_ranks_near_certain_predictions():
    labels = np.array([0, 0, 1, 1])
    assert score(scored([20.0, 40.0, 41.0, 60.0], labels), "auc") == 1.0
    assert score(scored([41.0, 40.0, 20.0, 60.0], labels), "auc") == 0.5


def test_auc_of_a_single_class_is_undefined_with_a_warning():
    metrics = evaluate(answered(np.ones(50, dtype=int), np.arange(50) % 2 == 0))
    assert metrics.auc is None
    assert any("AUROC is undefined" in remark and "only images of waterbird" in remark for remark in metrics.remarks)
    with pytest.raises(UserError, match="exactly two classes"):
        score(answered(np.ones(5, dtype=int), np.ones(5, dtype=bool)), "auc")


def test_very_many_groups_leave_the_auc_and_drop_its_pairs():
    labels, names = np.arange(200) % 2, tuple(map(str, range(100)))
    metrics = evaluate(scored(np.arange(200) % 7, labels, np.arange(200) // 2, names))
    assert metrics.auc.value == pytest.approx(roc_auc_score(labels, np.arange(200) % 7))
    assert metrics.worst_pair_auc is None


# Warnings and text


def test_groups_too_small_for_conclusions_are_named_and_large_ones_are_not():
    metrics = evaluate(made((500, 250, 40, 5), (1000, 500, 80, 10)))
    small = next(warning for warning in metrics.warnings if "groups too small" in warning)
    assert "waterbird on land (n 80), waterbird on water (n 10)" in small
    assert "landbird" not in small.replace("waterbird", "")


def test_groups_and_classes_missing_from_the_split_are_named():
    predictions = made((9, 8), (10, 10), group_names=("landbird on land", "waterbird on land", "waterbird on water"))
    predictions = replace(predictions, classes=(*BIRDS, "seabird"), probabilities=np.ones((20, 3), dtype=np.float32))
    warnings = " | ".join(evaluate(predictions, train_group_counts={**IN_TRAINING}).warnings)
    assert "has no images of seabird" in warnings
    assert "has no images of waterbird on water, landbird on water" in warnings


def test_groups_of_training_and_of_the_split_must_overlap():
    with pytest.raises(UserError, match=r"beach.*landbird on land"):
        evaluate(made((9, 8, 7, 6), (10,) * 4), train_group_counts={"beach": 3})


def test_groups_that_mix_labels_have_no_minority_and_give_a_warning():
    predictions = answered(
        np.arange(40) % 2, np.arange(40) % 3 > 0, groups=np.arange(40) // 20, group_names=("land", "water")
    )
    metrics = evaluate(predictions, train_group_counts={"land": 5, "water": 9})
    assert metrics.minority_worst_group is None
    assert any("groups mix labels" in remark for remark in metrics.remarks)
    assert metrics.adjusted is not None


def test_without_groups_the_headline_gives_worst_class_accuracy():
    metrics = evaluate(answered(np.arange(400) % 2, np.arange(400) % 4 != 1))
    assert metrics.worst_group is None
    assert metrics.groups == {}
    assert metrics.headline().endswith("worst-class accuracy 50.0 % [43.0, 57.0] (waterbird, n = 200).")
    assert "within classes" in metrics.balanced.how


def test_the_headline_gives_accuracy_and_worst_group_accuracy():
    metrics = evaluate(made((2232, 1900, 392, 610), (2255, 2255, 642, 642)))
    assert metrics.headline() == (
        "Accuracy 88.6 %; worst-group accuracy 61.1 % [57.5, 64.8] (waterbird on land, n = 642)."
    )


def test_rows_show_per_cent_intervals_and_n():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)))
    rows = {name: rest for name, *rest in metrics.rows()}
    assert rows["Group landbird on land"] == ["90.0 %", "[69.9, 97.2]", "20"]
    assert rows["Worst-group accuracy: waterbird on land"][0] == "25.0 %"
    assert rows["Accuracy − worst-group accuracy"][0] == "+49.4 points"
    assert str(Estimate(0.7134, 0.68, 0.744, 642, "Wilson")) == "71.3 %  [68.0, 74.4]  n 642"


def test_of_very_many_classes_the_rows_show_the_worst():
    labels = np.repeat(np.arange(50), 10)
    metrics = evaluate(answered(labels, np.arange(500) % 10 >= labels // 10, classes=tuple(map(str, range(50)))))
    names = [row[0] for row in metrics.rows(limit=10)]
    assert [name for name in names if name.startswith("Class ")] == [f"Class {k}" for k in range(40, 50)]
    assert "(Class: 40 with higher accuracy not shown)" in names


def test_the_printed_table_gives_the_method_of_the_intervals():
    console = Console(width=160, file=io.StringIO())
    console.print(details_table(evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)))))
    text = console.file.getvalue()
    assert "Worst-group accuracy: waterbird on land" in text
    assert "biased low" in text


def test_metrics_round_trip_through_json():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)), train_group_counts=IN_TRAINING)
    assert Metrics.from_dict(json.loads(json.dumps(metrics.to_dict()))) == metrics


# Scores for model selection


def test_scores_are_the_metrics_of_the_table():
    predictions = made((18, 6, 1, 4), (20, 10, 4, 5))
    metrics = evaluate(predictions)
    assert score(predictions) == score(predictions, "balanced") == pytest.approx(metrics.balanced.value)
    assert score(predictions, "accuracy") == pytest.approx(metrics.accuracy.value)
    assert score(predictions, "worst-group") == pytest.approx(metrics.worst_group.value)
    assert score(predictions, "worst-class") == pytest.approx(metrics.worst_class.value)
    assert score(predictions, "auc") == pytest.approx(metrics.auc.value)
    assert set(SCORES) == {"balanced", "accuracy", "worst-group", "worst-class", "auc"}


def test_equally_good_predictions_tie_despite_rounding_errors(monkeypatch):
    monkeypatch.setitem(SCORES, "balanced", lambda mean: mean)
    assert 0.1 + 0.2 != 0.3
    assert score(0.1 + 0.2) == score(0.3)


def test_scores_leave_out_classes_without_images():
    assert score(answered(np.array([0, 0, 2, 2]), np.array([1, 0, 1, 1], dtype=bool), classes=("a", "b", "c"))) == 0.75


def test_a_score_that_is_not_available_is_an_error():
    with pytest.raises(UserError, match="balanced, accuracy, worst-group, worst-class, auc"):
        score(made((1, 1, 1, 1), (2, 2, 2, 2)), "f1")
    with pytest.raises(UserError, match="worst-group needs group labels"):
        score(answered(np.arange(4) % 2, np.ones(4, dtype=bool)), "worst-group")
