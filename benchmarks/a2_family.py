"""Sizes that were pretrained alike: how well each looks after equally many steps, and when it knows equally much."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path

from a2_jobs import Setting
from a2_rows import PLAIN_LOOK, Row, a2
from sightline.errors import UserError
from waterbirds_rows import folder_of

SIZES = ("nano", "ti", "s", "b")


@dataclass(frozen=True)
class Members:
    """Of a folder in which `pretrain.py family` has run: files, smallest size first."""

    final: list[tuple[str, str]] = field(default_factory=list)  # size, file
    kept: list[tuple[str, int, str]] = field(default_factory=list)  # size, epoch, file
    supervised: list[tuple[str, str]] = field(default_factory=list)  # size, run folder

    @property
    def sizes(self) -> list[str]:
        return [size for size, _ in self.final]


def members(folder: Path | None) -> Members:
    if folder is None:
        return Members()
    final = [(size, str(file)) for size in SIZES if (file := folder / size / "backbone.safetensors").exists()]
    if not final:
        raise UserError(f"{folder}: no backbones; make them with `pretrain.py family --keep-every 3 --runs {folder}`")
    kept = [
        (size, int(file.stem.removeprefix("backbone-")), str(file))
        for size, _ in final
        for file in sorted((folder / size).glob("backbone-*.safetensors"))
    ]
    runs = [(size, str(run)) for size, _ in final if (run := folder / f"erm-{size}").joinpath("metrics.json").exists()]
    return Members(final, sorted(kept, key=lambda one: (SIZES.index(one[0]), one[1])), runs)


def family_rows(found: Members) -> tuple[list[Row], dict[str, str]]:
    """Where each of them looks, and the files by name."""
    files = dict(found.final)
    files |= {f"{size}@{epoch}": file for size, epoch, file in found.kept}
    files |= {f"supervised {size}": file for size, file in found.supervised}
    names = {name: name.replace(" ", "_") for name in files}
    rows = [
        Row("family", f"attention {name}", f"attention --neighbours --backbone @{words}")
        for name, words in names.items()
    ]
    return rows, {names[name]: file for name, file in files.items()}


def knn(runs: Path, name: str) -> float | None:
    path = folder_of(runs, f"attention {name}", 0) / "localization" / "test.csv"
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        values = [float(line["knn"]) for line in csv.DictReader(file)]
    return sum(values) / len(values)


def matched(runs: Path, found: Members) -> dict[str, str]:
    """Of each larger size, the kept state whose neighbours are as good as those of the smallest in the end."""
    goal = knn(runs, found.sizes[0]) if found.sizes else None
    if goal is None:
        return {}
    nearest = {}
    for size in found.sizes[1:]:
        states = [f"{size}@{epoch}" for of, epoch, _ in found.kept if of == size] + [size]
        known = {state: value for state in states if (value := knn(runs, state)) is not None}
        if len(known) > 1:
            nearest[size] = min(known, key=lambda state: abs(known[state] - goal))
    return nearest


def matched_backbones(setting: Setting, family_runs: Path, found: Members) -> tuple[Setting, list[Row]]:
    """Crops where the larger ones looked when they knew as much as the smallest, for the largest to answer from."""
    files = {f"{size}@{epoch}": file for size, epoch, file in found.kept} | dict(found.final)
    states = {size: state for size, state in matched(family_runs, found).items() if state != size}
    named = {f"{size}-matched": files[state] for size, state in states.items()}
    rows = [
        Row("toy", name, line)
        for where in named
        for name, line in a2(where, found.sizes[-1], PLAIN_LOOK, PLAIN_LOOK.words).items()
    ]
    return replace(setting, backbones=setting.backbones | named), rows
