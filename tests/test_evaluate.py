"""The table must not flatter: hand-computed figures, intervals that cover, errors that say where."""

import io
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sklearn.metrics import roc_auc_score

from sightline.answers import aligned
from sightline.errors import UserError
from sightline.evaluate import SCORES, Answers, Estimate, Metrics, across_seeds, evaluate, score, wilson
from sightline.metrics import FIGURES, read_metrics

BIRDS = ("landbird", "waterbird")
PLACES = ("landbird on land", "landbird on water", "waterbird on land", "waterbird on water")
IN_TRAINING = dict(zip(PLACES, (3498, 184, 56, 1057), strict=True))


def made(right, sizes, classes=BIRDS, group_names=PLACES, **more) -> Answers:
    """Groups of these sizes, of which so many are right; the groups share out the classes evenly, in order."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    correct = np.concatenate([np.arange(n) < k for k, n in zip(right, sizes, strict=True)])
    labels = groups * len(classes) // len(sizes)
    return answered(labels, correct, classes, groups, group_names, **more)


def answered(labels, correct, classes=BIRDS, groups=None, group_names=(), **more) -> Answers:
    predicted = np.where(correct, labels, (labels + 1) % len(classes))
    probabilities = np.full((len(labels), len(classes)), 0.1 / (len(classes) - 1), dtype=np.float32)
    probabilities[np.arange(len(labels)), predicted] = 0.9
    images = [f"{number:06}.jpg" for number in range(len(labels))]
    return Answers(images, labels, probabilities, predicted, classes, groups, group_names, **more)


def scored(margins, labels, groups=None, group_names=()) -> Answers:
    logits = np.stack([np.zeros(len(margins)), margins], axis=1).astype(np.float32)
    images = [f"{number:06}.jpg" for number in range(len(margins))]
    return Answers.from_logits(images, np.asarray(labels), logits, BIRDS, groups, group_names)


def chances(generator, accuracies, sizes, **more) -> Answers:
    return made(generator.binomial(sizes, accuracies), sizes, **more)


def shuffled(answers: Answers, seed: int) -> Answers:
    return answers.take(np.random.default_rng(seed).permutation(len(answers)))


def estimates(metrics: Metrics) -> list[Estimate]:
    figures = [getattr(metrics, name) for name in FIGURES if getattr(metrics, name)]
    return [*figures, *metrics.classes.values(), *metrics.groups.values()]


# Figures


def test_figures_are_those_computed_by_hand():
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
    answers = made((90, 70, 80, 60), (100, 100, 100, 100))
    metrics = evaluate(answers, train_group_counts=IN_TRAINING)
    assert metrics.worst_group.of == "waterbird on water"
    assert (metrics.minority_worst_group.of, metrics.minority_worst_group.value) == ("landbird on water", 0.7)
    assert metrics.minority_worst_group == evaluate(answers, minority=[1, 2]).minority_worst_group
    assert evaluate(answers, minority=[2]).minority_worst_group.of == "waterbird on land"


def test_a_group_unseen_in_training_is_a_minority():
    counts = dict.fromkeys(PLACES[1:3], 50)
    metrics = evaluate(made((9, 8, 7, 6), (10, 10, 10, 10)), train_group_counts=counts)
    assert metrics.minority_worst_group.of == "waterbird on water"


def test_without_training_counts_nothing_is_guessed():
    metrics = evaluate(made((9, 8, 7, 6), (10, 10, 10, 10)))
    assert metrics.adjusted is None
    assert metrics.minority_worst_group is None
    assert any("training counts are not known" in warning for warning in metrics.warnings)


def test_a_prediction_that_is_no_class_counts_as_wrong():
    answers = made((10, 10, 10, 10), (10, 10, 10, 10))
    predicted = answers.predicted.copy()
    predicted[:4] = -1
    assert evaluate(replace(answers, predicted=predicted)).accuracy.value == pytest.approx(0.9)


@pytest.mark.parametrize("words", [("mixed_same", "mixed_rand", "original"), ("same", "random", "none")])
def test_background_gap_is_same_minus_random(words):
    correct = np.repeat([True, False, True, False, True], [90, 10, 60, 40, 50])
    background = np.repeat(words, [100, 100, 50]).tolist()
    answers = answered(np.arange(250) % 2, correct, extra={"background": background})
    gap = evaluate(answers).background_gap
    assert (gap.value, gap.n, gap.difference) == (pytest.approx(0.3), 200, True)
    assert 0.17 < gap.low < 0.2 < 0.4 < gap.high < 0.43  # Newcombe's interval: 0.181, 0.409


def test_background_gap_is_found_in_the_names_of_groups():
    answers = made((9, 5, 8, 6), (10, 10, 10, 10), group_names=("a mixed_same", "a mixed_rand", "b mixed-same", "b x"))
    assert evaluate(answers).background_gap.value == pytest.approx(17 / 20 - 5 / 10)
    assert evaluate(made((9, 5, 8, 6), (10, 10, 10, 10))).background_gap is None


def test_background_gap_is_found_in_the_groups_that_the_builder_makes():
    places = ("original", "other", "rand", "same")  # of which a test split has no `other`
    names = tuple(f"{bird}/{place}" for bird in BIRDS for place in places)
    answers = made((9, 0, 5, 8, 9, 0, 6, 10), (10, 0, 10, 10, 10, 0, 10, 10), group_names=names)
    gap = evaluate(answers, train_group_counts=dict.fromkeys(names, 5)).background_gap
    assert (gap.value, gap.n) == (pytest.approx(18 / 20 - 11 / 20), 40)
    words = ("stork/the same", "stork/random walk", "same/land", "rand/land")
    assert evaluate(made((9, 5, 8, 6), (10, 10, 10, 10), group_names=words)).background_gap is None


def test_a_damaged_file_of_metrics_is_named(tmp_path):
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


def test_auc_tells_near_certain_answers_apart():
    labels = np.array([0, 0, 1, 1])
    assert score(scored([20.0, 40.0, 41.0, 60.0], labels), "auc") == 1.0
    assert score(scored([41.0, 40.0, 20.0, 60.0], labels), "auc") == 0.5


def test_auc_of_a_single_class_is_undefined_and_said():
    metrics = evaluate(answered(np.ones(50, dtype=int), np.arange(50) % 2 == 0))
    assert metrics.auc is None
    assert any("AUC is undefined" in warning and "waterbird only" in warning for warning in metrics.warnings)
    with pytest.raises(UserError, match="exactly two classes"):
        score(answered(np.ones(5, dtype=int), np.ones(5, dtype=bool)), "auc")


def test_very_many_groups_leave_the_auc_and_drop_its_pairs():
    labels, names = np.arange(200) % 2, tuple(map(str, range(100)))
    metrics = evaluate(scored(np.arange(200) % 7, labels, np.arange(200) // 2, names))
    assert metrics.auc.value == pytest.approx(roc_auc_score(labels, np.arange(200) % 7))
    assert metrics.worst_pair_auc is None


# Intervals


def covered(simulate, **truths: float) -> list[float]:
    """How often each figure's interval holds the truth, over 200 simulated sets."""
    found = [evaluate(simulate(np.random.default_rng(seed)), resamples=400) for seed in range(200)]
    return [
        float(np.mean([getattr(metrics, name).low <= truth <= getattr(metrics, name).high for metrics in found]))
        for name, truth in truths.items()
    ]


