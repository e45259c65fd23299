"""Small training runs: from Python, from the command line, in several processes, interrupted; and their files."""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from PIL import Image

from sightline import cli
from sightline.config import Erm, Train


def small(toy: Path, out: Path, **changes) -> Erm:
    settings = {"backbone": "random:nano", "epochs": 3, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
    return Erm(data=toy, out=out, **settings | {"size": 32} | changes)


def command_line(toy: Path, out: Path, *more: str) -> list[str]:
    """The same as `small`, on the command line."""
    command = ["train", "erm", str(toy), "--out", str(out), "--backbone", "random:nano", "--batch", "32"]
    return [*command, "--size", "32", "--lr", "3e-4", "--workers", "0", "--device", "cpu", *more]


def in_two_processes(command: Train) -> None:
    """Train with two processes; both must succeed."""
    changed = {name: value for name, value in vars(command).items() if value != getattr(type(command), name, None)}
    flags = [word for name, value in changed.items() if name != "data" for word in (f"--{name}", value)]
    codes, errors = in_processes(2, "train", command.method, command.data, *flags)
    assert codes == [0, 0], errors[-2000:]


IMPORTED = ("sightline.cli", "sightline.train", "sightline.methods.dino", "accelerate", "torch._dynamo")
multiprocessing.set_forkserver_preload([*IMPORTED])


def in_processes(
    count: int, *arguments, prepare: Callable[[], None] | None = None, address: str | None = None
) -> tuple[list[int], str]:
    """Exit codes and stderr of `sightline ARGUMENTS` in processes that know what torchrun tells them, after `prepare`.
    With an `address`, that of the first of them, they meet there instead of in this process.

    They are forked from one process that has imported torch, which saves each of them some seconds. torchrun itself is
    tried in `training/test_distributed.py`.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives them all
    together = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    together["TORCHELASTIC_USE_AGENT_STORE"] = address is None
    together |= {} if address is None else {"MASTER_ADDR": address}
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, str(rank)) for rank in range(count)]
        start = multiprocessing.get_context("forkserver").Process
        jobs = [
            (together | {"RANK": rank, "LOCAL_RANK": rank}, [*map(str, arguments)], prepare, errors[rank])
            for rank in range(count)
        ]
        processes = [start(target=one_of_several, args=job) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
            process.join()
        return [process.exitcode or 0 for process in processes], "".join(file.read_text() for file in errors)


def one_of_several(environment: dict, arguments: list[str], prepare: Callable[[], None] | None, errors: Path) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.argv = ["sightline", *arguments]
    with errors.open("w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
        try:
            if prepare is not None:
                prepare()
            cli.main()
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def begun(*arguments, errors: Path) -> ForkServerProcess:
    """`sightline ARGUMENTS` in a process of its own, as a test may kill it; its stderr goes to a file."""
    job = ({}, [*map(str, arguments)], None, errors)
    process = multiprocessing.get_context("forkserver").Process(target=one_of_several, args=job)
    process.start()
    return process


def python_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in this folder: a script, -c CODE or -m MODULE, forked as in `in_processes`."""
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        job = (folder, arguments, out, err)
        process = multiprocessing.get_context("forkserver").Process(target=run_python, args=job)
        process.start()
        process.join(300)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, out.read_text(), err.read_text())


def run_python(folder: Path, arguments: tuple[str, ...], out: Path, err: Path) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    kind, *others = arguments
    sys.argv = [others.pop(0), *others] if kind in ("-c", "-m") else [*arguments]
    if kind == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(folder / kind), run_name="__main__")


def files(folder: Path) -> dict[str, bytes]:
    """What runs are compared by: weights, log, predictions and metrics."""
    names = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv", "metrics.json")
    return {name: (folder / name).read_bytes() for name in names}


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def loop():
    """The module, not the function of that name."""
    return importlib.import_module("sightline.train")


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopped_after(count: int, what: Callable[[], None] | None = None) -> Generator[None]:
    """After `count` training steps the next one raises `Stop`, or calls `what` first."""
    steps, real = [], loop().train_step

    def interrupted(*arguments):
        if len(steps) == count:
            if what is None:
                raise Stop
            what()
        steps.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop(), "train_step", interrupted)
        yield


def table(folder: Path, classes: tuple[str, ...], splits: bool = True) -> Path:
    """Images of one colour each, in a CSV file without groups."""
    folder.mkdir()
    lines = ["image,label,split" if splits else "image,label"]
    for i in range(24):
        Image.new("RGB", (64, 48), (10 * i, 90, 255 - 10 * i)).save(folder / f"{i}.png")
        label = classes[i % len(classes)]
        lines.append(f"{i}.png,{label}" + (f",{('train', 'train', 'val', 'test')[i // 6]}" if splits else ""))
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder
