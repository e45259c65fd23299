"""GroupDRO, CVaR-DRO, LfF and JTT: their weights by hand, and from the command line to predictions."""

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sightline.config import Cvar, Groupdro, Jtt, Lff
from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.reweighed import CvarDro, GroupDro, JttClassifier, LfF
from sightline.train import train
from sightline.training.trainable import StepInfo, TrainBatch
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone

from ..commands import typed
from ..small_runs import Stop, files, in_two_processes, log_of, stopped_after

SETTINGS = {"backbone": "random:nano", "size": 32, "epochs": 2, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
KINDS = (Groupdro, Cvar, Lff, Jtt)


def tiny() -> ViT:
    return load_backbone("random:nano", classes=2, seed=0)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_groups_with_high_loss_gain_weight_from_step_to_step():
    method = GroupDro(tiny(), torch.tensor([9.0, 3, 3, 1]), step_size=0.01)
    losses, groups = torch.tensor([0.1, 0.3, 1.5, 0.7]), torch.tensor([0, 0, 1, 2])  # and none of group 3
    weights = method.image_weights(losses, groups)
    assert method.shares.tolist() == pytest.approx([0.248998, 0.252256, 0.250246, 0.2485], abs=1e-6)
    assert float(weights @ losses) == pytest.approx(0.603356, abs=1e-6)
    before = method.shares.clone()
    method.image_weights(losses, groups)
    assert method.shares[1] > before[1] > 0.25


def test_small_groups_are_adjusted_for_and_absent_ones_have_no_weight():
    method = GroupDro(tiny(), torch.tensor([100.0, 4, 0]), step_size=1.0, adjustment=2.0)
    method.image_weights(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
    assert float(method.shares[1] / method.shares[0]) == pytest.approx(np.exp(2 / 2 - 2 / 10), rel=1e-5)
    assert method.shares[2] == 0


def test_the_last_image_of_the_worst_fraction_counts_in_part():
    losses = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3])
    weights = CvarDro(tiny(), worst_fraction=0.5).image_weights(losses, losses)
    assert weights.tolist() == pytest.approx([0, 0.4, 0.2, 0.4, 0])
    assert CvarDro(tiny(), worst_fraction=1.0).image_weights(losses, losses).tolist() == pytest.approx([0.2] * 5)


def train_batch(count: int = 6) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    when = StepInfo(0, 0, 0, 1, 1, torch.arange(count))
    images, labels = torch.rand(count, 3, 32, 32, generator=generator), torch.arange(count) % 2
    return TrainBatch(images, labels, None, None, torch.arange(count) + 3, when)


def test_relative_difficulty_uses_an_ema_per_class():
    method, some = LfF(tiny(), 10, loss_ema=0.5), train_batch(4)
    theirs, ours = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1.0, 1.0, 1.0, 4.0])
    found = method.relative_difficulty(some, theirs, ours)  # classes 0 1 0 1, whose largest are 4, 8 and 1, 4
    expected = [0.25 / 1.25, 0.25 / 0.5, 1 / 2, 1 / 2]
    assert found.tolist() == pytest.approx(expected)
    assert method.recent[0].tolist() == pytest.approx([0, 0, 0, 0.5, 1, 2, 4, 0, 0, 0])
    method.relative_difficulty(some, theirs, ours)
    assert method.recent[0, 3:7].tolist() == pytest.approx([0.75, 1.5, 3, 6])


def test_the_biased_network_learns_by_generalised_cross_entropy_and_the_other_from_its_failures():
    method, some = LfF(tiny(), 10, gce_q=0.7).double(), train_batch()
    some = TrainBatch(some.images.double(), *list(vars(some).values())[1:])
    method(some)["loss"].backward()
    got = method.biased.head.weight.grad.clone()
    assert method.vit.head.weight.grad.abs().sum() > 0
    method.zero_grad()
    sure = method.biased(some.images).logits.softmax(1)[torch.arange(6), some.labels]
    ((1 - sure**0.7) / 0.7).mean().mul(0.7).backward()
    torch.testing.assert_close(got, method.biased.head.weight.grad)