def test_the_interval_of_one_group_covers_as_often_as_it_says():
    def simulate(generator):
        return chances(generator, [0.8], [150], group_names=("all",))

    for share in covered(simulate, accuracy=0.8, mean_of_groups=0.8, worst_group=0.8):
        assert 0.90 <= share <= 0.99


@pytest.mark.parametrize("accuracies", [(0.99, 0.85, 0.6, 0.95), (0.9, 0.9, 0.9, 0.9)])
def test_the_worst_group_is_covered_when_it_stands_alone_and_when_all_tie(accuracies):
    sizes = (400, 400, 100, 100)
    mean, gap = np.mean(accuracies), np.average(accuracies, weights=sizes) - min(accuracies)
    shares = covered(
        lambda generator: chances(generator, accuracies, sizes),
        worst_group=min(accuracies),
        group_gap=gap,
        mean_of_groups=mean,
    )
    assert min(shares) >= 0.91
    assert shares[2] <= 0.99


def test_the_auc_is_covered_as_often_as_its_interval_says():
    def simulate(generator):
        labels = np.arange(120) % 2
        return scored(generator.normal(labels, 1), labels)

    assert 0.90 <= covered(simulate, auc=0.76025)[0] <= 0.99


def test_a_minimum_is_biased_low_and_says_so():
    found = [evaluate(chances(np.random.default_rng(s), [0.8] * 4, [100] * 4), resamples=50) for s in range(100)]
    assert np.mean([metrics.worst_group.value for metrics in found]) < 0.78
    assert "biased low" in found[0].worst_group.how
    assert "biased low" in found[0].worst_class.how
    assert "biased high" in found[0].group_gap.how
    assert "bootstrap over images within groups" in found[0].worst_group.how


