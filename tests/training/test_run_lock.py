"""One training at a time in a run folder; a run that is refused leaves nothing behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from sightline.errors import UserError
from sightline.train import train
from sightline.training import run_lock
from sightline.training.run_lock import lock_run, unlock_run

from ..small_runs import files, small, stopped_after

HOLD = (
    "import sys, time; from pathlib import Path; from sightline.training.run_lock import lock_run\n"
    "lock_run(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
)


def test_a_second_training_in_the_same_folder_is_refused(toy, tmp_path, whole):
    """It used to continue from the checkpoint of the first, and to report its result as its own."""
    config = small(toy, tmp_path / "run", save_minutes=0.0)

    def second():
        for other in (replace(config, seed=1), replace(config, resume=True)):
            with pytest.raises(UserError, match=rf"run: process {os.getpid()} is training in this folder"):
                train(other)
        signal.raise_signal(signal.SIGINT)

    with stopped_after(4, what=second), pytest.raises(KeyboardInterrupt):
        train(config)
    assert not (tmp_path / "run" / "lock").exists()
    with pytest.raises(UserError, match=r"contains a run with the same settings; continue it with --resume"):
        train(config)
    with pytest.raises(UserError, match=r"a run with other settings \(seed: 0 then, 1 now\); choose another --out"):
        train(replace(config, seed=1))
    assert files(train(replace(config, save_minutes=10.0, resume=True))) == whole


def test_the_lock_of_another_process_ends_with_it(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=rf"process {holder.pid} on \S+ is training in this folder; wait"):
            lock_run(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    assert (tmp_path / "lock").exists()
    lock_run(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()
    assert unlock_run(tmp_path)
    assert not unlock_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_a_line_says_what_to_take_care_of(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "lockf", unsupported)
    lock_run(tmp_path)
    unlock_run(tmp_path)
    assert "this file system has no locks, so make sure that no other training" in capsys.readouterr().err


def test_a_refused_run_leaves_nothing_behind(toy, tmp_path):
    with pytest.raises(UserError, match="no such file or backbone"):
        train(small(toy, tmp_path / "run", backbone="nowhere.safetensors"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files, or a damaged run; choose another --out"):
        train(small(toy, tmp_path / "mine"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
