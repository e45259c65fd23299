"""What is left to the machine: precision, data-loading processes, and the micro-batches that fit into memory."""

import json

import pytest
import torch

from sightline.config import Cvar, Erm, Ifam
from sightline.config.machine import MOST_WORKERS, available_cores, default_workers
from sightline.data import memory
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.train import train
from sightline.training import distributed, machine
from sightline.training.checkpoint import load_tensors
from sightline.training.distributed import make_accelerator


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("toy"), train=32, val=16, test=16, size=32)


def small(toy, out, kind=Erm, **changes):
    settings = {"backbone": "random:nano", "epochs": 1, "batch": 16, "workers": 0, "device": "cpu", "augment": "none"}
    return kind(toy, out=out, **settings | changes)


def loss_of(folder) -> float:
    return json.loads((folder / "log.jsonl").read_text().splitlines()[0])["loss"]


def micro_batches(folder) -> int:
    return load_tensors(folder / "last.safetensors")[1]["micro_batches"]


def with_free(monkeypatch, size: float) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda _: size)


@pytest.fixture
def measured(monkeypatch):
    """Bytes per image, and images per batch, of every measurement."""
    found, step_bytes = [], machine.step_bytes

    def measure(model, batch, config):
        found.append((step_bytes(model, batch, config), len(batch.labels), model, batch, config))
        return found[-1][0]

    monkeypatch.setattr(machine, "step_bytes", measure)
    return found


def test_two_images_tell_what_a_whole_batch_takes(toy, tmp_path, measured, monkeypatch):
    train(small(toy, tmp_path / "run"))
    (each, images, model, batch, config), *others = measured
    assert not others, "measured once, before the first step"
    monkeypatch.undo()
    monkeypatch.setattr(machine, "TRIED", images)
    assert machine.step_bytes(model.train(), batch, config) == pytest.approx(each, rel=0.02)


def test_a_batch_that_does_not_fit_is_split_and_the_loss_stays(toy, tmp_path, measured, monkeypatch, capsys):
    whole = train(small(toy, tmp_path / "whole"))
    assert micro_batches(whole) == 1
    assert "batch 16, about " in capsys.readouterr().err
    (each, images, model, *_) = measured[0]
    room = machine.optimizer_bytes(model) + each * images / 3  # a third of the batch fits: the next divisor is 4
    with_free(monkeypatch, room / machine.SHARE)
    split = train(small(toy, tmp_path / "split"))
    assert micro_batches(split) == 4
    assert "batch 16 in 4 micro-batches, about" in capsys.readouterr().err
    assert loss_of(split) == pytest.approx(loss_of(whole), rel=1e-4)


def test_measuring_changes_neither_weights_nor_random_numbers(toy, tmp_path, measured):
    open_run, given = (
        train(small(toy, tmp_path / name, augment="light", **settings))
        for name, settings in (("open", {}), ("given", {"grad_accum": 1}))
    )
    assert len(measured) == 1
    one, other = (load_tensors(folder / "best.safetensors")[0] for folder in (open_run, given))
    assert all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.parametrize(
    ("kind", "settings"), [(Cvar, {}), (Ifam, {"parts": 2, "sight": "patches", "baseline": False})]
)
def test_losses_over_a_whole_batch_are_never_split(toy, tmp_path, monkeypatch, capsys, kind, settings):
    with_free(monkeypatch, 1e3)
    folder = train(small(toy, tmp_path / "run", kind, **settings))
    assert micro_batches(folder) == 1
    warned = "A step may not fit into the memory: choose a smaller --batch than 16" in capsys.readouterr().err
    assert warned == (kind is Ifam)


def test_a_resumed_run_keeps_its_micro_batches(toy, tmp_path, monkeypatch):
    with_free(monkeypatch, 1e3)  # nothing fits: one image at a time
    folder = train(small(toy, tmp_path / "run", epochs=2))
    assert micro_batches(folder) == 16
    with_free(monkeypatch, 1e12)
    train(small(toy, folder, epochs=2, resume=True))
    assert micro_batches(folder) == 16


def test_bf16_is_chosen_where_the_gpu_computes_in_it_and_a_run_stays_with_it(toy, tmp_path, monkeypatch):
    folder = train(small(toy, tmp_path / "run"))
    assert json.loads((folder / "run.json").read_text())["precision"] == "fp32"
    assert make_accelerator("cpu", "auto").mixed_precision == "no"
    monkeypatch.setattr(distributed, "computes_in_bf16", lambda: True)
    assert make_accelerator("cpu", "auto").mixed_precision == "no"
    assert make_accelerator("auto", "auto").mixed_precision == "bf16"
    with pytest.raises(UserError, match="began in fp32, not bf16; continue it with --precision fp32"):
        train(small(toy, folder, resume=True, device="auto"))
    train(small(toy, folder, resume=True, device="auto", precision="fp32"))


def test_the_containers_limit_counts(tmp_path):
    assert memory.container_bytes(tmp_path) == float("inf")
    (tmp_path / "memory.current").write_text("300\n")
    for limit, free in (("max", float("inf")), ("1000", 700), ("nonsense", float("inf"))):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.container_bytes(tmp_path) == free
    assert memory.free_bytes(torch.device("cpu")) > 0


def test_one_data_loading_process_per_core_within_limits(toy):
    assert Erm(toy).workers == default_workers() == min(MOST_WORKERS, max(2, available_cores()))
