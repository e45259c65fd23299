"""Tables from run folders: every row with its groups, and differences between rows on the same images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evidence import facts_of, mean_over_seeds, predictions_of, sights_of
from rows import folders_of
from rows.waterbirds import PAIRS
from sightline.metrics.comparison import compare
from sightline.metrics.comparison import verdict as gain_verdict
from sightline.metrics.estimates import Estimate, Metrics
from sightline.metrics.groups import evaluate_seeds
from sightline.metrics.predictions import Predictions

MANY_GROUPS = 12  # with more, the table is of attributes
SIGHT = {"grid_iou": "grid IoU", "pixel_iou": "pixel IoU", "coverage": "coverage"}


def by_attribute(predictions: Predictions) -> dict[str, Predictions]:
    """Where there are too many groups to list, the predictions for images of each attribute, whatever their label."""
    if predictions.groups is None or len(np.unique(predictions.groups)) <= MANY_GROUPS:
        return {}
    attributes = np.array([name.rpartition("/")[2] for name in predictions.group_names])[predictions.groups]
    return {str(one): predictions.take(np.flatnonzero(attributes == one)) for one in np.unique(attributes)}


def each_attribute(runs: Sequence[Predictions]) -> dict[str, list[Predictions]]:
    divided = [by_attribute(run) for run in runs]
    return {attribute: [one[attribute] for one in divided] for attribute in divided[0]}


def result_of(runs: Path, row: str, line: str, splits: tuple[str, ...], seeds: Sequence[int]) -> dict[str, Any] | None:
    """The figures of a row over its trained seeds; None if there is none."""
    folders = {seed: folder for seed, folder in folders_of(runs, row, splits).items() if seed in seeds}
    if not folders:
        return None
    paths, facts = list(folders.values()), [facts_of(folder) for folder in folders.values()]
    found: dict[str, Any] = {"row": row, "command": line, "seeds": list(folders), "metrics": {}, "sight": {}}
    for split in splits:
        predictions, counts = predictions_of(paths, split), facts[0]["data"]["counts"]["train"]
        metrics = evaluate_seeds(predictions, train_group_counts=counts)
        if attributes := {name: evaluate_seeds(some).accuracy for name, some in each_attribute(predictions).items()}:
            metrics = replace(metrics, groups={}, classes={})
            found.setdefault("attributes", {})[split] = {name: asdict(one) for name, one in attributes.items()}
        found["metrics"][split] = metrics.to_dict()
        sights = sights_of(paths, split)
        if len(sights) == len(paths):
            there = [name for name in sights[0] if all(name in one for one in sights)]
            means = {name: mean_over_seeds([one[name] for one in sights]) for name in there}
            found["sight"][split] = {name: asdict(one) for name, one in means.items()}
    return found | {"speed": [one.get("speed") for one in facts]}


def paired(runs: Path, rows: Mapping[str, str], split: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The differences of the PAIRS whose first row is asked for, where both are trained."""
    found = []
    for ours, theirs in PAIRS:
        blocks = {
            row: [folder for seed, folder in folders_of(runs, row, (split,)).items() if seed in seeds]
            for row in (theirs, ours)
        }
        if ours in rows and all(blocks.values()):
            predictions = {row: predictions_of(folders, split) for row, folders in blocks.items()}
            found.append(
                {"row": ours, "against": theirs, "split": split}
                | {"seeds": {row: len(folders) for row, folders in blocks.items()}}
                | {
                    name: asdict(gain) | {"verdict": gain_verdict(gain)}
                    for name, gain in gains_of(predictions).items()
                    if gain
                }
            )
    return found


def gains_of(predictions: Mapping[str, Sequence[Predictions]]) -> dict[str, Estimate | None]:
    """Of the second row over the first: worst-group accuracy, or by attribute where groups are many; and accuracy."""
    entry = compare(predictions).entries[1]
    divided = {row: each_attribute(runs) for row, runs in predictions.items()}
    gains = {
        attribute: compare({row: some[attribute] for row, some in divided.items()}).entries[1].accuracy_gain
        for attribute in next(iter(divided.values()))
    }
    return (gains or {"worst_group": entry.worst_gain}) | {"accuracy": entry.accuracy_gain}


# ---- printed ---------------------------------------------------------------------------------------------------------


def table_cells(results: Sequence[dict[str, Any]], split: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table, in per cent with 95 % intervals."""
    every = [Metrics.from_dict(found["metrics"][split]) for found in results]
    groups = list(dict.fromkeys(group for metrics in every for group in metrics.groups))
    attributes = list(dict.fromkeys(name for found in results for name in _attributes(found, split)))
    header = ["", "seeds", "accuracy", *(attributes or [*groups, "mean of groups", "worst group"]), *SIGHT.values()]
    lines = []
    for found, metrics in zip(results, every, strict=True):
        sight, accuracies = found["sight"].get(split, {}), _attributes(found, split)
        figures = [metrics.mean_of_groups, metrics.worst_group or metrics.worst_class]
        lines.append(
            [
                found["row"],
                str(metrics.seeds),
                _short(metrics.accuracy),
                *(f"{100 * metrics.groups[group].value:.1f}" if group in metrics.groups else "" for group in groups),
                *map(_short, map(accuracies.get, attributes) if attributes else figures),
                *(_short(Estimate(**sight[name])) if name in sight else "" for name in SIGHT),
            ]
        )
    return header, lines


def _attributes(found: Mapping[str, Any], split: str) -> dict[str, Estimate]:
    return {name: Estimate(**one) for name, one in found.get("attributes", {}).get(split, {}).items()}


def paired_cells(pairs: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    named = list(dict.fromkeys(name for pair in pairs for name in pair if "verdict" in pair[name]))
    header = ["", "against", "seeds", *(text for name in named for text in (name.replace("_", " "), ""))]
    return header, [
        [pair["row"], pair["against"], " and ".join(str(pair["seeds"][pair[name]]) for name in ("row", "against"))]
        + [text for name in named for text in (_short(_gain(pair, name)), pair[name]["verdict"])]
        for pair in pairs
    ]


def _gain(pair: Mapping[str, Any], name: str) -> Estimate:
    return Estimate(**{key: value for key, value in pair[name].items() if key != "verdict"})


def _short(one: Estimate | None) -> str:
    if one is None:
        return ""
    return f"{100 * one.value:{'+' if one.difference else ''}.1f} {one.interval}"


def show(results: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]], split: str, *, markdown: bool) -> None:
    titles = f"On the {split} data, per cent:", "Differences on the same images, points:"
    for title, (header, lines) in zip(titles, (table_cells(results, split), paired_cells(pairs)), strict=True):
        if not lines:
            continue
        if markdown:
            print("\n".join([title, "", *as_markdown(header, lines), ""]))
            continue
        table = Table(*header, box=None, pad_edge=False)
        for line in lines:
            table.add_row(*line)
        Console(highlight=False, width=240).print(title, table, markup=False)


def as_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*lines, strict=True)
    rule = ["--:" if any(cell[:1] in set("+-0123456789") for cell in column) else "---" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def show_figures(rows: Iterable[tuple[str, str, int, str, Mapping[str, Any]]]) -> None:
    """Set, row, seeds, intervention and figures, a line each."""
    table = Table("set", "row", "seeds", "under", "figures", box=None, pad_edge=False)
    for kind, name, seeds, how, figures in rows:
        said = [f"{key} {_short(_gain(figures, key))}" for key in figures]
        table.add_row(kind, name, str(seeds), how, escape(", ".join(said)))
    Console(highlight=False, width=240).print(table)