def test_no_mistakes_on_few_images_are_no_certainty():
    metrics = evaluate(made((5, 5, 5, 5), (5, 5, 5, 5)), train_group_counts=IN_TRAINING)
    assert all(estimate.low < 0.95 for estimate in estimates(metrics) if not estimate.difference)
    assert metrics.worst_group.low < 0.7
    assert metrics.auc.value == 1.0
    assert metrics.auc.low < 0.8
    assert metrics.group_gap.high > 0.1


def test_seeds_that_differ_widen_the_interval_and_seeds_that_agree_do_not():
    same = made((90, 90, 90, 90), (100, 100, 100, 100))
    other = made((70, 70, 70, 70), (100, 100, 100, 100))
    one, agree, differ = across_seeds([same]), across_seeds([same] * 4), across_seeds([same, other] * 2)
    widths = [metrics.accuracy.high - metrics.accuracy.low for metrics in (one, agree, differ)]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)
    assert widths[2] > 2 * widths[0]
    assert differ.accuracy.value == pytest.approx(0.8)
    assert differ.accuracy.n == 400
    assert "over images within groups and over 4 seeds" in differ.accuracy.how
    assert any("4 seeds" in warning for warning in differ.warnings)


def test_two_seeds_do_not_understate_their_variance():
    runs = [made((n, n, n, n), (1000, 1000, 1000, 1000)) for n in (700, 900)]
    drawn = across_seeds(
        runs
    ).accuracy  # the standard error of a mean of 0.7 and 0.9 is 0.1; two draws alone have 0.071
    assert (drawn.low, drawn.high) == pytest.approx((0.8 - 2**0.5 / 10, 0.8 + 2**0.5 / 10), abs=0.02)


def test_the_worst_group_over_seeds_is_the_mean_of_each_seeds_worst():
    runs = [made((90, 50, 80, 80), (100,) * 4), made((90, 80, 60, 80), (100,) * 4)]
    metrics = across_seeds(runs)
    assert metrics.worst_group.value == pytest.approx(0.55)
    assert metrics.worst_group.of == "landbird on water"
    assert metrics.worst_group.low < 0.5 < 0.6 < metrics.worst_group.high


def test_seeds_are_matched_by_image_whatever_their_order():
    runs = [chances(np.random.default_rng(s), [0.9, 0.8, 0.7, 0.8], [50] * 4) for s in range(3)]
    assert across_seeds(runs) == across_seeds([shuffled(run, s) for s, run in enumerate(runs)])


def test_an_image_listed_twice_keeps_its_labels_apart():
    answers = replace(made((9, 8, 7, 6), (10,) * 4), images=[f"{k % 20}.jpg" for k in range(40)])
    first, second = aligned([("a", answers), ("b", shuffled(answers, 0))])
    assert (first.labels == second.labels).all()
    assert (first.groups == second.groups).all()


def test_the_same_seed_gives_the_same_table_and_another_nearly_the_same():
    answers = chances(np.random.default_rng(0), [0.9, 0.8, 0.7, 0.8], [500] * 4)
    assert evaluate(answers, seed=1) == evaluate(answers, seed=1)
    assert evaluate(answers, seed=1) != evaluate(answers, seed=2)
    assert evaluate(answers, seed=1).worst_group.low == pytest.approx(
        evaluate(answers, seed=2).worst_group.low, abs=0.01
    )


