"""Which run is better, and when it cannot be reported."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from sightline.errors import UserError
from sightline.metrics.comparison import Entry, compare, verdict
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate
from sightline.metrics.predictions import Predictions

CLASSES = ("cat", "dog")
GROUPS = ("cat in", "cat out", "dog in", "dog out")


def pair(seed: int, first, second, sizes=(750,) * 4, shared: float = 0.7) -> tuple[Predictions, Predictions]:
    """Two runs with these accuracies in four groups; most images are as hard for the one as for the other."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(4), sizes)
    hard = generator.random(len(groups))
    own = [np.where(generator.random(len(groups)) < shared, hard, generator.random(len(groups))) for _ in range(2)]
    return tuple(
        run(groups, hardness < np.array(accuracies)[groups])
        for hardness, accuracies in zip(own, (first, second), strict=True)
    )


def run(groups: np.ndarray, correct: np.ndarray, group_names=GROUPS) -> Predictions:
    labels = groups // 2
    predicted = np.where(correct, labels, 1 - labels)
    images = [f"{number}.jpg" for number in range(len(groups))]
    return Predictions(images, labels, np.eye(2, dtype=np.float32)[predicted], predicted, CLASSES, groups, group_names)


def small(right, n: int = 100) -> Predictions:
    return run(np.repeat(np.arange(4), n), np.concatenate([np.arange(n) < k for k in right]))


def gain_of(first: Predictions, second: Predictions) -> Entry:
    return compare({"first": [first], "second": [second]}, resamples=400).entries[1]


def test_a_true_gain_of_three_points_is_found_on_three_thousand_pairs():
    gains = [gain_of(*pair(seed, [0.80] * 4, [0.83] * 4)).accuracy_gain for seed in range(20)]
    assert sum(verdict(gain) == "better" for gain in gains) >= 18
    assert np.mean([gain.value for gain in gains]) == pytest.approx(0.03, abs=0.005)


@pytest.mark.parametrize("accuracies", [(0.8,) * 4, (0.99, 0.85, 0.6, 0.95)])
def test_no_true_gain_is_undecided_nearly_always(accuracies):
    found = [gain_of(*pair(seed, accuracies, accuracies)) for seed in range(40)]
    assert sum(verdict(entry.accuracy_gain) != "undecided" for entry in found) <= 5
    assert sum(verdict(entry.worst_gain) != "undecided" for entry in found) <= 5


def test_a_minimum_over_tied_groups_is_not_taken_for_a_loss():
    sizes, tied, alone = (400, 400, 200, 200), (0.9,) * 4, (0.97, 0.99, 0.9, 0.99)
    for first, second in ((tied, alone), (alone, tied)):
        found = [gain_of(*pair(seed, first, second, sizes)) for seed in range(40)]
        assert sum(verdict(entry.worst_gain) != "undecided" for entry in found) <= 4


def test_a_repaired_worst_group_is_found_while_the_average_is_worse():
    erm, repaired = pair(0, (0.99, 0.97, 0.6, 0.99), (0.93, 0.92, 0.9, 0.92), sizes=(2255, 2255, 642, 642))
    entry = compare({"erm": [erm], "repaired": [repaired]}).entries[1]
    assert verdict(entry.worst_gain) == "better"
    assert verdict(entry.accuracy_gain) == "worse" or entry.accuracy_gain.high < 0.01
    assert verdict(compare({"repaired": [repaired], "erm": [erm]}).entries[1].worst_gain) == "worse"


def test_values_are_differences_to_the_reference_by_hand():
    comparison = compare({"a": [small((90, 80, 70, 60))], "b": [small((85, 85, 85, 85)), small((85, 85, 75, 85))]})
    reference, entry = comparison.entries
    assert (reference.accuracy_gain, reference.worst_gain) == (None, None)
    assert entry.accuracy_gain.value == pytest.approx((0.85 + 0.825) / 2 - 0.75)
    assert entry.worst_gain.value == pytest.approx((0.85 + 0.75) / 2 - 0.6)
    assert entry.metrics.seeds == 2
    assert "paired bootstrap over images within groups and over seeds" in entry.accuracy_gain.how
    assert reference.metrics == evaluate(small((90, 80, 70, 60)))


