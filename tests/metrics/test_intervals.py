"""Intervals have the stated coverage, over images and over seeds."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sightline.explain.segmentation import pooled_miou
from sightline.metrics.coverage import mean_of
from sightline.metrics.groups import evaluate, evaluate_seeds
from sightline.metrics.intervals import gain_lower_bound, mean_over_runs, minimum_interval, run_weights
from sightline.metrics.predictions import align_runs

from ..answering import IN_TRAINING, PLACES, chances, estimates, made, scored, shuffled


def covered(simulate, **truths: float) -> list[float]:
    """The coverage of each metric's interval over 200 simulated sets."""
    found = [evaluate(simulate(np.random.default_rng(seed)), resamples=400) for seed in range(200)]
    return [
        float(np.mean([getattr(metrics, name).low <= truth <= getattr(metrics, name).high for metrics in found]))
        for name, truth in truths.items()
    ]


def test_the_interval_of_one_group_has_the_stated_coverage():
    def simulate(generator):
        return chances(generator, [0.8], [150], group_names=("all",))

    for share in covered(simulate, accuracy=0.8, mean_of_groups=0.8, worst_group=0.8):
        assert 0.90 <= share <= 0.99


@pytest.mark.parametrize("accuracies", [(0.99, 0.85, 0.6, 0.95), (0.9, 0.9, 0.9, 0.9)])
def test_the_interval_of_the_worst_group_covers_when_one_is_worst_and_when_all_tie(accuracies):
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


def test_the_interval_of_the_auc_has_the_stated_coverage():
    def simulate(generator):
        labels = np.arange(120) % 2
        return scored(generator.normal(labels, 1), labels)

    assert 0.90 <= covered(simulate, auc=0.76025)[0] <= 0.99


def tied(groups: int, others: int = 0) -> np.ndarray:
    """[R, 1, k]: draws of accuracies of so many tied groups; of others that are clearly higher."""
    drawn = np.random.default_rng(0).normal(0.6, 0.05, (4000, 1, groups + others))
    drawn[..., groups:] += 0.4
    return drawn


def test_the_upper_end_of_a_minimum_is_at_a_level_divided_by_the_groups_that_could_be_lowest():
    drawn, once = tied(4, others=2), np.ones((4000, 1))
    low, high, candidates = minimum_interval(drawn, once)
    assert candidates == 4
    assert high == pytest.approx(np.quantile(drawn[:, 0, :4], 1 - 0.025 / 4, axis=0).min())
    assert high > np.quantile(drawn[:, 0, :4], 1 - 0.025, axis=0).min() + 0.01
    assert low == pytest.approx(np.quantile(drawn[:, 0].min(axis=1), 0.025))


def test_the_least_gain_of_a_minimum_is_at_a_level_divided_by_the_groups_that_could_be_lowest():
    ours, theirs, once = tied(1) + 0.2, tied(4, others=2)[::-1], np.ones((4000, 1))
    differences = ours[:, 0] - theirs[:, 0, :4]
    least = gain_lower_bound(ours, once, theirs, once)
    assert least == pytest.approx(np.quantile(differences, 0.025 / 4, axis=0).max())
    assert least < np.quantile(differences, 0.025, axis=0).max() - 0.01


def test_a_minimum_is_biased_low_and_its_method_says_so():
    found = [evaluate(chances(np.random.default_rng(s), [0.8] * 4, [100] * 4), resamples=50) for s in range(100)]
    assert np.mean([metrics.worst_group.value for metrics in found]) < 0.78
    assert "biased low" in found[0].worst_group.how
    assert "biased low" in found[0].worst_class.how
    assert "biased high" in found[0].group_gap.how
    assert "bootstrap over images within groups" in found[0].worst_group.how


def test_few_images_without_an_error_still_have_wide_intervals():
    metrics = evaluate(made((5, 5, 5, 5), (5, 5, 5, 5)), train_group_counts=IN_TRAINING)
    assert all(estimate.low < 0.95 for estimate in estimates(metrics) if not estimate.difference)
    assert metrics.worst_group.low < 0.7
    assert metrics.auc.value == 1.0
    assert metrics.auc.low < 0.8
    assert metrics.group_gap.high > 0.1


def test_seeds_that_differ_widen_the_interval_and_seeds_that_agree_do_not():
    same = made((90, 90, 90, 90), (100, 100, 100, 100))
    other = made((70, 70, 70, 70), (100, 100, 100, 100))
    one, agree, differ = evaluate_seeds([same]), evaluate_seeds([same] * 4), evaluate_seeds([same, other] * 2)
    widths = [metrics.accuracy.high - metrics.accuracy.low for metrics in (one, agree, differ)]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)
    assert widths[2] > 2 * widths[0]
    assert differ.accuracy.value == pytest.approx(0.8)
    assert differ.accuracy.n == 400
    assert "over images within groups and over 4 seeds" in differ.accuracy.how
    assert any("4 seeds" in warning for warning in differ.warnings)


def test_noise_of_images_that_is_between_the_seeds_already_is_not_counted_again():
    """Two runs of equal accuracy that are wrong on other images: their mean is as certain as of twice the images."""
    generator = np.random.default_rng(0)
    runs = [replace_errors(made((320,) * 4, (400,) * 4), generator) for _ in range(2)]
    one, both = evaluate_seeds(runs[:1]), evaluate_seeds(runs)
    for name in ("balanced", "worst_class", "auc"):
        width, alone = (m.high - m.low for m in (getattr(both, name), getattr(one, name)))
        assert width < alone, name