def test_a_hundred_thousand_answers_take_less_than_a_second():
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 4, 100_000)
    answers = scored(generator.normal(groups, 2), groups // 2, groups, PLACES)
    start = time.process_time()
    evaluate(answers, train_group_counts=IN_TRAINING)
    assert time.process_time() - start < 1


counts = st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(max_examples=60, deadline=None)
@given(st.lists(counts, min_size=2, max_size=6), st.integers(0, 3))
def test_worst_is_below_mean_is_below_best_and_every_value_lies_in_its_interval(cells, seed):
    right, sizes = zip(*cells, strict=True)
    names = tuple(f"group {k}" for k in range(len(cells)))
    answers = made(right, sizes, group_names=names)
    metrics = evaluate(answers, train_group_counts=dict(zip(names, sizes, strict=True)), resamples=100)
    best = max(estimate.value for estimate in metrics.groups.values())
    for mean in (metrics.mean_of_groups, metrics.adjusted, metrics.accuracy):
        assert metrics.worst_group.value <= mean.value + 1e-12
        assert mean.value <= best + 1e-12
    assert metrics.adjusted.value == pytest.approx(metrics.accuracy.value)
    assert metrics.worst_group.value <= metrics.minority_worst_group.value + 1e-12
    assert metrics.group_gap.value == pytest.approx(metrics.accuracy.value - metrics.worst_group.value)
    for estimate in estimates(metrics):
        floor = -1 if estimate.difference else 0
        assert floor <= estimate.low <= estimate.value <= estimate.high <= 1
    assert (
        evaluate(shuffled(answers, seed), train_group_counts=dict(zip(names, sizes, strict=True)), resamples=100)
        == metrics
    )


# Warnings and words


def test_cells_too_small_to_conclude_are_named_and_large_ones_are_not():
    metrics = evaluate(made((500, 250, 40, 5), (1000, 500, 80, 10)))
    small = next(warning for warning in metrics.warnings if "groups too small" in warning)
    assert "waterbird on land (n 80), waterbird on water (n 10)" in small
    assert "landbird" not in small.replace("waterbird", "")


def test_groups_and_classes_missing_from_the_split_are_named():
    answers = made((9, 8), (10, 10), group_names=("landbird on land", "waterbird on land", "waterbird on water"))
    answers = replace(answers, classes=(*BIRDS, "seabird"), probabilities=np.ones((20, 3), dtype=np.float32))
    warnings = " | ".join(evaluate(answers, train_group_counts={**IN_TRAINING}).warnings)
    assert "has no images of seabird" in warnings
    assert "has no images of waterbird on water, landbird on water" in warnings


def test_groups_of_training_and_of_the_split_must_have_something_in_common():
    with pytest.raises(UserError, match=r"beach.*landbird on land"):
        evaluate(made((9, 8, 7, 6), (10,) * 4), train_group_counts={"beach": 3})


def test_groups_that_mix_labels_have_no_minority_and_say_so():
    answers = answered(
        np.arange(40) % 2, np.arange(40) % 3 > 0, groups=np.arange(40) // 20, group_names=("land", "water")
    )
    metrics = evaluate(answers, train_group_counts={"land": 5, "water": 9})
    assert metrics.minority_worst_group is None
    assert any("groups mix labels" in warning for warning in metrics.warnings)
    assert metrics.adjusted is not None


def test_without_groups_the_worst_class_stands_in():
    metrics = evaluate(answered(np.arange(400) % 2, np.arange(400) % 4 != 1))
    assert metrics.worst_group is None
    assert metrics.groups == {}
    assert "50 % [43, 57] of the worst class, waterbird (n 200)" in metrics.headline()
    assert "within classes" in metrics.balanced.how


def test_the_headline_says_both_numbers_in_plain_words():
    metrics = evaluate(made((2232, 1900, 392, 610), (2255, 2255, 642, 642)))
    assert metrics.headline() == (
        "Right on 89 % of all images [88, 89], but on only 61 % [57, 65] of the worst group, waterbird on land (n 642)"
    )
    level = evaluate(made((180, 180, 180, 180), (200,) * 4)).headline()
    assert ", and on 90 %" in level


def test_nearly_all_is_not_called_all():
    assert "99.8 %" in evaluate(answered(np.arange(1000) % 2, np.arange(1000) > 1)).headline()


def test_rows_show_per_cent_intervals_and_n():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)))
    rows = {name: rest for name, *rest in metrics.rows()}
    assert rows["group landbird on land"] == ["90.0 %", "[69.9, 97.2]", "20"]
    assert rows["worst group: waterbird on land"][0] == "25.0 %"
    assert rows["accuracy − worst group"][0] == "+49.4 points"
    assert str(Estimate(0.7134, 0.68, 0.744, 642, "Wilson")) == "71.3 %  [68.0, 74.4]  n 642"


