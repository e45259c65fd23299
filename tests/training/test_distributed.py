"""Several processes train as one does."""

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

from ..small_runs import command_line, in_processes, log_of, loop, small

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


def stop_in_the_second_epoch() -> None:
    steps, real = [], loop().train_step

    def train_step(*arguments):
        steps.append(1)
        if len(steps) <= 4:
            return real(*arguments)
        torch.distributed.barrier()  # the main process may still be writing
        return 1 / 0

    loop().train_step = train_step


def assert_alike(one: Path, several: Path) -> None:
    """Up to the order in which numbers are added."""
    for mine, theirs in zip(log_of(one), log_of(several), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["balanced"] == pytest.approx(theirs["balanced"], abs=0.04)
    weights = [load_file(run / "last.safetensors") for run in (one, several)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "grad_accum"), [(32, 1), (30, 2)])
def test_three_processes_train_as_one_does(toy, tmp_path, batch, grad_accum):
    """A batch of 32 is not divisible by 3."""
    one = train(small(toy, tmp_path / "one", epochs=2, batch=batch, grad_accum=grad_accum, ema=0.9))
    flags = ("--epochs", "2", "--batch", str(batch), "--grad-accum", str(grad_accum), "--ema", "0.9")
    codes, errors = in_processes(3, *command_line(toy, tmp_path / "three", *flags))
    assert codes == [0] * 3, errors[-3000:]
    assert_alike(one, tmp_path / "three")
    assert json.loads((tmp_path / "three" / "run.json").read_text())["processes"] == 3


@pytest.mark.slow
def test_a_run_stopped_in_its_second_epoch_is_resumed_by_torchrun(toy, tmp_path):
    """After a save that all processes take part in."""
    one = train(small(toy, tmp_path / "one", epochs=2, ema=0.9))
    command = command_line(toy, tmp_path / "three", "--epochs", "2", "--ema", "0.9", "--save-minutes", "0")
    codes, errors = in_processes(3, *command, prepare=stop_in_the_second_epoch)
    assert codes == [1] * 3
    assert "ZeroDivisionError" in errors
    _, facts = load_tensors(tmp_path / "three" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 1)

    script = tmp_path / "script.py"
    script.write_text(THREADS_AT_THE_END)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    resumed = [sys.executable, *launcher, *command, "--resume"]
    result = subprocess.run(resumed, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    # Threads that talk to the others and outlive Python abort it now and then.
    assert [script.with_suffix(f".{rank}").read_text() for rank in range(3)] == [""] * 3
    assert_alike(one, tmp_path / "three")


def test_all_processes_stop_at_a_user_error(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    codes, errors = in_processes(2, *command_line(toy, tmp_path / "run", "--epochs", "1"))
    assert codes == [2, 2], errors
    assert "contains a finished run" in errors
    codes, errors = in_processes(2, *command_line(toy, tmp_path / "uneven", "--batch", "31", "--grad-accum", "2"))
    assert codes == [2, 2], errors
    assert "use --batch 28" in errors
    assert not (tmp_path / "uneven").exists()
