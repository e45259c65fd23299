"""iFAM in the loop: its run folders, going on after a stop, precision, several processes."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.config import Ifam, Shaping
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.base import check_part_config
from sightline.train import cosine_decay, set_learning_rate, train
from sightline.training.distributed import make_accelerator
from sightline.training.trainable import StepInfo
from sightline.vit.blocks import Block
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone, save_backbone
from sightline.where import parts as parts_file

from ..commands import QUICK, SMALL, typed
from ..small_runs import in_processes


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=16, val=8, test=8)


def small(toy: Path, out: Path, **changes) -> Ifam:
    settings = {"backbone": "random:nano", "epochs": 2, "batch": 8, "workers": 0, "device": "cpu", "lr": 1e-4}
    settings |= {"size": 32, "selector": "learned"}
    return Ifam(toy, out=out, **settings | {"head_lr_factor": 10.0, "prototype_lr_factor": 10.0} | changes)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_loaded_run_predicts_the_same(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", mask_dropout=0.1, registers=False, shaping=Shaping(concentration=0.5)))
    assert {"loss", "classification", "parts", "entropy", "concentration", "balanced"} <= log_of(folder)[0].keys()
    model = load(folder)
    assert model.method.settings.mask_dropout == 0.1
    assert model.method.settings.shaping.concentration == 0.5
    assert model.method.where.vit.config.registers == model.method.what.vit.config.registers == 0
    before = (folder / "predictions" / "test.csv").read_bytes()
    code, _, err = typed("evaluate", folder, *QUICK)
    assert code == 0, err
    assert (folder / "predictions" / "test.csv").read_bytes() == before


def test_the_selector_may_be_another_backbone(toy, tmp_path):
    """Also one with other patches: where to look and what is there share nothing but the image."""
    other = ViT(replace(load_backbone("random:nano").config, classes=0, patch=16, width=48, heads=3, depth=2))
    save_backbone(other, tmp_path / "other.safetensors")
    configured = small(toy, tmp_path / "run", where=str(tmp_path / "other.safetensors"), epochs=1)
    folder = train(configured)
    model = load(folder)
    assert model.method.where.vit.config.patch == 16
    assert model.method.what.vit.config.patch == 8
    before = (folder / "predictions" / "test.csv").read_bytes()
    code, _, err = typed("evaluate", folder, *QUICK)
    assert code == 0, err
    assert (folder / "predictions" / "test.csv").read_bytes() == before
    with pytest.raises(UserError, match="--where: the patches of two backbones"):
        train(replace(configured, out=tmp_path / "no", sight="patches"))


class Stop(Exception):
    pass


@pytest.mark.parametrize("preset", ["papers", "published"])
def test_an_interrupted_run_ends_with_the_same_bits(toy, tmp_path, monkeypatch, preset):
    def files(folder: Path) -> dict[str, bytes]:
        names = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv")
        return {name: (folder / name).read_bytes() for name in names}

    loop = importlib.import_module("sightline.train")
    whole = files(train(small(toy, tmp_path / "whole", preset=preset)))
    config, steps, real = small(toy, tmp_path / "broken", preset=preset, save_minutes=0.0), [], loop.train_step

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            raise Stop
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        with pytest.raises(Stop):
            train(config)
    resumed = files(train(replace(config, save_minutes=10.0, resume=True)))
    assert [name for name in whole if resumed[name] != whole[name]] == []


@pytest.mark.parametrize(
    "changes", [{}, {"preset": "published"}, {"soft_mask": True}], ids=["papers", "published", "soft"]
)
def test_bfloat16_trains(toy, tmp_path, changes):
    folder = train(small(toy, tmp_path / "run", epochs=1, precision="bf16", **changes))
    line = log_of(folder)[0]
    assert all(np.isfinite(value) for value in line.values())
    assert all(p.isfinite().all() for p in load(folder).method.parameters())


def test_pdiscoformer_on_the_command_line_leaks_and_ifam_does_not(toy, tmp_path):
    recipe = (*SMALL, "--batch", 8, "--epochs", 1, "--lr", 1e-4, "--head-lr-factor", 10, "--prototype-lr-factor", 10)
    learned = ("--selector", "learned")  # in features of a random backbone, clustering finds nothing
    for method, code, word, more in (("pdiscoformer", 1, "leaks", ()), ("ifam", 0, "blind", learned)):
        run = tmp_path / method
        assert typed("train", method, toy, *recipe, *more, "--out", run)[0] == 0
        found, out, err = typed("verify", run, toy / "test", "--draws", 1, "--limit", 4)
        assert (found, word in out) == (code, True), out + err


def test_gradient_accumulation_is_noted(toy, tmp_path, capsys):
    train(small(toy, tmp_path / "run", epochs=1, grad_accum=2))
    assert "every part in each micro-batch" in capsys.readouterr().out
    for quiet in ({}, {"grad_accum": 2, "shaping": Shaping(presence=0)}):
        check_part_config(small(toy, tmp_path / "other", **quiet), make_accelerator("cpu"))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parts": 0}, "--parts 0: must be at least 1"),
        ({"part_dropout": 1.0}, "--part-dropout 1.0"),
        ({"mask_dropout": -0.1}, "--mask-dropout -0.1"),
        (
            {"classify_parts": 0.0, "shaping": Shaping.none(), "mask_gradient": False},
            "No loss reaches the part selector",
        ),
    ],
)
def test_invalid_settings_are_errors(toy, tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        train(small(toy, tmp_path / "run", **wrong))


def test_the_learning_rate_warms_up_per_step_and_decays_per_epoch():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 2.0, "initial_lr": 2.0}])

    def rates(warmup: float) -> list[float]:
        found = []
        for epoch in range(4):
            for step in range(2):
                set_learning_rate(optimizer, StepInfo(0, epoch, step, 4, 2, torch.arange(0)), warmup)
                found.append(optimizer.param_groups[0]["lr"])
        return found

    cosines = [2 * cosine_decay(epoch, 4) for epoch in range(4) for _ in range(2)]
    assert rates(0.0) == cosines
    warmup_factor = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates(2.0) == pytest.approx([rate * share for rate, share in zip(cosines, warmup_factor, strict=True)])


def test_both_stages_are_compiled_and_keep_their_names(toy, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda self: compiled.append(self))
    folder = train(small(toy, tmp_path / "run", epochs=1, compile=True))
    assert len(compiled) == 2 * 6
    assert load(folder).method.what.vit.config.depth == 6


def test_a_model_compiled_for_training_predicts_uncompiled(toy, tmp_path, monkeypatch):
    """Every image hides another fraction, so that every batch would be compiled anew."""
    asked = []

    def final_evaluation(model, *_):
        asked.append([block._compiled_call_impl for block in model.modules() if isinstance(block, Block)])

    monkeypatch.setattr(Block, "compile", lambda self: setattr(self, "_compiled_call_impl", self._call_impl))
    monkeypatch.setattr(sys.modules["sightline.train"], "final_evaluation", final_evaluation)
    train(small(toy, tmp_path / "run", epochs=1, compile=True))
    assert asked == [[None] * 12]


def no_noise(shape, device="cpu", generator=None):
    return torch.zeros(*shape, device=device)


def without_noise() -> None:
    parts_file.gumbel_noise = no_noise


@pytest.mark.slow
def test_two_processes_equal_one_without_random_draws(toy, tmp_path, monkeypatch):
    """Noise and part dropout are drawn by every process for itself; without them the steps are the same."""
    monkeypatch.setattr(parts_file, "gumbel_noise", no_noise)
    one = train(small(toy, tmp_path / "one", part_dropout=0.0))
    flags = ("--batch", 8, "--epochs", 2, "--lr", 1e-4, "--head-lr-factor", 10, "--prototype-lr-factor", 10)
    flags += ("--part-dropout", 0, "--selector", "learned")
    command = ("train", "ifam", toy, "--out", tmp_path / "two", *SMALL, *flags)
    codes, errors = in_processes(2, *command, prepare=without_noise)
    assert codes == [0, 0], errors[-3000:]
    for mine, theirs in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        for name in ("loss", "classification", "parts", "presence", "equivariance", "background", "orthogonality"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name
