"""Costs and speeds, as ratios to a reference in the same run, where machines differ less than in absolute times.

    python benchmarks/speed.py masking                          # hiding and removal against the dense ViT
    python benchmarks/speed.py masking --device cuda --precision bf16 --batches 1 16 256 --out masking_h200.json
    python benchmarks/speed_table.py --device cuda --precision bf16    # both stages and training steps; its own flags
    python benchmarks/speed.py pixels                           # pixel-exact iFAM against patches
    python benchmarks/speed.py operations --data waterbirds     # the same, operations counted on images with masks
    python benchmarks/speed.py toggle                           # a part dropped in the app against a full pass
    python benchmarks/speed.py interventions                    # many interventions against as many full passes
    python benchmarks/speed.py relevance                        # GAE of a batch against image by image
    python benchmarks/speed.py crops --device cuda --precision bf16 --backbones dino_s16_reg4.safetensors ...
    python benchmarks/speed.py loader --data PACKS              # decoding against a plain loop over Pillow
    python benchmarks/speed.py rows --count 1000000             # reading and checking a large CSV file
    python benchmarks/speed.py training --data DATA --device cuda --precision bf16    # against its own limit

Every round times every variant once, in a new random order; a ratio is the median over rounds of variant / reference of
the same round, with the interval of the middle 80 % of rounds. Weights are random unless a file is named.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from record import record

MODULES = {
    "masking": "speed_models", "relevance": "speed_models", "crops": "speed_models",
    "pixels": "speed_sight", "operations": "speed_sight", "toggle": "speed_sight", "interventions": "speed_sight",
    "loader": "speed_data", "rows": "speed_data", "training": "speed_data",
}  # fmt: skip


@dataclass(frozen=True)
class Speed:
    what: Positional[
        Literal[
            "masking", "pixels", "operations", "toggle", "interventions", "relevance", "crops", "loader", "rows",
            "training",
        ]
    ]  # fmt: skip
    data: Path | None = None
    """operations, training: a dataset; loader: the folder of cub224.zip."""
    backbones: tuple[str, ...] = ()
    """By name or file, or random:NAME. Default: those of the committed results."""
    batches: tuple[int, ...] = ()
    rounds: int | None = None
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    count: int | None = None
    """Images (operations, loader), lines (rows) or attention maps (crops)."""
    workers: tuple[int, ...] = ()
    """loader: processes that decode, each; training: the first."""
    parts: int = 4
    """interventions: of iFAM."""
    ways: tuple[str, ...] = ()
    """interventions, toggle: these ways to look."""
    split: str = "val"
    """operations: of the dataset."""
    epochs: int = 3
    """training: the speed is that of the last one."""
    out: Path | None = None
    """Write the figures there, as JSON."""


@dataclass(frozen=True)
class Result:
    """What is recorded, and the lines to be printed."""

    content: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    config = tyro.cli(Speed, description=__doc__)
    result: Result = getattr(importlib.import_module(MODULES[config.what]), config.what)(config)
    rows = result.rows or result.content.get("rows") or [result.content]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in columns))
    Console(highlight=False, width=200).print(table)
    for limit in result.content.get("verdicts", ()):
        print(limit)
    if config.out:
        record(config.out, "cpu" if config.what in ("rows", "loader", "operations") else config.device, result.content)


if __name__ == "__main__":
    main()
