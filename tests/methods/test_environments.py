"""IRM, CORAL and GEORGE: their penalties and clusters by hand, and from the command line to the same predictions."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sightline.config import Coral, George, Irm
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.coral import CoralClassifier, moment_distance
from sightline.methods.environments import environments_of
from sightline.methods.george import clusters_by_class, hardness, principal_components
from sightline.methods.irm import IrmClassifier, risk_gradient
from sightline.metrics.predictions import Predictions
from sightline.train import train
from sightline.training.trainable import StepInfo, TrainBatch
from sightline.vit.weights import load_backbone

from ..commands import typed
from ..small_runs import Stop, files, in_two_processes, log_of, stopped_after

TOLD = {"backbone": "random:nano", "size": 32, "epochs": 2, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
ENVIRONMENTS = torch.tensor([0, 1, 0, 1])


def train_batch(groups: list[int], step: int = 0) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    count = len(groups)
    info = StepInfo(0, 0, step, 1, 10, torch.arange(count))
    images = torch.rand(count, 3, 32, 32, generator=generator)
    return TrainBatch(images, torch.arange(count) % 2, torch.tensor(groups), None, torch.arange(count), info)


# ---- IRM -------------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_risk_is_that_of_a_factor_of_the_logits():
    logits, labels = torch.randn(7, 3, dtype=torch.double), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    factor = torch.ones((), dtype=torch.double, requires_grad=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(factor * logits, labels), factor)
    assert float(risk_gradient(logits, labels)) == pytest.approx(float(expected), rel=1e-9)
    # By hand: logits (0, 2) with label 0 give the gradient sigmoid(2) * 2 - 0.
    assert float(risk_gradient(torch.tensor([[0.0, 2.0]]), torch.tensor([0]))) == pytest.approx(1.761594, abs=1e-6)


def test_the_irm_loss_is_the_mean_of_the_environments_plus_the_weighted_penalty():
    method = IrmClassifier(load_backbone("random:nano", classes=2, seed=0), ENVIRONMENTS, weight=4.0, ramp=0.5)
    batch = train_batch([0, 2, 2, 2, 1, 1], step=1)  # progress 0.1 of a ramp of 0.5: weight 0.8
    logits = method.vit(batch.images).logits
    first, second = (logits[:4], batch.labels[:4]), (logits[4:], batch.labels[4:])
    penalty = (risk_gradient(*first) ** 2 + risk_gradient(*second) ** 2) / 2
    risk = (F.cross_entropy(*first) + F.cross_entropy(*second)) / 2
    losses = method(batch)
    torch.testing.assert_close(losses["loss"], risk + 0.8 * penalty)
    late = method(replace(batch, info=replace(batch.info, step=9)))
    torch.testing.assert_close(late["loss"], (risk + 4 * penalty) / 4)  # divided by a weight above 1


# ---- CORAL -----------------------------------------------------------------------------------------------------------


def test_moments_are_compared_by_hand():
    first, second = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 3.0]])
    # Means (1, 0) and (1, 2); covariances diag(2, 0) and diag(0, 2).
    assert float(moment_distance(first, second)) == pytest.approx((0 + 4) / 2 + (4 + 4) / 4)
    assert float(moment_distance(first, first)) == 0


def test_coral_compares_every_pair_of_environments_with_two_images_or_more():
    method = CoralClassifier(load_backbone("random:nano", classes=2, seed=0), torch.tensor([0, 1, 2]), weight=0.5)
    batch = train_batch([0, 0, 1, 1, 2, 0])
    tokens = method.vit.fc_norm(method.vit(batch.images).cls)
    losses = method(batch)
    torch.testing.assert_close(losses["penalty"], moment_distance(tokens[[0, 1, 5]], tokens[2:4]))
    torch.testing.assert_close(losses["loss"], losses["risk"] + 0.5 * losses["penalty"])
    assert float(method(train_batch([0, 0, 0, 1]))["penalty"].detach()) == 0  # nothing to compare


# ---- environments ----------------------------------------------------------------------------------------------------


def test_environments_are_the_attributes_of_the_groups(toy):
    rows = read_rows(toy)
    numbers, names = environments_of(rows)
    assert {(group.rpartition("/")[2], names[k]) for group, k in zip(rows.group_names, numbers, strict=True)} == {
        (name, name) for name in names
    }
    assert len(names) == 2


# ---- GEORGE ----------------------------------------------------------------------------------------------------------


def test_hardness_is_the_log_odds_of_the_true_class():
    logits = np.array([[1.0, 3.0, 0.0], [2.0, 0.0, 0.0]])
    found = hardness(Predictions.from_logits(["a", "b"], np.array([1, 2]), logits, ("x", "y", "z")))
    assert found == pytest.approx([3 - np.log(np.e + 1), 0 - np.log(np.e**2 + 1)], rel=1e-5)


def test_clusters_are_found_within_each_class_and_counted_by_silhouette():
    generator = np.random.default_rng(0)
    centres = np.repeat([-5.0, 5.0, 0.0, 10.0, 20.0], 40)
    labels = np.repeat([0, 0, 1, 1, 1], 40)
    clusters = clusters_by_class((centres + generator.normal(size=200))[:, None], labels, 5, seed=0)
    assert [len(set(clusters[40 * k : 40 * k + 40])) for k in range(5)] == [1] * 5
    assert sorted({*clusters[:80]}) == [0, 1]
    assert sorted({*clusters[80:]}) == [5, 6, 7]


def test_principal_components_have_unit_variance():
    values = np.random.default_rng(0).normal(size=(50, 6)) * [9, 5, 1, 1, 1, 1]
    found = principal_components(values, 2)
    assert found.std(axis=0) == pytest.approx([1, 1])
    assert abs(np.corrcoef(found[:, 0], values[:, 0])[0, 1]) > 0.95


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Irm, Coral, George])
def test_from_the_command_line_to_the_same_predictions_and_resumed_with_the_same_bits(kind, toy, tmp_path):
    more = {"first_epochs": 1} if kind is George else {}
    flags = [word for name, value in (TOLD | more).items() for word in (f"--{name}", str(value))]
    code, out, err = typed("train", kind.method, toy, "--out", tmp_path / "whole", *flags)
    assert code == 0, err
    assert ("trained with group labels" in out) is kind.needs_groups
    told = TOLD | {"save_minutes": 0.0} | more
    with pytest.raises(Stop), stopped_after(1 if kind is not George else 4):  # three of which train the first model
        train(kind(toy, out=tmp_path / "stopped", **told))
    train(kind(toy, out=tmp_path / "stopped", resume=True, **told))
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")
    model = load(tmp_path / "whole")
    with (tmp_path / "whole" / "predictions" / "test.csv").open(newline="") as file:
        line = next(csv.DictReader(file))
    assert model.predict(toy / line["image"]).name == line["predicted"]


def test_george_needs_no_groups_and_keeps_its_clusters(toy, tmp_path):
    with (toy / "rows.csv").open(newline="") as file:
        lines = [{key: line[key] for key in ("image", "label", "split")} for line in csv.DictReader(file)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(line | {"image": str(toy / line["image"])} for line in lines)
    told = TOLD | {"epochs": 1}
    run = train(George(tmp_path / "rows.csv", out=tmp_path / "run", first_epochs=1, clustered="features", **told))
    with (run / "clusters.csv").open(newline="") as file:
        clusters = list(csv.DictReader(file))
    counts = json.loads((run / "run.json").read_text())["first"]["images_by_cluster"]
    assert [sum(int(line["cluster"]) == k for line in clusters) for k in range(len(counts))] == counts
    assert len(clusters) == 96
    assert {line["cluster"] for line in clusters if line["label"] == "duck"}.isdisjoint(
        {line["cluster"] for line in clusters if line["label"] == "stork"}
    )


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        (Irm, {"penalty": -1.0}, "--penalty -1.0: must not be negative"),
        (Irm, {"ramp": 2.0}, "--ramp 2.0: must lie between 0 and 1"),
        (Coral, {"grad_accum": 2}, "coral weights the images of a whole batch"),
        (George, {"most_clusters": 1}, "--most-clusters 1: must be at least 2"),
    ],
)
def test_invalid_settings_are_errors(kind, changes, complaint, toy, tmp_path):
    with pytest.raises(UserError, match=complaint):
        train(kind(toy, out=tmp_path / "run", **TOLD | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Irm, Coral])
def test_two_processes_train_like_one(kind, toy, tmp_path):
    one = train(kind(toy, out=tmp_path / "one", **TOLD))
    in_two_processes(kind(toy, out=tmp_path / "two", **TOLD))
    for mine, theirs in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    weights = [load_file(run / "last.safetensors") for run in (one, tmp_path / "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)
