"""The files of `sightline stress`. Results of earlier calls are kept as long as they are about the same conditions."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..console.files import as_csv, make_folder, save_image, write, write_json
from ..console.printable import from_cell
from ..data.drawing import image_grid
from ..load import same_intervention
from .segmentation import PER_IMAGE
from .stress_results import StressResults, draw_curves

FIELDS = {
    "curves": ("accuracy", "curves"),
    "masks": ("masks", "masks_from"),
    "subsets": ("subsets",),
    "neighbours": ("neighbours",),
}
DRAWN = {"curves": ".png", "subsets": "-subsets.png"}


@dataclass(frozen=True, eq=False)
class NewResults:
    """The results of one call, and their conditions."""

    tests: Collection[str]
    conditions: dict[str, Any]  # data, seed and model: results under other conditions are not combined
    results: StressResults
    columns: Mapping[str, np.ndarray]  # per image
    examples: dict[str, Tensor]


def save(path: Path, new: NewResults, before: Mapping[str, Any], *, figures: bool) -> StressResults:
    """Write the results, keeping those of other tests in the file if the conditions are the same; returns the new
    results with a note about what was replaced."""
    make_folder(path.parent)
    results, table = new.results, read_columns(path.with_suffix(".csv"))
    others = [test for test in FIELDS if test not in new.tests]
    changed = [name for name in new.conditions if not same_condition(name, before.get(name), new.conditions[name])]
    changed += ["images"] * (table.get("image") != list(new.columns["image"]))
    replaced = [test for test in others if any(before.get(name) for name in FIELDS[test])] if changed else []
    if replaced:
        note = f"earlier results removed because of different {' and '.join(changed)}: {', '.join(replaced)}"
        results = replace(results, notes=(*results.notes, note))
    kept = [] if changed else others
    combined, columns = results, dict(new.columns)
    if kept:
        combined = merge_results(results, StressResults.from_dict(before), kept)
        columns |= {name: np.array(column) for name, column in table.items() if test_of_column(name) in kept}
    write_json(path, new.conditions | combined.to_dict())
    order = ["", *FIELDS]
    names = sorted(columns, key=lambda name: order.index(test_of_column(name)))
    values = zip(*(columns[name] for name in names), strict=True)
    lines = [dict(zip(names, map(format_value, row), strict=True)) for row in values]
    write(path.with_suffix(".csv"), as_csv(names, lines))
    for test, ending in DRAWN.items():
        if test not in kept:
            path.with_name(f"{path.stem}{ending}").unlink(missing_ok=True)
    if figures and new.examples:
        save_image(path.with_name(f"{path.stem}{DRAWN['subsets']}"), image_grid(new.examples))
    if figures and new.results.curves:
        draw_curves(new.results, path.with_suffix(DRAWN["curves"]))
    return results


def same_condition(name: str, before: Any, now: Any) -> bool:
    return same_intervention(before, now) if name == "intervention" else before == now


def merge_results(results: StressResults, before: StressResults, kept: Collection[str]) -> StressResults:
    """The new results with the earlier ones of the tests that are kept, and their notes."""
    fields: dict[str, Any] = {name: getattr(before, name) for test in kept for name in FIELDS[test]}
    notes = [note for note in before.notes if note.partition(":")[0] in (*kept, "maps")]
    return replace(results, **fields, notes=tuple(sorted({*results.notes, *notes})))


def read_columns(path: Path) -> dict[str, list[str]]:
    """The columns of a CSV file; {} if there is none."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        names, *lines = [[from_cell(cell) for cell in line] for line in csv.reader(file)]
    return dict(zip(names, map(list, zip(*lines, strict=True)), strict=True))


def test_of_column(column: str) -> str:
    """The test that a column belongs to; empty for the image names."""
    first, _, rest = column.partition(" ")
    if column == "image":
        return ""
    return "masks" if first in PER_IMAGE else "neighbours" if first.isdigit() and rest == "neighbours" else "curves"


def format_value(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.4g}"
    return value
