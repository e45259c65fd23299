"""Several processes do what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline.train import train
from sightline.training.checkpoint import load_tensors

from ..small_runs import command_line, log_of, small

WHOLE_THEN_STOPPED = """
import contextlib, importlib, sys
import torch
from sightline.cli import main

with contextlib.suppress(SystemExit):
    main()

loop, steps = importlib.import_module("sightline.train"), []
real = loop.take_step

def take_step(*arguments):
    steps.append(1)
    if len(steps) <= 4:
        return real(*arguments)
    torch.distributed.barrier()  # the main one may still be writing, and the first to end ends the others
    return 1 / 0

loop.take_step = take_step
sys.argv[sys.argv.index("--out") + 1] += "-stopped"
sys.argv += ["--save-minutes", "0"]
main()
"""
THREADS_AT_THE_END = """
import atexit, os
from pathlib import Path
from sightline.cli import main

def say():
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text() for task in tasks.iterdir()] if tasks.exists() else []
    Path(__file__).with_suffix("." + os.environ["RANK"]).write_text("".join(name for name in names if "gloo" in name))

atexit.register(say)  # what is registered first runs last
main()
"""


def launch(toy: Path, out: Path, processes: int, *more: str, script: Path | None = None) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    program = ["-m", "sightline"] if script is None else [str(script)]
    command = [sys.executable, *launcher, *program, *command_line(toy, out, *more)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def assert_alike(one: Path, several: Path) -> None:
    """Up to the order in which numbers are added."""
    for mine, theirs in zip(log_of(one), log_of(several), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["balanced"] == pytest.approx(theirs["balanced"], abs=0.04)
    weights = [load_file(run / "last.safetensors") for run in (one, several)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulate"), [(32, 1), (30, 2)])
def test_three_processes_do_what_one_does_also_when_resumed(toy, tmp_path, batch, accumulate):
    """A batch of 32 is not divisible by 3; stopped in the second epoch, after a save that all take part in."""
    one = train(small(toy, tmp_path / "one", epochs=2, batch=batch, accumulate=accumulate, average=0.9))
    flags = ("--epochs", "2", "--batch", str(batch), "--accumulate", str(accumulate), "--average", "0.9")
    script = tmp_path / "script.py"
    script.write_text(WHOLE_THEN_STOPPED)
    result = launch(toy, tmp_path / "three", 3, *flags, script=script)
    assert "ZeroDivisionError" in result.stderr, result.stderr[-3000:]
    assert_alike(one, tmp_path / "three")
    assert json.loads((tmp_path / "three" / "run.json").read_text())["processes"] == 3

    _, facts = load_tensors(tmp_path / "three-stopped" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 1)
    script.write_text(THREADS_AT_THE_END)
    result = launch(toy, tmp_path / "three-stopped", 3, *flags, "--resume", "--save-minutes", "0", script=script)
    assert result.returncode == 0, result.stderr[-3000:]
    # Threads that talk to the others and outlive Python abort it now and then.
    assert [script.with_suffix(f".{rank}").read_text() for rank in range(3)] == [""] * 3
    assert_alike(one, tmp_path / "three-stopped")


@pytest.mark.slow
def test_several_processes_refuse_together(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    result = launch(toy, tmp_path / "run", 2, "--epochs", "1")
    assert result.returncode != 0
    assert "there is a run already" in result.stderr
    result = launch(toy, tmp_path / "uneven", 2, "--batch", "31", "--accumulate", "2")
    assert result.returncode != 0
    assert "take 28" in result.stderr
    assert not (tmp_path / "uneven").exists()