def test_of_very_many_classes_the_rows_show_the_worst():
    labels = np.repeat(np.arange(50), 10)
    metrics = evaluate(answered(labels, np.arange(500) % 10 >= labels // 10, classes=tuple(map(str, range(50)))))
    names = [row[0] for row in metrics.rows(limit=10)]
    assert [name for name in names if name.startswith("class ")] == [f"class {k}" for k in range(40, 50)]
    assert "(class: 40 better ones not shown)" in names


def test_the_table_can_be_printed_and_tells_how_intervals_were_made():
    console = Console(width=160, file=io.StringIO())
    console.print(evaluate(made((18, 6, 1, 4), (20, 10, 4, 5))).table())
    text = console.file.getvalue()
    assert "worst group: waterbird on land" in text
    assert "biased low" in text


def test_metrics_survive_json():
    metrics = evaluate(made((18, 6, 1, 4), (20, 10, 4, 5)), train_group_counts=IN_TRAINING)
    assert Metrics.from_dict(json.loads(json.dumps(metrics.to_dict()))) == metrics


# Choosing a model


def test_scores_are_the_figures_of_the_table():
    answers = made((18, 6, 1, 4), (20, 10, 4, 5))
    metrics = evaluate(answers)
    assert score(answers) == score(answers, "balanced") == pytest.approx(metrics.balanced.value)
    assert score(answers, "accuracy") == pytest.approx(metrics.accuracy.value)
    assert score(answers, "worst-group") == pytest.approx(metrics.worst_group.value)
    assert score(answers, "worst-class") == pytest.approx(metrics.worst_class.value)
    assert score(answers, "auc") == pytest.approx(metrics.auc.value)
    assert set(SCORES) == {"balanced", "accuracy", "worst-group", "worst-class", "auc"}


def test_scores_leave_out_classes_without_images():
    assert score(answered(np.array([0, 0, 2, 2]), np.array([1, 0, 1, 1], dtype=bool), classes=("a", "b", "c"))) == 0.75


def test_a_score_that_cannot_be_had_is_refused():
    with pytest.raises(UserError, match="balanced, accuracy, worst-group, worst-class, auc"):
        score(made((1, 1, 1, 1), (2, 2, 2, 2)), "f1")
    with pytest.raises(UserError, match="worst-group needs group labels"):
        score(answered(np.arange(4) % 2, np.ones(4, dtype=bool)), "worst-group")


# Answers and their file


def test_answers_survive_their_csv_file_with_awkward_names(tmp_path):
    classes = ("Möwe, graue", 'der "Rest"', "鳥")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 30)
    answers = Answers.from_logits(
        [f"Ordner, {k}/bild\n{k}é.jpg" for k in range(30)],
        labels,
        generator.normal(0, 20, (30, 3)).astype(np.float32),
        classes,
        labels * 2 + (np.arange(30) % 2),
        tuple(f"{name}; {place}" for name in classes for place in ("Land", "Wasser, tief")),
        "prüfung",
        {"background": ["mixed_same", "mixed, rand"] * 15, "": ["leer"] * 30},
    )
    answers.predicted[3] = -1
    answers.save_csv(tmp_path / "answers.csv")
    for again in (
        Answers.load_csv(tmp_path / "answers.csv"),
        Answers.load_csv(tmp_path / "answers.csv", split="prüfung", group_names=answers.group_names),
    ):
        assert (again.images, again.classes, again.split) == (answers.images, classes, "prüfung")
        assert again.group_names == answers.group_names
        for name in ("labels", "predicted", "probabilities", "groups"):
            assert np.array_equal(getattr(again, name), getattr(answers, name)), name
            assert getattr(again, name).dtype == getattr(answers, name).dtype
        assert again.extra == answers.extra
    assert not list(tmp_path.glob("*.part"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=2, unique=True))
def test_any_names_survive(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("answers") / "answers.csv"
    labels = np.arange(len(names))
    answers = answered(labels, labels > 0, tuple(names), labels, tuple(names), split=names[0])
    answers.save_csv(path)
    again = Answers.load_csv(path, group_names=names)
    assert (again.classes, again.group_names, again.split) == (tuple(names), tuple(names), names[0])
    assert np.array_equal(again.predicted, answers.predicted)


def test_the_file_has_the_promised_columns(tmp_path):
    made((1, 1, 1, 0), (1, 1, 1, 1)).save_csv(tmp_path / "answers.csv")
    lines = (tmp_path / "answers.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "image,label,predicted,group,split,p_landbird,p_waterbird"
    assert lines[4] == "000003.jpg,waterbird,landbird,waterbird on water,test,0.899999976,0.100000001"


HEADER = "image,label,predicted,group,p_cat,p_dog\n"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", ":1:", "no column image or label or predicted"),
        ("image,label,p_cat,p_dog\n", ":1:", "no column predicted"),
        ("image,label,predicted\n", ":1:", "the last columns must be the probabilities"),
        ("image,p_cat,p_dog,label,predicted\n", ":1:", "the last columns must be the probabilities"),
        ("image,label,predicted,group,group,p_cat,p_dog\n", ":1:", "two columns are called 'group'"),
        (HEADER, ":", "holds no answers"),
        (HEADER + "a,cat,dog,x,0.1,0.9\nb,cat,dog,x,0.1\n", ":3:", "5 values, but the header names 6 columns"),
        (HEADER + "a,cat,dog,x,0.1,0.9\nb,cow,dog,x,0.1,0.9\n", ":3:", "label is 'cow', which is none of cat, dog"),
        (HEADER + "\na,cat,cow,x,0.1,0.9\n", ":3:", "predicted is 'cow'"),
        (HEADER + 'a,cat,dog,"x\ny",0.1,0.9\nb,cat,dog,x,0.1,much\n', ":4:", "a probability is no number"),
        (HEADER + "a,,dog,x,0.1,0.9\n", ":2:", "label is ''"),
    ],
)
def test_a_faulty_file_is_refused_with_the_line_at_fault(tmp_path, text, place, message):
    path = tmp_path / "answers.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refusal:
        Answers.load_csv(path)
    assert str(refusal.value).startswith(f"{path}{place}")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_group_that_the_data_set_does_not_have_is_refused_with_its_line(tmp_path):
    made((1, 1, 1, 0), (1, 1, 1, 1)).save_csv(tmp_path / "answers.csv")
    with pytest.raises(UserError, match=r"answers\.csv:4: group is 'waterbird on land'"):
        Answers.load_csv(tmp_path / "answers.csv", group_names=PLACES[:2])


def test_a_file_from_a_spreadsheet_is_read(tmp_path):
    text = "image,label,predicted,p_cat,p_dog\r\na.jpg,cat,dog,0,1\r\n"
    (tmp_path / "answers.csv").write_text(text, encoding="utf-8-sig", newline="")
    answers = Answers.load_csv(tmp_path / "answers.csv")
    assert (answers.images, answers.classes, answers.groups, answers.split) == (
        ["a.jpg"],
        ("cat", "dog"),
        None,
        "answers",
    )


def test_one_of_several_splits_can_be_picked_and_must_be(tmp_path):
    path = tmp_path / "answers.csv"
    lines = ["image,label,predicted,split,p_cat,p_dog", "a,cat,cat,val,1,0", "b,dog,dog,test,0,1", "c,dog,cat,test,1,0"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert Answers.load_csv(path, split="test").images == ["b", "c"]
    with pytest.raises(UserError, match="holds the splits val, test"):
        Answers.load_csv(path)
    with pytest.raises(UserError, match="no answers to the split 'train'"):
        Answers.load_csv(path, split="train")


def test_files_that_cannot_be_read_or_written_are_said_so(tmp_path):
    answers = made((1, 1, 1, 0), (1, 1, 1, 1))
    with pytest.raises(UserError, match="cannot be read"):
        Answers.load_csv(tmp_path / "nowhere.csv")
    with pytest.raises(UserError, match="cannot be written"):
        answers.save_csv(tmp_path / "nowhere" / "answers.csv")


def test_an_unfinished_write_leaves_the_old_file_alone(tmp_path):
    answers = made((1, 1, 1, 0), (1, 1, 1, 1))
    answers.save_csv(tmp_path / "answers.csv")
    before = (tmp_path / "answers.csv").read_bytes()
    with pytest.raises(AssertionError, match="p_ is for probabilities"):
        replace(answers, extra={"p_value": ["", "", "", ""]}).save_csv(tmp_path / "answers.csv")
    assert (tmp_path / "answers.csv").read_bytes() == before


def test_a_diverged_model_and_an_empty_split_are_refused():
    with pytest.raises(UserError, match=r"1 of 2 answers are not numbers \(the first: 000001.jpg\)"):
        scored([0.0, np.inf], [0, 1])
    with pytest.raises(UserError, match="nothing to measure: the split 'test' has no images"):
        answered(np.zeros(0, dtype=int), np.zeros(0, dtype=bool))
