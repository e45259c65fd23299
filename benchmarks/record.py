"""Result files with the command, the commit and the device; and times of variants of the same work, as ratios."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

NUMBERS = re.compile(r"\[\s[-\d.,e\s]+\]")  # lists of them, such as intervals, are written in one line
Runs = Mapping[str, Callable[[], object]]


def commit() -> str:
    """Of the code that runs."""
    known = _git("rev-parse", "HEAD") or os.environ.get("SIGHTLINE_COMMIT", "")  # for a machine without the history
    changed = [line for line in _git("status", "--porcelain", "--", "src", "benchmarks/*.py").splitlines() if line]
    return (known or "unknown") + (" with changes" if changed else "")


def record(path: Path, device: str, content: dict[str, Any]) -> None:
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    facts = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_without_folders, sys.argv[1:])]),
        "commit": commit(),
        "device": cpu if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts | content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(NUMBERS.sub(lambda found: " ".join(found[0].split()), text), encoding="utf-8")


def _git(*arguments: str) -> str:
    """Of this project, wherever it is called from."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _without_folders(argument: str) -> str:
    """Other people have other folders; what stands before = is a name."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name if '/' in value else value}"


# ---- times -----------------------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], object], device: str, repeats: int = 1) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def rounds_of(runs: Runs, rounds: int, device: str, repeats: int = 1) -> dict[str, list[float]]:
    """Every round times every variant once, in a new random order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            times[name].append(seconds_of(runs[name], device, repeats))
    return times


def middle(values: Sequence[float], digits: int) -> tuple[float, list[float]]:
    """The median, and the middle 80 %."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return round(statistics.median(ordered), digits), [round(ordered[k], digits) for k in (tenth, -1 - tenth)]


def ratios(runs: Runs, to: str, *, rounds: int, device: str) -> list[dict[str, Any]]:
    """Machines differ and are noisy, ratios less so: every variant is compared with `to` of the same round."""
    for run in runs.values():
        run(), run()
    repeats = max(1, round(0.05 / seconds_of(runs[to], device, 3)))
    times = rounds_of(runs, rounds, device, repeats)
    rows = []
    for name, values in times.items():
        ratio, ends = middle([value / other for value, other in zip(values, times[to], strict=True)], 3)
        milliseconds = round(1000 * statistics.median(values), 3)
        row = {"variant": name, "milliseconds": milliseconds, f"ratio_to_{to}": ratio, "middle_80_percent": ends}
        rows.append(row | {"rounds": rounds})
    return rows


def limits_met(rows: Sequence[Mapping[str, Any]], to: str, asked: Mapping[str, float]) -> list[dict[str, Any]]:
    """Whether the variants with a limit take at most so much of `to`, in every setting."""
    ratio = f"ratio_to_{to}"
    return [
        {name: row[name] for name in ("what", "batch", "variant") if name in row}
        | {"asked": f"at most {asked[row['variant']]}", ratio: row[ratio], "met": row[ratio] <= asked[row["variant"]]}
        for row in rows
        if row["variant"] in asked
    ]
