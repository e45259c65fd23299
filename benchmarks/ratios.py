"""How long variants of the same work take, as a ratio to one of them: machines differ and are noisy, ratios less so."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Runs = Mapping[str, Callable[[], object]]


def timed(run: Callable[[], object], device: str, repeats: int) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def ratios(runs: Runs, to: str, *, rounds: int, device: str) -> list[dict[str, Any]]:
    """Every round times every variant once, in a new random order, and is compared with `to` of the same round."""
    for run in runs.values():
        run(), run()
    repeats = max(1, round(0.05 / timed(runs[to], device, 3)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            times[name].append(timed(runs[name], device, repeats))
    rows = []
    for name, values in times.items():
        relative = sorted(value / other for value, other in zip(values, times[to], strict=True))
        tenth = len(relative) // 10
        rows.append(
            {
                "variant": name,
                "milliseconds": round(1000 * statistics.median(values), 3),
                f"ratio_to_{to}": round(statistics.median(relative), 3),
                "middle_80_percent": [round(relative[tenth], 3), round(relative[-1 - tenth], 3)],
                "rounds": rounds,
            }
        )
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]], to: str, asked: Mapping[str, float]) -> list[dict[str, Any]]:
    """Whether the variants that something is asked of take at most so much of `to`, in every setting."""
    ratio = f"ratio_to_{to}"
    return [
        {name: row[name] for name in ("what", "batch", "variant") if name in row}
        | {"asked": f"at most {asked[row['variant']]}", ratio: row[ratio], "met": row[ratio] <= asked[row["variant"]]}
        for row in rows
        if row["variant"] in asked
    ]