def replace_errors(predictions, generator):
    """As many in every group, on other images."""
    order = np.concatenate([generator.permutation(np.flatnonzero(predictions.groups == g)) for g in range(4)])
    moved = {name: getattr(predictions, name)[order] for name in ("predicted", "probabilities")}
    return replace(predictions, **moved)


def test_few_seeds_deviate_as_students_t_says():
    runs = [made((n, n, n, n), (100_000,) * 4) for n in (78_000, 80_000, 82_000)]
    drawn = evaluate_seeds(runs, resamples=20_000).accuracy
    reach = 4.302653 * 0.02 / 3**0.5  # t with two degrees of freedom, times the standard error of the mean
    assert (drawn.low, drawn.high) == pytest.approx((0.8 - reach, 0.8 + reach), rel=0.005)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_intervals_over_few_seeds_have_the_stated_coverage(count):
    """Where seeds differ much more than images, t is exact; a bootstrap of the seeds covers 84 % of two."""
    generator, covers = np.random.default_rng(count), 0
    weights = run_weights(count, 4000, generator)
    for _ in range(1000):
        low, high = np.quantile(weights @ generator.normal(0.8, 0.03, count), [0.025, 0.975])
        covers += low <= 0.8 <= high
    assert 0.93 <= covers / 1000 <= 0.975


@pytest.mark.parametrize("ratio", [0.03, 0.3, 1.0, 10.0])
@pytest.mark.parametrize(("count", "least", "most"), [(2, 0.92, 0.975), (3, 0.93, 0.967), (5, 0.93, 0.967)])
def test_runs_and_images_together_have_the_stated_coverage(count, least, most, ratio):
    """Whatever the ratio of the variance of runs to the noise over images, which all runs have in common."""
    generator, covers = np.random.default_rng(count), 0
    weights = run_weights(count, 500, generator)
    for _ in range(1000):
        observed = generator.normal() + generator.normal(0, (count * ratio) ** 0.5, count)
        drawn = observed + generator.normal(size=(500, 1))
        low, high = np.quantile(mean_over_runs(drawn, weights), [0.025, 0.975])
        covers += low <= 0 <= high
    assert least <= covers / 1000 <= most


def miou_of(values):
    return pooled_miou(np.stack([values, np.ones_like(values)] * 2, axis=1))


@pytest.mark.parametrize(("estimate", "draws", "slack"), [(mean_of, 2000, 0.01), (miou_of, 400, 0.025)])
def test_means_over_few_images_have_the_stated_coverage(estimate, draws, slack):
    """The percentile interval alone covers 92.5 % of means of 20."""
    generator, covers = np.random.default_rng(0), 0
    for _ in range(draws):
        found = estimate(generator.beta(4, 4, 20))
        covers += found.low <= 0.5 <= found.high
    assert abs(covers / draws - 0.95) <= slack


def test_the_worst_group_over_seeds_is_the_mean_of_each_seeds_worst():
    runs = [made((90, 50, 80, 80), (100,) * 4), made((90, 80, 60, 80), (100,) * 4)]
    metrics = evaluate_seeds(runs)
    assert metrics.worst_group.value == pytest.approx(0.55)
    assert metrics.worst_group.of == "landbird on water"
    assert metrics.worst_group.low < 0.5 < 0.6 < metrics.worst_group.high


def test_seeds_are_matched_by_image_whatever_their_order():
    runs = [chances(np.random.default_rng(s), [0.9, 0.8, 0.7, 0.8], [50] * 4) for s in range(3)]
    assert evaluate_seeds(runs) == evaluate_seeds([shuffled(run, s) for s, run in enumerate(runs)])


def test_an_image_listed_twice_keeps_its_labels_apart():
    predictions = replace(made((9, 8, 7, 6), (10,) * 4), images=[f"{k % 20}.jpg" for k in range(40)])
    first, second = align_runs([("a", predictions), ("b", shuffled(predictions, 0))])
    assert (first.labels == second.labels).all()
    assert (first.groups == second.groups).all()


def test_the_same_seed_gives_the_same_table_and_another_nearly_the_same():
    predictions = chances(np.random.default_rng(0), [0.9, 0.8, 0.7, 0.8], [500] * 4)
    assert evaluate(predictions, seed=1) == evaluate(predictions, seed=1)
    assert evaluate(predictions, seed=1) != evaluate(predictions, seed=2)
    assert evaluate(predictions, seed=1).worst_group.low == pytest.approx(
        evaluate(predictions, seed=2).worst_group.low, abs=0.01
    )


def test_a_hundred_thousand_predictions_take_seconds_and_not_minutes():
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 4, 100_000)
    predictions = scored(generator.normal(groups, 2), groups // 2, groups, PLACES)
    start = time.process_time()
    evaluate(predictions, train_group_counts=IN_TRAINING)
    assert time.process_time() - start < 10, "a loose bound, for a busy machine: it takes less than a second"


counts = st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(max_examples=60, deadline=None)
@given(st.lists(counts, min_size=2, max_size=6), st.integers(0, 3))
@example([(1, 1)] * 6, 0)  # the mean of several AUROCs of 1 is 1
def test_worst_is_below_mean_is_below_best_and_every_value_lies_in_its_interval(cells, seed):
    right, sizes = zip(*cells, strict=True)
    names = tuple(f"group {k}" for k in range(len(cells)))
    predictions = made(right, sizes, group_names=names)
    metrics = evaluate(predictions, train_group_counts=dict(zip(names, sizes, strict=True)), resamples=100)
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
        evaluate(shuffled(predictions, seed), train_group_counts=dict(zip(names, sizes, strict=True)), resamples=100)
        == metrics
    )
