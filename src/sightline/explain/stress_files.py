"""The files of tests of explanations. What earlier calls found stays, as long as it is about the same."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..console.files import as_csv, make_folder, write
from ..data.drawing import sheet
from ..load import same_change
from .segmentation import PER_PICTURE
from .stress_results import Stressed, draw

FIELDS = {
    "curves": ("accuracy", "curves"),
    "masks": ("masks", "masks_from"),
    "subsets": ("subsets",),
    "neighbours": ("neighbours",),
}
DRAWN = {"curves": ".png", "subsets": "-subsets.png"}


@dataclass(frozen=True, eq=False)
class Work:
    """What one call has found, and what it was about."""

    tests: Collection[str]  # that were asked for
    about: dict[str, Any]  # data, seed and model; figures that differ in these do not go together
    found: Stressed
    columns: Mapping[str, np.ndarray]  # per picture
    examples: dict[str, Tensor]


def save(path: Path, work: Work, before: Mapping[str, Any], *, pictures: bool) -> Stressed:
    """Beside what the file said `before` of other tests, or in its place; what was found, with a note of what went."""
    make_folder(path.parent)
    found, table = work.found, rows_of(path.with_suffix(".csv"))
    others = [test for test in FIELDS if test not in work.tests]
    changed = [name for name in work.about if not alike(name, before.get(name), work.about[name])]
    changed += ["pictures"] * (table.get("image") != list(work.columns["image"]))
    gone = [test for test in others if any(before.get(name) for name in FIELDS[test])] if changed else []
    if gone:
        note = f"replaced, since {' and '.join(changed)} were others: {', '.join(gone)}"
        found = replace(found, notes=(*found.notes, note))
    stays = [] if changed else others
    everything, columns = found, dict(work.columns)
    if stays:
        everything = beside(found, Stressed.from_dict(before), stays)
        columns |= {name: np.array(column) for name, column in table.items() if whose(name) in stays}
    write(path, json.dumps(work.about | everything.to_dict(), indent=1, ensure_ascii=False) + "\n")
    order = ["", *FIELDS]
    names = sorted(columns, key=lambda name: order.index(whose(name)))
    values = zip(*(columns[name] for name in names), strict=True)
    lines = [dict(zip(names, map(brief, some), strict=True)) for some in values]
    write(path.with_suffix(".csv"), as_csv(names, lines))
    for test, ending in DRAWN.items():
        if test not in stays:
            path.with_name(f"{path.stem}{ending}").unlink(missing_ok=True)
    if pictures and work.examples:
        sheet(work.examples).save(path.with_name(f"{path.stem}{DRAWN['subsets']}"))
    if pictures and work.found.curves:
        draw(work.found, path.with_suffix(DRAWN["curves"]))
    return found


def alike(name: str, before: Any, now: Any) -> bool:
    return same_change(before, now) if name == "intervention" else before == now


def beside(found: Stressed, before: Stressed, stays: Collection[str]) -> Stressed:
    """With what was found before of the tests that stay, and their notes."""
    fields: dict[str, Any] = {name: getattr(before, name) for test in stays for name in FIELDS[test]}
    notes = [note for note in before.notes if note.partition(":")[0] in (*stays, "maps")]
    return replace(found, **fields, notes=tuple(sorted({*found.notes, *notes})))


def rows_of(path: Path) -> dict[str, list[str]]:
    """A file's columns; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        names, *lines = csv.reader(file)
    return dict(zip(names, map(list, zip(*lines, strict=True)), strict=True))


def whose(column: str) -> str:
    """Which test a column is of; none for the pictures' names."""
    first, _, rest = column.partition(" ")
    if column == "image":
        return ""
    return "masks" if first in PER_PICTURE else "neighbours" if first.isdigit() and rest == "neighbours" else "curves"


def brief(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.4g}"
    return value
