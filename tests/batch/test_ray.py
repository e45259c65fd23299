"""`--engine ray` on a local cluster, one of whose workers is killed: nothing lost, nothing twice, the same files."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

import sightline
from sightline.config import Predict
from sightline.errors import UserError

from ..commands import toy_pictures


def kill_a_worker_after_the_first_part(out: Path, killed: list[int]) -> None:
    while not any(out.glob("part-*.parquet")):
        time.sleep(0.02)
    for process in psutil.Process().children(recursive=True):
        try:
            if "MapWorker" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return
        except psutil.Error:
            continue


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_repeats_nothing(runs, toy, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'sightline[ray]'")
    run = Path(shutil.copytree(runs / "erm-0", tmp_path / "run"))
    images = toy_pictures(toy, tmp_path / "images", 95)
    (images / "duck" / "broken.png").write_text("not an image")
    command = {"chunk": 2, "batch": 2, "device": "cpu"}
    sightline.predict(Predict(run, (images,), out=tmp_path / "local", workers=0, **command))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15, behind all tests that run beside this one
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        killed: list[int] = []
        killer = threading.Thread(
            target=kill_a_worker_after_the_first_part, args=(tmp_path / "ray", killed), daemon=True
        )
        killer.start()
        table = sightline.predict(Predict(run, (images,), out=tmp_path / "ray", engine="ray", workers=2, **command))
    finally:
        ray.shutdown()
    assert killed, "a worker was killed"
    assert (table.images, table.unreadable) == (96, 1)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("local", "ray")]
    assert len(files[0]) == 48 + 1
    assert files[0] == files[1]


def test_what_ray_cannot_do_is_refused_before_it_starts(runs, toy, tmp_path):
    for out, workers, message in (
        ("memory://b/out", 1, "lies in the memory of this process"),
        (tmp_path / "parts", 0, "there must be at least one"),
    ):
        command = Predict(
            runs / "erm-0", (toy / "test",), out=out, workers=workers, engine="ray", device="cpu", distance=False
        )
        with pytest.raises(UserError, match=message):
            sightline.predict(command)