def test_predictions_are_those_of_the_network_that_learns_from_the_failures_of_the_other():
    """With two networks that differ: weighted cross-entropy for the first, generalised cross-entropy for the biased."""
    method, some = LfF(tiny(), 10, gce_q=0.7, loss_ema=0.5), train_batch()
    with torch.no_grad():
        method.vit.head.bias.copy_(torch.tensor([2.0, -2.0]))
        method.biased.head.bias.copy_(torch.tensor([-1.0, 1.0]))
    own, biased = (F.cross_entropy(vit(some.images).logits, some.labels, reduction="none")
                   for vit in (method.vit, method.biased))  # fmt: skip
    weights = method.relative_difficulty(some, biased.detach(), own.detach())
    method.recent.zero_()
    assert weights.std() > 0.01
    expected = (weights * own).mean() + (0.7 * (-biased.detach()).exp() ** 0.7 * biased).mean()
    names = ("vit.head.weight", "biased.head.weight", "vit.blocks.0.mlp.fc1.weight", "biased.blocks.0.mlp.fc1.weight")
    parameters = [dict(method.named_parameters())[name] for name in names]
    found = torch.autograd.grad(method(some)["loss"], parameters)
    torch.testing.assert_close(found, torch.autograd.grad(expected, parameters))
    torch.testing.assert_close(
        method.judge(some.images, method.look(some.images)).logits, method.vit(some.images).logits
    )


def test_misclassified_images_are_upweighted(toy):
    rows = read_rows(toy)
    failed = rows.split_indices("train")[[1, 4]]
    method = JttClassifier(tiny(), Jtt(toy, upweight=3))
    method.misclassified = failed
    seen = method.train_indices(rows)
    counts = np.bincount(seen, minlength=len(rows))
    assert set(counts[rows.split_indices("train")]) == {1, 4}
    assert np.flatnonzero(counts == 4).tolist() == failed.tolist()


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_command_line_to_the_same_predictions_and_resumed_with_the_same_bits(kind, toy, tmp_path):
    more = {"upweight": 2} if kind is Jtt else {}
    flags = [word for name, value in (SETTINGS | more).items() for word in (f"--{name}", str(value))]
    code, out, err = typed("train", kind.method, toy, "--out", tmp_path / "whole", *flags)
    assert code == 0, err
    assert "trained with group labels" in out or kind is not Groupdro
    settings = SETTINGS | {"save_minutes": 0.0} | more
    steps = 1 if kind is not Jtt else 4  # three of which are the first training's
    with pytest.raises(Stop), stopped_after(steps):
        train(kind(toy, out=tmp_path / "stopped", **settings))
    train(kind(toy, out=tmp_path / "stopped", resume=True, **settings))
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")
    model = load(tmp_path / "whole")
    with (tmp_path / "whole" / "predictions" / "test.csv").open(newline="") as file:
        line = next(csv.DictReader(file))
    assert model.predict(toy / line["image"]).name == line["predicted"]


def test_jtt_keeps_the_first_run_and_its_errors(toy, tmp_path):
    run = train(Jtt(toy, out=tmp_path / "run", upweight=2, **SETTINGS))
    facts = json.loads((run / "run.json").read_text())["first"]
    with (run / "first" / "predictions" / "train.csv").open(newline="") as file:
        wrong = [line["group"] for line in csv.DictReader(file) if line["predicted"] != line["label"]]
    assert facts["failed"] == len(wrong) > 0
    assert {name: count for name, count in facts["failed_by_group"].items() if count} == {
        group: wrong.count(group) for group in set(wrong)
    }
    assert (len(log_of(run / "first")), len(log_of(run))) == (1, SETTINGS["epochs"])


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        (Groupdro, {"grad_accum": 2}, "groupdro weights the images of a whole batch"),
        (Groupdro, {"adjustment": -1.0}, "must not be negative"),
        (Cvar, {"worst_fraction": 0.0}, "--worst-fraction 0.0: must be above 0"),
        (Lff, {"loss_ema": 1.0}, "--loss-ema 1.0"),
        (Jtt, {"first_epochs": 0}, "--first-epochs 0: must be at least 1"),
    ],
)
def test_invalid_settings_are_errors(kind, changes, complaint, toy, tmp_path):
    with pytest.raises(UserError, match=complaint):
        train(kind(toy, out=tmp_path / "run", **SETTINGS | changes))


def test_groupdro_needs_groups_and_suggests_what_does_not(toy, tmp_path):
    with (toy / "rows.csv").open(newline="") as file:
        lines = [{key: line[key] for key in ("image", "label", "split")} for line in csv.DictReader(file)]
    for line in lines:
        line["image"] = str(toy / line["image"])
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(UserError, match=r"groupdro needs group labels, and the data have none; .* train erm"):
        train(Groupdro(tmp_path / "rows.csv", out=tmp_path / "run", **SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Groupdro, Lff, Jtt])
def test_two_processes_weight_like_one(kind, toy, tmp_path):
    settings = SETTINGS | ({"upweight": 2} if kind is Jtt else {})
    one = train(kind(toy, out=tmp_path / "one", **settings))
    in_two_processes(kind(toy, out=tmp_path / "two", **settings))
    for mine, theirs in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    weights = [load_file(run / "last.safetensors") for run in (one, tmp_path / "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)
