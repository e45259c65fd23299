"""Rows of the studies as data: what `sightline train` is given, on which dataset and with which seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One training of a table. In its line, `@NAME` is a file of `--backbones`, or the run of that row with the same
    seed; TI, SELF and U2NET are files of `--backbones`, too."""

    set: str
    name: str
    line: str
    """The arguments of `sightline train`, without data, seed and output folder."""
    seed: int = 0
    measures: tuple[str, ...] = ()
    """What is measured of the trained run: names in measure.MEASURES."""
    timed: bool = False
    """Trained alone on the device."""
    file: str = ""
    """The CSV file in the folder of the dataset. Default: its own."""

    @property
    def method(self) -> str:
        return self.line.split()[0]

    @property
    def about(self) -> dict[str, Any]:
        return {"set": self.set, "row": self.name, "seed": self.seed}


def with_seeds(
    kind: str, name: str, line: str, seeds: Iterable[int] = (0,), measures: tuple[str, ...] = ()
) -> list[Row]:
    return [Row(kind, name, line, seed, measures) for seed in seeds]


# ---- run folders -----------------------------------------------------------------------------------------------------


def folder_of(runs: Path, row: str, seed: int) -> Path:
    return runs / f"{_start(row)}{seed}"


def folders_of(runs: Path, row: str, splits: Iterable[str] = ()) -> dict[int, Path]:
    """The finished runs of a row that have predictions of these splits, by seed; weights need not be there."""
    start = _start(row)
    needed = ("metrics.json", *(f"predictions/{split}.csv" for split in splits))
    seeds = {path.name.removeprefix(start): path for path in runs.glob(f"{start}*")}
    done = {
        int(seed): path
        for seed, path in seeds.items()
        if seed.isdigit() and all((path / name).exists() for name in needed)
    }
    return dict(sorted(done.items()))


def _start(row: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in row.lower()) + "-"
