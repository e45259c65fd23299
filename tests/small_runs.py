"""Small runs: as Python and as a user types them, stopped where a test wants, and what they are judged by."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from PIL import Image

from sightline.config import Erm, Train


def small(toy: Path, out: Path, **changes) -> Erm:
    settings = {"backbone": "random:nano", "epochs": 3, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
    return Erm(data=toy, out=out, **settings | changes)


def command_line(toy: Path, out: Path, *more: str) -> list[str]:
    """The same as `small`, as a user types it."""
    command = ["train", "erm", str(toy), "--out", str(out), "--backbone", "random:nano", "--batch", "32"]
    return [*command, "--lr", "3e-4", "--workers", "0", "--device", "cpu", *more]


def in_two_processes(command: Train) -> None:
    """What a user types to train with two processes; it must end well."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "sightline", "train"]
    asked = {name: value for name, value in vars(command).items() if value != getattr(type(command), name, None)}
    flags = [word for name, value in asked.items() if name != "data" for word in (f"--{name}", str(value))]
    typed = [sys.executable, *launcher, command.method, str(command.data), *flags]
    result = subprocess.run(typed, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]


def files(folder: Path) -> dict[str, bytes]:
    """What a run is judged by: weights, log, answers and figures."""
    names = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv", "metrics.json")
    return {name: (folder / name).read_bytes() for name in names}


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def loop():
    """The file, not the word of that name."""
    return importlib.import_module("sightline.train")


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopped_after(count: int, what: Callable[[], None] | None = None) -> Generator[None]:
    """The step after `count` others is not taken, or something else happens in it."""
    steps, real = [], loop().take_step

    def interrupted(*arguments):
        if len(steps) == count:
            if what is None:
                raise Stop
            what()
        steps.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop(), "take_step", interrupted)
        yield


def table(folder: Path, classes: tuple[str, ...], splits: bool = True) -> Path:
    """Pictures of one colour each, in a CSV file without groups."""
    folder.mkdir()
    lines = ["image,label,split" if splits else "image,label"]
    for i in range(24):
        Image.new("RGB", (64, 48), (10 * i, 90, 255 - 10 * i)).save(folder / f"{i}.png")
        label = classes[i % len(classes)]
        lines.append(f"{i}.png,{label}" + (f",{('train', 'train', 'val', 'test')[i // 6]}" if splits else ""))
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder
