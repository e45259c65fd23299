"""`--tracker`: the tracker has all values of the log."""

import json
import os
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from sightline.datasets.toy import write_toy

from ..commands import SMALL, typed
from ..small_runs import in_processes


def test_tensorboard_has_every_logged_value_at_its_epoch(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    toy = write_toy(tmp_path / "toy", train=32, val=16, test=8)
    run = tmp_path / "run"
    code, _, err = typed("train", "erm", toy, *SMALL, "--epochs", 2, "--out", run, "--tracker", "tensorboard")
    assert code == 0, err
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in logged] == [1, 2]
    board = accumulators.EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(logged[0])
    assert {"loss", "balanced", "accuracy", "lr"} <= set(logged[0])
    for name in logged[0]:
        events = board.Scalars(name)
        assert [event.step for event in events] == [1, 2]
        assert [event.value for event in events] == pytest.approx([line[name] for line in logged], rel=1e-6)


def test_without_the_flag_there_is_no_tensorboard_folder(tmp_path):
    toy = write_toy(tmp_path / "toy", train=32, val=16, test=8)
    assert typed("train", "erm", toy, *SMALL, "--epochs", 1, "--out", tmp_path / "run")[0] == 0
    assert not (tmp_path / "run" / "tensorboard").exists()


def use_trackio_folder(folder: Path) -> None:
    os.environ["TRACKIO_DIR"] = str(folder)  # read once, when trackio is imported


def test_trackio_has_every_logged_value_in_its_own_database(tmp_path):
    pytest.importorskip("trackio", reason="needs trackio: pip install 'sightline[trackio]'")
    toy, run = write_toy(tmp_path / "toy", train=32, val=16, test=8), tmp_path / "run"
    arguments = ("train", "erm", toy, *SMALL, "--epochs", 2, "--out", run, "--tracker", "trackio")
    codes, errors = in_processes(1, *arguments, prepare=partial(use_trackio_folder, tmp_path / "trackio"))
    assert codes == [0], errors
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        stored = [json.loads(text) for (text,) in opened.execute("SELECT metrics FROM metrics ORDER BY step")]
    assert [line["loss"] for line in stored] == pytest.approx([line["loss"] for line in logged])
