"""Checkpoints and resuming: a run that is interrupted, killed or out of disk space ends with the same bits."""

import errno
import json
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sightline.errors import UserError
from sightline.methods.erm import Classifier
from sightline.train import train
from sightline.training.checkpoint import CheckpointTimer, load_tensors
from sightline.training.distributed import make_accelerator

from .small_runs import Stop, begun, command_line, files, in_processes, log_of, loop, small, stopped_after

ALL = {"ema": 0.9, "grad_accum": 2, "balance": "classes"}


@pytest.mark.parametrize(("whole", "changes"), [({}, {}), (ALL, ALL)], ids=["plain", "all"], indirect=["whole"])
@pytest.mark.parametrize("after", [2, 4, 7])
def test_an_interrupted_run_ends_with_the_same_bits(toy, tmp_path, after, whole, changes):
    """Stopped in the middle of an epoch (3 steps each), with a checkpoint after every step."""
    config = small(toy, tmp_path / "broken", save_minutes=0.0, **changes)
    with stopped_after(after), pytest.raises(Stop):
        train(config)
    resumed = files(train(replace(config, save_minutes=10.0, resume=True)))
    assert [name for name in whole if resumed[name] != whole[name]] == []


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_kill_9_at_any_moment_and_resume(toy, tmp_path):
    """Each time it has got further before it is killed, somewhere between one checkpoint and the next."""
    whole = files(train(small(toy, tmp_path / "whole", epochs=12)))
    arguments = ("--epochs", "12", "--resume", "--save-minutes", "0")
    command, errors = command_line(toy, tmp_path / "killed", *arguments), tmp_path / "errors"
    checkpoint = tmp_path / "killed" / "last.safetensors"
    for wait in (0.0, 0.03):
        before = modified(checkpoint)
        process = begun(*command, errors=errors)
        started = time.monotonic()
        while modified(checkpoint) == before and process.is_alive() and time.monotonic() - started < 120:
            time.sleep(0.002)
        time.sleep(wait)
        assert process.is_alive(), f"it ended before it was killed: {errors.read_text()}"
        process.kill()
        process.join()
        assert modified(checkpoint) != before
        assert not (tmp_path / "killed" / "metrics.json").exists()
    process = begun(*command, errors=errors)
    process.join()
    assert process.exitcode == 0, errors.read_text()
    killed = files(tmp_path / "killed")
    assert [name for name in whole if killed[name] != whole[name]] == []
    assert not list((tmp_path / "killed").glob("*.partial"))


