"""A small workspace that every command can run in: data, a backbone, runs, and what the commands write there."""

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sightline.config import EarlyMask, Erm, Probe
from sightline.datasets.toy import write_toy
from sightline.train import train
from sightline.vit.weights import save_backbone

from ..conftest import small_vit

SIZE = ("--size", 32, "--workers", 0, "--device", "cpu", "--batch", 16)
NEW = ("--backbone", "tiny.safetensors", "--out", "new", "--cache", "cache", *SIZE)
QUICK = ("--workers", 0, "--device", "cpu", "--batch", 16)

# What is typed in the workspace.
COMMANDS: dict[str, tuple] = {
    "toy": ("toy", "new", "--train", 4, "--val", 2, "--test", 2, "--size", 32),
    "check": ("check", "data", "--out", "check.json", "--workers", 0),
    "train probe": ("train", "probe", "data", *NEW),
    "train erm": ("train", "erm", "data", *NEW, "--epochs", 2, "--save-minutes", 0, "--resume"),
    "evaluate": ("evaluate", "erm", *QUICK, "--split", "val", "--cache", "cache"),
    "compare": ("compare", "erm", "probe", "--out", "compared.json"),
    "predict": ("predict", "erm", "data/test", "--out", "predicted.csv", "--device", "cpu"),
    "predict json": ("predict", "erm", "data/test", "--out", "predicted.json", "--device", "cpu"),
    "verify": ("verify", "tiny.safetensors", "--size", 32, "--limit", 2, "--draws", 1, "--out", "proof.json"),
    "shape": ("shape", "masked", *QUICK),
    "localize": ("localize", "masked", *QUICK),
    "audit": ("audit", "erm", *QUICK, "--quick", "--examples", 4, "--out", "report.html"),
    "export": ("export", "erm", "--limit", 2),
    "matrix": ("matrix", "data", "--where", "everything", "--what", "mask-probe:tiny.safetensors", "--out", "grid",
               "--no-figures", "--device", "cpu", "--workers", 0),
}  # fmt: skip
DURATIONS = ("grid/cells.jsonl",)  # hold rounded durations, which two runs may have in common
SLOW = ("audit", "export", "matrix", "localize", "shape")  # rarely in a short session
READ = ("erm", "probe", "masked", "data", "cache", "tiny.safetensors")  # what may be damaged beforehand


def make_workspace(folder: Path) -> Path:
    write_toy(folder / "data", train=16, val=8, test=8, size=32)
    save_backbone(small_vit(), folder / "tiny.safetensors")
    common = {"backbone": str(folder / "tiny.safetensors"), "size": 32, "workers": 0, "device": "cpu", "batch": 16}
    cache = {"cache": folder / "cache"}
    train(Erm(folder / "data", out=folder / "erm", epochs=1, **common, **cache))
    train(Probe(folder / "data", out=folder / "probe", **common, **cache))
    train(EarlyMask(folder / "data", out=folder / "masked", epochs=1, **common))
    return folder


DURATION = re.compile(rb'"seconds": *[0-9.e+-]+')


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(timeless(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def timeless(path: Path) -> bytes:
    """The content, in JSON without durations: two runs may have equal ones by chance, and a third another."""
    content = path.read_bytes()
    return DURATION.sub(b"", content) if path.suffix == ".json" else content


@dataclass(frozen=True)
class Reference:
    """What a command does without a fault."""

    code: int
    files: dict[str, str]  # after it
    volatile: frozenset[str]  # files that differ from one run to the next, such as those with durations
    events: int  # file operations at which a fault can happen
    seconds: float


def copy_of(workspace: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(workspace, folder, symlinks=True)


def reference_of(name: str, workspace: Path, folder: Path, run: Callable) -> Reference:
    found = []
    for _ in range(2):
        home = copy_of(workspace, folder)
        ended = run(COMMANDS[name], home)
        found.append((ended, digests(home)))
    (first, before), (second, after) = found
    assert first.code == second.code == 0, f"{name} fails without any fault: {first.stderr[-1500:]}"
    differ = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    volatile = frozenset(differ | {path for path in after if path.endswith(DURATIONS)})
    return Reference(first.code, after, volatile, second.events, second.seconds)