def test_pairing_makes_the_interval_of_the_difference_narrower_than_independent_runs_would():
    a, b = pair(0, [0.80] * 4, [0.82] * 4, shared=0.95)
    entry = compare({"a": [a], "b": [b]}).entries[1]
    width = entry.accuracy_gain.high - entry.accuracy_gain.low
    assert width < 0.6 * np.hypot(*[e.high - e.low for e in (evaluate(a).accuracy, evaluate(b).accuracy)])


def test_a_handful_of_different_answers_decides_nothing():
    a, b = small((90, 90, 90, 90)), small((91, 91, 91, 90))
    assert verdict(compare({"a": [a], "b": [b]}).entries[1].accuracy_gain) == "undecided"
    assert verdict(compare({"a": [a], "b": [a]}).entries[1].accuracy_gain) == "undecided"


def test_seeds_that_differ_make_a_gain_undecided():
    steady = compare({"a": [small((80,) * 4)] * 3, "b": [small((90,) * 4)] * 3}).entries[1]
    shaky = compare({"a": [small((80,) * 4)] * 3, "b": [small((70,) * 4), small((100,) * 4), small((100,) * 4)]})
    assert verdict(steady.accuracy_gain) == "better"
    assert verdict(shaky.entries[1].accuracy_gain) == "undecided"


def test_the_difference_of_few_seeds_deviates_as_students_t_of_both_says():
    a, b = ([small((k,) * 4, 10_000) for k in (m - 200, m, m + 200)] for m in (8_000, 7_000))
    gain = compare({"a": a, "b": b}, resamples=10_000).entries[1].accuracy_gain
    reach = 2.776445 * 0.02 * (2 / 3) ** 0.5  # t with four degrees of freedom, as the seeds of both vary equally
    assert (gain.low, gain.high) == pytest.approx((-0.1 - reach, -0.1 + reach), rel=0.02)


def test_the_order_of_images_does_not_matter_and_the_seed_decides_all():
    a, b = pair(0, (0.9, 0.8, 0.7, 0.8), (0.9, 0.85, 0.75, 0.8), sizes=(100,) * 4)
    turned = b.take(np.random.default_rng(0).permutation(len(b)))
    assert compare({"a": [a], "b": [b]}) == compare({"a": [a], "b": [turned]})
    assert compare({"a": [a], "b": [b]}, seed=1) != compare({"a": [a], "b": [b]}, seed=2)


def test_any_run_can_be_the_reference():
    runs = {name: [small((k, k, k, k))] for name, k in (("a", 60), ("b", 70), ("c", 80))}
    comparison = compare(runs, reference="b")
    assert comparison.reference == "b"
    assert [e.accuracy_gain and round(e.accuracy_gain.value, 2) for e in comparison.entries] == [-0.1, None, 0.1]
    assert any("the 2 differences are corrected for their number" in warning for warning in comparison.warnings)


def test_both_differences_are_corrected_for_the_number_of_rivals():
    """The same pair has wider intervals among more rivals: those that as many comparisons have, wherever made."""
    a, b = pair(0, [0.80] * 4, [0.82] * 4)
    runs = {"a": [a], "b": [b], "c": [b], "d": [b]}
    alone, among = compare({"a": [a], "b": [b]}).entries[1], compare(runs).entries[1]
    for name in ("accuracy_gain", "worst_gain"):
        one, three = getattr(alone, name), getattr(among, name)
        assert three.low < one.low < one.high < three.high
        assert three == getattr(compare({"a": [a], "b": [b]}, comparisons=3).entries[1], name)
        assert "corrected for 3 comparisons" in three.how
        assert "corrected" not in one.how


def test_without_groups_the_worst_class_is_compared():
    a, b = (replace(r, groups=None, group_names=()) for r in (small((90, 90, 50, 50)), small((90, 90, 90, 90))))
    comparison = compare({"a": [a], "b": [b]})
    assert comparison.worst_of == "class"
    assert comparison.entries[1].worst_gain.value == pytest.approx(0.4)
    assert "worst class" in printed(comparison.table(), 80)


def printed(table, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_rows_say_the_verdict_in_a_word():
    comparison = compare({"erm": [small((90, 90, 90, 40))], "probe, tuned": [small((90, 90, 90, 80))]})
    first, second = comparison.rows()
    assert (first[0], first[-1]) == ("erm", "")
    assert second[2].startswith("80.0 %  [")
    assert second[-1] == "better"
    gains = printed(comparison.gains_table(), 80)
    assert "+40.0 [" in gains
    assert "bootstrap over" in gains
    assert "Background" not in printed(comparison.table(), 80)


@pytest.mark.parametrize(
    ("right", "sentence"),
    [
        ((40, 80), r"Highest worst-group accuracy: b, 80\.0 % \[.*\]; \+40\.0 points \[.*\] against a, significant\."),
        ((80, 40), r"Highest worst-group accuracy: a, 80\.0 % \[.*\]; significantly more than b\."),
        ((80, 79), r"Highest worst-group accuracy: a, 80\.0 % .*; the difference to b is not significant\."),
    ],
)
def test_a_sentence_says_who_wins(right, sentence):
    comparison = compare({name: [small((90, 90, 90, k))] for name, k in zip("ab", right, strict=True)})
    assert re.fullmatch(sentence, comparison.sentence)


@pytest.mark.parametrize("length", [5, 60])
def test_on_a_narrow_screen_nothing_is_cut_short_or_torn_apart(length):
    names = [f"{word}-{'x' * length}" for word in ("anew", "again", "wait")]
    comparison = compare({name: [small((90, 90, 90, 40 + k))] for k, name in enumerate(names)})
    for table, shown in ((comparison.table(), names), (comparison.gains_table(), names[1:])):
        text = printed(table, 80)
        assert all(any(line.split()[:1] == [name] for line in text.splitlines()) for name in shown)
        assert "…" not in text


def test_a_comparison_is_plain_json():
    comparison = compare({"a": [small((90, 90, 90, 40))], "b": [small((90, 90, 90, 80))]})
    values = json.loads(json.dumps(comparison.to_dict()))
    assert values["reference"] == "a"
    assert values["entries"][0]["accuracy_gain"] is None
    assert values["entries"][1]["worst_gain"]["verdict"] == "better"
    assert values["entries"][1]["metrics"]["worst_group"]["value"] == 0.8


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.01, 0.03, "better"), (-0.03, -0.01, "worse"), (-0.01, 0.01, "undecided")]
)
def test_the_verdict_follows_the_interval(low, high, word):
    assert verdict(Estimate((low + high) / 2, low, high, 10, "", difference=True)) == word


def test_other_images_are_refused_with_an_example():
    a = small((90, 80, 70, 60))
    fewer = a.take(np.arange(3, 400))
    with pytest.raises(UserError, match=r"^a predicts 0\.jpg and 2 more, b does not"):
        compare({"a": [a], "b": [fewer]})
    with pytest.raises(UserError, match=r"^b \(seed 2\) predicts 0\.jpg and 2 more, a does not"):
        compare({"a": [fewer], "b": [fewer, a]})
    twice = a.take(np.r_[0, np.arange(399)])
    with pytest.raises(UserError, match=r"^a predicts 399\.jpg, b does not"):
        compare({"a": [a], "b": [twice]})
    with pytest.raises(UserError, match="predict some images more often than others"):
        compare({"a": [twice.take(np.arange(399))], "b": [twice.take(np.r_[np.arange(399), 5])]})


def test_other_labels_groups_or_classes_are_refused():
    a = small((90, 80, 70, 60))
    with pytest.raises(UserError, match=r"0\.jpg has different labels or groups in b and a"):
        compare({"a": [a], "b": [replace(a, groups=(a.groups + 1) % 4)]})
    with pytest.raises(UserError, match="have different classes or groups"):
        compare({"a": [a], "b": [replace(a, classes=("cat", "cow"))]})


def test_too_few_runs_and_an_unknown_reference_are_refused():
    a = small((90, 80, 70, 60))
    with pytest.raises(UserError, match="at least two"):
        compare({"a": [a]})
    with pytest.raises(UserError, match="choose one of a, b"):
        compare({"a": [a], "b": [a]}, reference="c")
    with pytest.raises(UserError, match="'b' has no predictions"):
        compare({"a": [a], "b": []})
