"""DFR: what balanced groups do to a shortcut, and which images it says it has used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import A2Dfr, Dfr
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.dfr import fit_dfr
from sightline.metrics.inference import predictions_from_logits
from sightline.train import train
from sightline.what.dfr import (
    Hyperparameters,
    average_heads,
    balanced_subset,
    fit_balanced,
    fit_l1,
    hyperparameter_grid,
    select_hyperparameters,
    split_off,
)
from sightline.what.probe import Linear, fit_logistic, standardize_features

from ..commands import QUICK, SMALL, typed
from ..small_runs import table

EASY = Hyperparameters(1.0)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=40, val=16, test=8, correlation=0.7)


def settings(toy: Path, out: Path, **changes) -> dict:
    return {
        "data": toy,
        "out": out,
        "backbone": "random:nano",
        "size": 32,
        "workers": 0,
        "device": "cpu",
        "batch": 16,
    } | changes


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def planted(seed: int, agree: float, n: int = 1200, noise: int = 20) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weak core feature, a strong one that goes with the label as often as `agree`, and noise: x, labels, groups."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    places = np.where(rng.random(n) < agree, labels, 1 - labels)
    core, shortcut = (2 * labels - 1 + rng.normal(size=n) * 0.8), (2 * places - 1 + rng.normal(size=n) * 0.3)
    return np.column_stack([core, 3 * shortcut + 5, rng.normal(size=(n, noise))]), labels, 2 * labels + places


def worst_group(linear: Linear, x: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    right = linear.logits(x).argmax(axis=1) == labels
    return min(right[groups == group].mean() for group in np.unique(groups))


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_a_planted_shortcut_is_unlearnt():
    x, labels, groups = planted(0, agree=0.95)
    test = planted(1, agree=0.5)
    plain = fit_logistic(x, labels, 2, standardize=True)
    dfr = fit_balanced(x, labels, groups, 2, Hyperparameters(0.3), np.random.default_rng(0))
    assert worst_group(dfr, *test) > worst_group(plain, *test) + 0.2
    assert worst_group(dfr, *test) > 0.8
    assert abs(dfr.weight[1, 1]) < abs(plain.weight[1, 1]) / 5


def test_without_a_shortcut_little_is_lost():
    x, labels, groups = planted(0, agree=0.5)
    test_x, test_labels, _ = planted(1, agree=0.5)
    plain = fit_logistic(x, labels, 2, standardize=True)
    dfr = fit_balanced(x, labels, groups, 2, EASY, np.random.default_rng(0))
    right = [(fit.logits(test_x).argmax(axis=1) == test_labels).mean() for fit in (plain, dfr)]
    assert right[1] > right[0] - 0.02


def test_balanced_subsets_have_equal_groups_without_repetition():
    groups = np.repeat([0, 1, 3, 4], [50, 7, 20, 9])  # no group 2
    subsets = [balanced_subset(groups, np.random.default_rng(seed)) for seed in range(3)]
    for at in subsets:
        assert np.bincount(groups[at]).tolist() == [7, 7, 0, 7, 7]
        assert len(np.unique(at)) == len(at)
    assert not np.array_equal(subsets[0], subsets[1])


@pytest.mark.parametrize("one_in", [2, 5])
def test_images_are_held_out_from_every_group(one_in):
    groups = np.repeat([0, 1, 2, 3], [40, 10, 2, 1])
    kept, aside = split_off(groups, one_in, np.random.default_rng(0))
    assert sorted([*kept, *aside]) == list(range(len(groups)))
    assert np.bincount(groups[aside], minlength=4).tolist() == [40 // one_in, 10 // one_in, 1, 0]
    assert not np.array_equal(aside, split_off(groups, one_in, np.random.default_rng(1))[1])


def test_refits_are_averaged():
    x, labels, groups = planted(0, agree=0.8, n=120)
    found = fit_balanced(x, labels, groups, 2, EASY, np.random.default_rng(7))
    generator, (z, mean, std) = np.random.default_rng(7), standardize_features(x)
    subsets = [balanced_subset(groups, generator) for _ in range(20)]
    seeds = generator.integers(2**31, size=20).tolist()
    fits = [fit_l1(z[at], labels[at], 2, EASY, seed) for at, seed in zip(subsets, seeds, strict=True)]
    weight = sum(fit.weight for fit in fits) / 20 / std
    np.testing.assert_allclose(found.weight, weight, rtol=1e-12)
    np.testing.assert_allclose(found.bias, sum(fit.bias for fit in fits) / 20 - weight @ mean, rtol=1e-12)
    assert not np.allclose(fits[0].weight, fits[1].weight)
    np.testing.assert_array_equal(average_heads(fits[:1]).weight, fits[0].weight)


def test_a_stronger_penalty_makes_more_weights_zero():
    x, labels, _ = planted(0, agree=0.6, n=1200)
    z, _, _ = standardize_features(x)
    zeros = [(fit_l1(z, labels, 2, Hyperparameters(c), 0).weight[1] == 0).sum() for c in (1.0, 0.1, 0.01)]
    assert zeros[0] < zeros[1] < zeros[2]
    assert fit_l1(z, labels, 2, Hyperparameters(0.03), 0).weight[1, 0] > 0  # what counts is kept


def test_it_is_the_minimum_of_the_loss_that_is_named():
    """Sum of losses + |w, b| / C, the bias being penalised as well: no step from it is downhill."""
    x, labels, _ = planted(0, agree=0.6, n=80, noise=2)
    z, _, _ = standardize_features(x)
    fit = fit_l1(z, labels, 2, Hyperparameters(0.3, (1.0, 3.0)), 0)
    best = np.append(fit.weight[1], fit.bias[1])

    def loss(w: np.ndarray) -> float:
        losses = np.log1p(np.exp(-(2 * labels - 1) * (z @ w[:-1] + w[-1])))
        return float((losses * np.where(labels == 1, 3.0, 1.0)).sum() + np.abs(w).sum() / 0.3)

    for step in np.concatenate([np.eye(len(best)), -np.eye(len(best))]) * 0.01:
        assert loss(best + step) > loss(best)


def test_several_classes_are_one_vs_rest_and_absent_ones_never_predicted():
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 2, 3], size=300)
    x = np.eye(4)[labels] + rng.normal(size=(300, 4)) * 0.2
    linear = fit_balanced(x, labels, labels, 4, EASY, rng, refits=2)
    predictions = linear.logits(x).argmax(axis=1)
    assert (predictions == labels).mean() > 0.97
    only = fit_l1(x, (labels == 2).astype(int), 2, EASY, 0)
    np.testing.assert_allclose(fit_l1(x, labels, 4, EASY, 0).weight[2], only.weight[1])


def test_the_grid_has_every_c_and_weights_of_either_of_two_classes():
    assert len(hyperparameter_grid(3)) == len(hyperparameter_grid(2, weigh=False)) == 7
    assert len(set(hyperparameter_grid(2))) == 7 * 13
    assert {c.weights for c in hyperparameter_grid(2)} >= {None, (1000.0, 1.0), (1.0, 1000.0)}


def test_held_out_data_select_and_ties_go_to_the_first():
    x, labels, groups = planted(0, agree=0.9, n=200)
    options = [Hyperparameters(1.0), Hyperparameters(0.1), Hyperparameters(0.01)]
    settings = {1.0: 0.5, 0.1: 0.8, 0.01: 0.8}
    best, tried = select_hyperparameters(
        x, labels, groups, 2, options, lambda fit: settings[fit.c], np.random.default_rng(0)
    )
    assert (best, tried) == (Hyperparameters(0.1), {choice: settings[choice.c] for choice in options})


def test_hyperparameters_are_scored_on_images_that_no_candidate_was_fitted_to(toy, monkeypatch):
    rows, scored, fitted = read_rows(toy), set(), set()
    at = rows.split_indices("val")
    features = np.random.default_rng(0).normal(size=(len(at), 4))
    number = {tuple(row): index for row, index in zip(features.tolist(), at.tolist(), strict=True)}

    def select(some, *others):
        fitted.update(number[tuple(row)] for row in some.tolist())
        return select_hyperparameters(some, *others)

    def predictions(rows, indices, logits):
        scored.update(indices.tolist())
        return predictions_from_logits(rows, indices, logits)

    monkeypatch.setattr("sightline.methods.dfr.select_hyperparameters", select)
    monkeypatch.setattr("sightline.methods.dfr.predictions_from_logits", predictions)
    fit_dfr(Dfr(toy, refits=1), rows, {"val": features})
    assert fitted
    assert scored
    assert sorted([*fitted, *scored]) == sorted(at.tolist())


# ---- from data to predictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["val", "train"])
def test_a_run_records_which_images_it_used_and_uses_no_others(toy, tmp_path, kind):
    folder = train(Dfr(**settings(toy, tmp_path / "run", fit_on=kind)))
    assert len(list((folder / "features").iterdir())) == 1  # of no other split
    selection, metrics = facts_of(folder)["selection"], json.loads((folder / "metrics.json").read_text())
    assert selection["on"] == metrics["selected_on"] == kind
    assert "group labels" in selection["metric"] == metrics["selected_by"]
    images = {name: sum(groups.values()) for name, groups in selection["images"].items()}
    asked = facts_of(folder)["data"]["counts"][kind]
    assert images["fitted_to_choose"] + images["chosen_on"] == sum(asked.values())
    held = {name: max(1, n // (2 if kind == "val" else 5)) for name, n in asked.items()}
    assert selection["images"]["chosen_on"] == held
    last = asked if kind == "val" else selection["images"]["fitted_to_choose"]
    assert selection["images"]["fitted_in_the_end"] == last
    assert selection["in_each_refit"] == f"{min(last.values())} of each group"


def test_the_split_depends_on_the_seed_alone(toy, tmp_path):
    runs = [train(Dfr(**settings(toy, tmp_path / str(i), seed=seed))) for i, seed in enumerate((0, 0, 1))]
    weights = [(run / "best.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] != weights[2]


def test_from_the_command_line_to_predictions(toy, tmp_path):
    run = tmp_path / "run"
    code, out, err = typed("train", "dfr", toy, *SMALL, "--fit-on", "train", "--out", run)
    assert (code, err) == (0, "")
    assert "selected by training worst-group accuracy (DFR-Train: fitted and chosen with group labels)" in out
    before = (run / "best.safetensors").read_bytes()
    assert typed("train", "dfr", toy, *SMALL, "--fit-on", "train", "--out", run, "--resume")[0] == 0
    assert (run / "best.safetensors").read_bytes() == before
    code, out, _ = typed("evaluate", run, *QUICK, "--out", tmp_path / "on")
    assert (code, "DFR-Train" in out) == (0, True)
    assert "duck" in typed("predict", run, toy / "test", "--device", "cpu")[1]


def test_on_crops_it_is_as_blind_as_a2(toy, tmp_path):
    run = tmp_path / "run"
    code, out, err = typed("train", "a2-dfr", toy, *SMALL, "--crop-size", "2/7", "1/2", "--out", run)
    assert (code, err) == (0, "")
    assert "on half of val, the best of 2" in out
    assert "DFR-Val" in out
    assert facts_of(run)["crops"]["rule"] == "highest worst-group on half of val, the first where they tie"
    code, out, _ = typed("verify", run, "--limit", 2, "--draws", 1)
    assert (code, "Blind outside its sight" in out) == (0, True)
    model = load(run)
    images = torch.rand(2, 3, 64, 64)
    assert model.method.judge(images, model.method.look(images)).logits.shape == (2, 2)


@pytest.mark.parametrize("config", [Dfr, A2Dfr])
def test_invalid_settings_are_errors_before_anything_is_computed(toy, tmp_path, config):
    groupless = table(tmp_path / "groupless", ("cat", "dog"))
    name, out = config.method, tmp_path / "run"
    with pytest.raises(UserError, match=f"groupless: {name} needs group labels, and the data have none"):
        train(config(**settings(groupless, out)))
    with pytest.raises(UserError, match="--refits 0: must be at least 1"):
        train(config(**settings(toy, out, refits=0)))
    with pytest.raises(UserError, match="a group of at least 50 images in the split 'val'; lower --min-group-size"):
        train(config(**settings(toy, out, min_group_size=50)))
    assert not (out / "features").exists()


def test_small_groups_can_be_left_out(toy, tmp_path):
    counts = facts_of(train(Dfr(**settings(toy, tmp_path / "all", fit_on="train"))))["data"]["counts"]["train"]
    floor = min(counts.values()) + 1
    folder = train(Dfr(**settings(toy, tmp_path / "some", fit_on="train", min_group_size=floor)))
    used = facts_of(folder)["selection"]["images"]["fitted_in_the_end"]
    assert set(used) == {name for name, n in counts.items() if n >= floor} != set(counts)
