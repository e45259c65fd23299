"""The loop: what it learns, and that nothing but the question decides what comes out."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.config import Erm, Probe
from sightline.data.toyset import write_toy
from sightline.errors import UserError
from sightline.load import load
from sightline.train import cosine, train


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A small data set on disk: 64 pixels, the shortcut right nine times out of ten."""
    return write_toy(tmp_path_factory.mktemp("toy"), train=96, val=32, test=48)


def small(toy: Path, out: Path, **changes) -> Erm:
    settings = {"backbone": "random:nano", "epochs": 3, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
    return Erm(data=toy, out=out, **settings | changes)


def command_line(toy: Path, out: Path, *more: str) -> list[str]:
    """The same as `small`, as a user types it."""
    command = ["train", "erm", str(toy), "--out", str(out), "--backbone", "random:nano", "--batch", "32"]
    return [*command, "--lr", "3e-4", "--workers", "0", "--device", "cpu", *more]


def files(folder: Path) -> dict[str, bytes]:
    """What a run is judged by: weights, log, answers and figures."""
    names = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv", "metrics.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_a_run_folder_remembers_everything(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run"))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["method"] == "erm"
    assert facts["config"]["epochs"] == 3
    assert facts["state"] == "finished"
    assert facts["selection"] == {"metric": "balanced", "on": "val"}
    assert facts["data"]["counts"]["test"].keys() == set(facts["data"]["group_names"])
    assert {"torch", "sightline"} <= facts["versions"].keys()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[-1]["loss"] < log[0]["loss"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["selected_by"] == "balanced"
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 48
    model = load(folder)
    prediction = model.predict(toy / answers[0]["image"])
    assert model.classes[prediction.labels.item()] == answers[0]["predicted"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(toy, tmp_path):
    one, two = (files(train(small(toy, tmp_path / name))) for name in ("one", "two"))
    assert one == two
    other = files(train(small(toy, tmp_path / "three", seed=1)))
    assert other["best.safetensors"] != one["best.safetensors"]


def test_caches_and_workers_change_nothing(toy, tmp_path):
    plain = files(train(small(toy, tmp_path / "plain", epochs=2)))
    cached = files(train(small(toy, tmp_path / "cached", epochs=2, cache=tmp_path / "cache", workers=1)))
    assert plain == cached


def test_it_is_the_best_epoch_on_validation_data_that_is_kept(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=4))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    best = max(line["balanced"] for line in log)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(best, abs=1e-9)


class Stop(Exception):
    pass


@pytest.mark.parametrize("changes", [{}, {"average": 0.9, "accumulate": 2, "balance": "classes"}], ids=["plain", "all"])
@pytest.mark.parametrize("after", [2, 4, 7])
def test_an_interrupted_run_ends_with_the_same_bits(toy, tmp_path, monkeypatch, after, changes):
    """Stopped in the middle of an epoch (3 steps each), with a checkpoint after every step."""
    whole = files(train(small(toy, tmp_path / "whole", **changes)))
    import sightline.train  # noqa: F401

    module = sys.modules["sightline.train"]
    steps, real = [], module.take_step

    def interrupted(*arguments):
        if len(steps) == after:
            raise Stop
        steps.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "take_step", interrupted)
    config = small(toy, tmp_path / "broken", save_minutes=0.0, **changes)
    with pytest.raises(Stop):
        train(config)
    monkeypatch.setattr(module, "take_step", real)
    resumed = files(train(replace(config, save_minutes=10.0, resume=True)))
    assert [name for name in whole if resumed[name] != whole[name]] == []


@pytest.mark.slow
def test_kill_9_at_any_moment_and_resume(toy, tmp_path):
    whole = files(train(small(toy, tmp_path / "whole", epochs=6)))
    command = command_line(toy, tmp_path / "killed", "--epochs", "6", "--resume", "--save-minutes", "0.001")
    command = [sys.executable, "-m", "sightline", *command]
    kills = 0
    for wait in (0.1, 0.6, 0.3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started = time.monotonic()
        while not (tmp_path / "killed" / "last.safetensors").exists() and time.monotonic() - started < 120:
            time.sleep(0.02)
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills, "it must have been killed at least once"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killed = files(tmp_path / "killed")
    assert [name for name in whole if killed[name] != whole[name]] == []


@pytest.mark.slow
def test_two_processes_do_what_one_does(toy, tmp_path):
    one = train(small(toy, tmp_path / "one", epochs=2))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517", "-m", "sightline"]
    launch = [sys.executable, *launcher, *command_line(toy, tmp_path / "two", "--epochs", "2")]
    result = subprocess.run(launch, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    two = tmp_path / "two"
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (one, two)]
    for mine, theirs in zip(*logs, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["balanced"] == pytest.approx(theirs["balanced"], abs=0.04)
    weights = [load_file(run / "last.safetensors") for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)


def test_accumulation_computes_the_same_step(toy, tmp_path):
    whole = train(small(toy, tmp_path / "whole", epochs=1))
    parts = train(small(toy, tmp_path / "parts", epochs=1, accumulate=4))
    losses = [json.loads((run / "log.jsonl").read_text())["loss"] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_frozen_backbone_stays_as_it_was(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", frozen=True, epochs=1))
    from sightline.weights import load_backbone

    before = load_backbone("random:nano", classes=2, seed=0).state_dict()
    after = load(folder).method.vit.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def test_early_stopping(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=30, patience=2, lr=0.0))
    assert len((folder / "log.jsonl").read_text().splitlines()) == 3


def test_the_schedule_is_the_papers():
    assert cosine(0, 90) == 1.0
    assert cosine(45, 90) == pytest.approx(0.5)
    assert cosine(89, 90) == pytest.approx(0.5 * (1 + np.cos(np.pi * 89 / 90)))


def test_probe_plain_and_tuned(toy, tmp_path):
    for plain in (True, False):
        config = Probe(
            data=toy, out=tmp_path / f"plain-{plain}", backbone="random:nano", workers=0, device="cpu", plain=plain,
            cache=tmp_path / "features",
        )  # fmt: skip
        folder = train(config)
        line = json.loads((folder / "log.jsonl").read_text())
        assert line["standardized"] is not plain
        assert (line["c"] == 1.0) or not plain
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(line["balanced"], abs=0.02)
    assert len(list((tmp_path / "features").glob("features-*.safetensors"))) == 2, "computed once for both"


def test_a_changed_data_set_is_noticed(toy, tmp_path):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(toy, data)
    train(small(data, tmp_path / "run", epochs=1))
    (data / "train" / "00000.png").write_bytes((data / "train" / "00001.png").read_bytes() + b"x")
    with pytest.raises(UserError, match="the data have changed since this run began"):
        train(small(data, tmp_path / "run", epochs=1, resume=True))


def test_other_settings_are_not_mixed_into_a_run(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match="there is a run already"):
        train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match=r"begun with other settings \(epochs: 1 became 2\)"):
        train(small(toy, tmp_path / "run", epochs=2, resume=True))


def test_a_full_disk_loses_nothing(toy, tmp_path):
    """With a limit on file size the checkpoint cannot be written: one clear line, and no half file."""
    code = (
        "import resource, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); sys.argv = sys.argv[1:]; "
        "from sightline.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "sightline", *command_line(toy, tmp_path / "run", "--epochs", "1")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr.splitlines()[-1]
    assert not list((tmp_path / "run").glob("*.partial"))
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_loss_that_is_no_number_stops_with_a_remedy(toy, tmp_path, monkeypatch):
    from sightline.methods.erm import Classifier

    broken = lambda self, lesson: {"loss": self.vit(lesson.images).logits.sum() * torch.nan}  # noqa: E731
    monkeypatch.setattr(Classifier, "forward", broken)
    with pytest.raises(UserError, match="lower --lr"):
        train(small(toy, tmp_path / "run", epochs=1))


def test_nothing_is_written_outside_the_run_folder(toy, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob("*")}
    train(small(toy, tmp_path / "run", epochs=1))
    assert {p: p.stat().st_mtime_ns for p in toy.rglob("*")} == before
