"""Training what is missing: one after the other in this process, or several processes side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..config import Train
from ..console.files import write_json
from ..console.terminal import is_main_process
from ..errors import UserError
from .plan import BenchRun

TIMES = "bench.json"  # in the run folder: seconds of training, over all attempts


@dataclass(frozen=True)
class Outcome:
    run: BenchRun
    error: str = ""


def train_missing(runs: Sequence[BenchRun], jobs: int, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Runs that others start from are trained before these. A run that fails does not stop the others."""
    outcomes: list[Outcome] = []

    def carry_out(run: BenchRun) -> None:
        outcome = Outcome(run, train_here(run) if jobs == 1 else train_in_process(run))
        outcomes.append(outcome)
        report(outcome)

    for some in ([run for run in runs if not run.entry.after], [run for run in runs if run.entry.after]):
        missing = [run for run in some if not run.finished]
        if jobs == 1:
            for run in missing:
                carry_out(run)
            continue
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(carry_out, run) for run in missing]:
                future.result()
    return outcomes


def train_here(run: BenchRun) -> str:
    """The error, if any."""
    from ..train import train

    began = time.perf_counter()
    try:
        train(run.config)
    except UserError as error:
        return str(error)
    finally:
        if is_main_process():
            add_seconds(run.config.folder, time.perf_counter() - began)
    return ""


def train_in_process(run: BenchRun) -> str:
    """`sightline train` in a process of its own; what it prints goes to a file beside the run folder."""
    folder, began = run.config.folder, time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sightline", "train", run.config.method, *arguments_of(run.config)]
    log = folder.with_name(f"{folder.name}.log")
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    add_seconds(folder, time.perf_counter() - began)
    if code == 0:
        return ""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{last[-1].removeprefix('sightline: ') if last else f'exit code {code}'} (all of it: {log})"


def arguments_of(config: Train) -> list[str]:
    """The command line of a configuration: the data, and a flag for every setting that is not the default."""
    words = [str(config.data)]
    for name, value, default in settings_of(config):
        if value == default:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool) and isinstance(default, bool):
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        else:
            words += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def settings_of(config: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Name, value and default of every setting but the data, also of nested ones."""
    found, default = [], type(config)(**({"data": config.data} if hasattr(config, "data") else {}))
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += settings_of(value, f"{prefix}{field.name}.")
        elif field.name != "data":
            found.append((f"{prefix}{field.name}", value, getattr(default, field.name)))
    return found


def add_seconds(folder: Path, seconds: float) -> None:
    if (folder / "run.json").is_file():
        write_json(folder / TIMES, read_times(folder) | {"seconds": round(seconds_of(folder) + seconds, 1)})


def read_times(folder: Path) -> dict[str, Any]:
    path = folder / TIMES
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def seconds_of(folder: Path) -> float:
    """Of training, over all attempts that were not killed."""
    return float(read_times(folder).get("seconds", 0.0))
