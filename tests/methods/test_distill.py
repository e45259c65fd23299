"""A small selector taught by a trained run: a run like any other, at a fraction of the cost."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sightline.config import Distill, Erm, Ifam
from sightline.errors import UserError
from sightline.load import load_as_trained
from sightline.methods.distill import distill, divergence
from sightline.methods.distill import run_command as distil_and_print
from sightline.methods.ifam import IFam
from sightline.train import train
from sightline.training.run_folder import read_run
from sightline.verify.verify import verify

from ..small_runs import log_of

BRIEF = {"backbone": "sightline-nano", "size": 32, "epochs": 1, "batch": 32, "workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory) -> Path:
    return train(Ifam(toy, out=tmp_path_factory.mktemp("taught") / "run", parts=2, **BRIEF))


@pytest.fixture(scope="module")
def command(run) -> Distill:
    return Distill(run, blocks=2, epochs=3, batch=16, workers=0, device="cpu")


@pytest.fixture(scope="module")
def student(command) -> Path:
    return distill(command)


def test_it_becomes_like_its_teacher(student):
    losses = [line["distillation"] for line in log_of(student)]
    assert losses[-1] < losses[0]
    assert read_run(student).facts["distilled"]["sight_iou"] > 0.5


def test_the_student_is_small_and_stage_2_is_the_teachers(run, student):
    before, after = (load_as_trained(folder).method for folder in (run, student))
    assert (len(before.where.vit.blocks), len(after.where.vit.blocks)) == (4, 2)
    for name, tensor in before.what.state_dict().items():
        assert torch.equal(tensor, after.what.state_dict()[name]), name
    found = read_run(student).facts["distilled"]
    assert (found["run"], found["on"]) == ("run", "val")
    assert found["after"]["gflops"] < 0.8 * found["before"]["gflops"]
    assert found["before"].keys() == found["after"].keys() == {"accuracy", "balanced", "gflops"}


def test_it_is_a_run_like_any_other(student):
    model = load_as_trained(student)
    assert type(model.method) is IFam, "so it is evaluated, corrected and exported like any other"
    assert model.run.facts["method"] == "ifam"
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sight = model.method.look_at(images, torch.arange(32).expand(3, 32, 32) < 16)
    assert verify(model.method, images, sight, draws=1).verdict == "blind"


def test_it_may_look_at_smaller_images(command, tmp_path, capsys):
    small = replace(command, out=tmp_path / "small", selector_size=32, epochs=1)
    assert distil_and_print(small) == 0
    assert "Validation accuracy" in (said := capsys.readouterr().out)
    assert "of both selectors" in said
    assert load_as_trained(tmp_path / "small").method.where.size == 32


def test_the_divergence_is_zero_for_the_same_maps_only(generator):
    scores = torch.randn(2, 3, 4, 4, generator=generator)
    assert divergence(scores.softmax(dim=1), scores) == pytest.approx(0, abs=1e-6)
    assert divergence(scores.softmax(dim=1), scores + torch.tensor([1.0, 0, 0])[:, None, None]) > 0.01
    certain = torch.tensor([1.0, 0, 0])[:, None, None].expand(1, 3, 2, 2)
    assert float(divergence(certain, torch.zeros(1, 3, 2, 2))) == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"blocks": 7}, "--blocks 7: the selector of .* has 4"),
        ({"selector_size": 50}, "--selector-size 50: .* such as 48"),
        ({"run": Path("nowhere")}, "not a run folder"),
    ],
)
def test_what_cannot_be_distilled_is_explained(command, changes, complaint, tmp_path):
    with pytest.raises(UserError, match=complaint):
        distill(replace(command, out=tmp_path / "new", **changes))


def test_only_ifam_can_be_distilled(toy, tmp_path):
    erm = train(Erm(toy, out=tmp_path / "erm", **BRIEF))
    with pytest.raises(UserError, match="a erm run; only iFAM"):
        distill(Distill(erm))