def test_ctrl_c_saves_first_and_the_rest_is_the_same(toy, tmp_path, whole):
    config = small(toy, tmp_path / "run")
    handler = signal.getsignal(signal.SIGINT)
    with stopped_after(4, what=lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        train(config)
    assert signal.getsignal(signal.SIGINT) is handler
    _, facts = load_tensors(tmp_path / "run" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 2), "the step that was being taken counts"
    assert files(train(replace(config, resume=True))) == whole


def test_patience_is_remembered_by_a_resumed_run(toy, tmp_path):
    config = small(toy, tmp_path / "run", epochs=30, patience=3, lr=0.0)
    with stopped_after(7), pytest.raises(Stop):
        train(config)
    folder = train(replace(config, resume=True))
    assert [line["epoch"] for line in log_of(folder)] == [1, 2, 3, 4]
    assert files(train(replace(config, resume=True))) == files(folder), "nothing is left to do"
    assert len(log_of(folder)) == 4


def saves_of(timer: CheckpointTimer, steps: int, epoch: int, monkeypatch, seconds: float = 1.0) -> list[int]:
    """The steps, of this many seconds, after which a checkpoint is saved; an epoch ends after every `epoch` steps."""
    timer.began = 1000.0  # of a whole number, sums of seconds are exact
    now, saves = [timer.began], []
    monkeypatch.setattr("sightline.training.checkpoint.time.monotonic", lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += seconds
        due = [timer.due(), step % epoch == 0 and timer.due_after_epoch()]
        saves += [step] if any(due) else []
    return saves


def test_checkpoints_are_saved_at_the_interval(monkeypatch):
    timer = CheckpointTimer(0.5, make_accelerator("cpu"))
    assert saves_of(timer, 100, 1000, monkeypatch) == [30, 60, 90]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_finished_epoch_waits_no_longer_than_20_seconds(monkeypatch, processes):
    monkeypatch.setattr("sightline.training.checkpoint.broadcast_object_list", lambda objects: objects)
    accelerator = SimpleNamespace(num_processes=processes)
    after_the_fifth_epoch = [20, 40, 60, 80, 100]
    assert saves_of(CheckpointTimer(10, accelerator), 100, 4, monkeypatch) == after_the_fifth_epoch
    assert saves_of(CheckpointTimer(10, accelerator), 70, 15, monkeypatch) == [20, 40, 60]  # in the next
    assert saves_of(CheckpointTimer(10, accelerator), 100, 30, monkeypatch) == [30, 60, 90]  # long epochs at once
    assert saves_of(CheckpointTimer(0.1, accelerator), 20, 8, monkeypatch) == [6, 12, 18]  # as often as asked for
    assert saves_of(CheckpointTimer(0, accelerator), 5, 2, monkeypatch) == [1, 2, 3, 4, 5]


def test_short_epochs_share_a_checkpoint_and_the_last_is_always_saved(toy, tmp_path, monkeypatch):
    saved, real = [], loop().save
    monkeypatch.setattr(loop(), "save", lambda state: (saved.append(state.position.epoch), real(state)))
    train(small(toy, tmp_path / "run", epochs=4))
    train(small(toy, tmp_path / "patient", epochs=9, patience=2, lr=0.0))
    assert saved == [4, 3]


def test_work_lost_in_a_kill_is_repeated_from_the_checkpoint_and_its_best_weights(toy, tmp_path, monkeypatch):
    """Saved after the first epoch, better in the second, killed in the third."""
    monkeypatch.setattr(Classifier, "validate", lambda self, *_: {"balanced": -self.vit.head.weight.norm().item()})
    whole = files(train(small(toy, tmp_path / "whole", size=64)))
    monkeypatch.setattr(
        CheckpointTimer, "due_after_epoch", lambda _: not (tmp_path / "run" / "last.safetensors").exists()
    )
    config = small(toy, tmp_path / "run", size=64)
    with stopped_after(7), pytest.raises(Stop):
        train(config)
    facts = {name: load_tensors(tmp_path / "run" / f"{name}.safetensors")[1] for name in ("best", "last")}
    assert facts["best"]["epoch"] == facts["last"]["best_epoch"] == facts["last"]["epoch"] == 1
    assert [line["epoch"] for line in log_of(tmp_path / "run")] == [1, 2]
    assert log_of(tmp_path / "run")[1]["balanced"] > facts["best"]["score"]
    assert files(train(replace(config, resume=True))) == whole


def test_ctrl_c_while_validating_saves_the_epoch(toy, tmp_path, whole, monkeypatch):
    real = Classifier.validate

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        return real(self, *arguments)

    monkeypatch.setattr(Classifier, "validate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(small(toy, tmp_path / "run"))
    monkeypatch.setattr(Classifier, "validate", real)
    _, facts = load_tensors(tmp_path / "run" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 0)
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert files(train(small(toy, tmp_path / "run", resume=True))) == whole


def test_save_minutes_0_saves_every_step(toy, tmp_path, monkeypatch):
    saved, real = [], loop().save
    monkeypatch.setattr(loop(), "save", lambda state: (saved.append(state.position.step), real(state)))
    train(small(toy, tmp_path / "run", epochs=1, save_minutes=0.0))
    assert saved == [1, 2, 3, 0]


def test_weights_of_a_diverged_loss_are_never_saved(toy, tmp_path, monkeypatch):
    whole, calls = Classifier.forward, []

    def breaks(self, batch):
        calls.append(1)
        losses = whole(self, batch)
        return {"loss": losses["loss"] * (torch.nan if len(calls) == 3 else 1)}

    monkeypatch.setattr(Classifier, "forward", breaks)
    with pytest.raises(UserError, match="lower --lr"):
        train(small(toy, tmp_path / "run", save_minutes=0.0, grad_accum=1))
    tensors, facts = load_tensors(tmp_path / "run" / "last.safetensors")
    assert facts["step"] == 2
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_best_checkpoint_survives_a_diverged_loss(toy, tmp_path, monkeypatch):
    whole, calls = Classifier.forward, []

    def breaks(self, batch):
        calls.append(1)
        return {"loss": whole(self, batch)["loss"] * (torch.nan if len(calls) == 5 else 1)}

    monkeypatch.setattr(Classifier, "forward", breaks)
    with pytest.raises(UserError, match="in epoch 2; train again with a lower --lr"):
        train(small(toy, tmp_path / "run", grad_accum=1))
    tensors, facts = load_tensors(tmp_path / "run" / "best.safetensors")
    assert facts["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_other_versions_on_resuming_are_recorded(toy, tmp_path, monkeypatch):
    train(small(toy, tmp_path / "run", epochs=1))
    from sightline.training import run_folder as runs

    monkeypatch.setattr(runs, "versions", lambda: {"torch": "99"})
    folder = train(small(toy, tmp_path / "run", epochs=1, resume=True))
    assert json.loads((folder / "run.json").read_text())["resumed_with"] == [{"torch": "99"}]


def test_a_run_is_not_resumed_on_changed_data(toy, tmp_path):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(toy, data)
    train(small(data, tmp_path / "run", epochs=1))
    (data / "train" / "00000.png").write_bytes((data / "train" / "00001.png").read_bytes() + b"x")
    with pytest.raises(UserError, match="the data have changed since this run began"):
        train(small(data, tmp_path / "run", epochs=1, resume=True))


@pytest.mark.parametrize("content", [None, b""])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_images_are_reported_before_training(toy, tmp_path, split, content):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(toy, data)
    lines = (data / "rows.csv").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if f"{split}/00003.png" in text)
    (data / split / "00003.png").unlink()
    if content is not None:
        (data / split / "00003.png").write_bytes(content)
    with pytest.raises(
        UserError, match=rf"rows\.csv:{line}: {split}/00003\.png is missing or empty; run `sightline ch"
    ):
        train(small(data, tmp_path / "run", epochs=1))
    (data / split / "00005.png").unlink()
    with pytest.raises(UserError, match="one of 2 such images"):
        train(small(data, tmp_path / "run", epochs=1))
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_other_settings(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match="contains a finished run with the same settings; continue it with --resume"):
        train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(
        UserError, match=r"contains a run with other settings \(epochs: 1 then, 2 now\); choose another"
    ):
        train(small(toy, tmp_path / "run", epochs=2))
    with pytest.raises(UserError, match=r"began with other settings \(epochs: 1 then, 2 now\)"):
        train(small(toy, tmp_path / "run", epochs=2, resume=True))


def fill_the_disk() -> None:
    """As a limit on the size of files."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_full_disk_is_one_clear_line_and_no_half_file(toy, tmp_path):
    codes, errors = in_processes(1, *command_line(toy, tmp_path / "run", "--epochs", "1"), prepare=fill_the_disk)
    assert codes == [2], errors
    assert "cannot be written" in errors.splitlines()[-1]
    assert not list((tmp_path / "run").glob("*.partial"))
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_disk_that_fills_up_later_leaves_the_checkpoint_intact(toy, tmp_path, whole):
    config = small(toy, tmp_path / "run", save_minutes=0.0)
    with stopped_after(4), pytest.raises(Stop):
        train(config)
    kept = (tmp_path / "run" / "last.safetensors").read_bytes()
    command = command_line(toy, tmp_path / "run", "--epochs", "3", "--resume", "--save-minutes", "0")
    codes, errors = in_processes(1, *command, prepare=fill_the_disk)
    assert codes == [2], errors
    assert "continue with --resume" in errors.splitlines()[-1]
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == kept
    assert not list((tmp_path / "run").glob("*.partial"))
    assert files(train(replace(config, resume=True))) == whole


def test_an_unwritable_folder_is_a_user_error(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        train(small(toy, tmp_path / "file" / "run", epochs=1))

    def read_only(self, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", read_only)
    with pytest.raises(UserError, match="Read-only file system"):
        train(small(toy, tmp_path / "run", epochs=1))
    assert not list((tmp_path / "run").glob("*.partial"))


def test_a_run_killed_before_anything_was_written_can_start_again(toy, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.123.partial").write_text("{")
    folder = train(small(toy, tmp_path / "run", epochs=1))
    assert not list(folder.glob("*.partial"))
