"""Waterbirds v1.0: one object for each run, and one with intervals for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evidence import facts_of, predictions_of, read_json
from rows import folder_of
from rows.waterbirds_v1 import ALL, method_and_recipe
from sightline.metrics.estimates import Metrics, read_metrics
from sightline.metrics.groups import evaluate_seeds
from tables import MANY_GROUPS


def v1_runs(runs: Path) -> list[dict[str, Any]]:
    """Of every set under `runs`, in the order of the rows, by seed."""
    folders = [path.parent for path in sorted(runs.glob("*/*/metrics.json"))]
    found = [record_of(one) for one in folders if "sees" in facts_of(one).get("benchmark", {})]  # or it was interrupted
    order = {name: k for k, name in enumerate(dict.fromkeys([*ALL, *(one["row"] for one in found)]))}
    return sorted(found, key=lambda one: (one["set"], order[one["row"]], one["seed"]))


def record_of(folder: Path) -> dict[str, Any]:
    facts = facts_of(folder)
    known, rule = facts["benchmark"], facts["selection"]
    splits = {split: Metrics.from_dict(one) for split, one in read_metrics(folder / "metrics.json")["splits"].items()}
    method, recipe = method_and_recipe(known["row"])
    selection = f"{rule['metric']} on {rule['on']}" if rule["metric"] else "nothing selected"
    record = {"set": known["set"], "row": known["row"], "method": method, "recipe": recipe, "seed": facts["seed"]}
    record |= {"selection": selection} | figures_of(splits["test"])
    if "val" in splits:
        worst = splits["val"].worst_group or splits["val"].worst_class
        record["val"] = {"balanced": number(splits["val"].balanced), "worst_group": number(worst)}
    cost = known.get("cost") or {}
    return record | sight_of(folder, known["sees"]) | {
        "blind": known["sees"]["blind"] and not known["sees"]["everything"], "parameters": known["sees"]["parameters"],
        "gflops": cost.get("gflops"), "seconds": known["seconds"], "command": f"sightline train {known['line']}",
        "commit": known["commit"],
    }  # fmt: skip


def v1_rows(folder: Path, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every row of every set, the figures over its seeds, with intervals over images and seeds."""
    found = []
    for kind, name in dict.fromkeys((one["set"], one["row"]) for one in runs):
        some = [one for one in runs if (one["set"], one["row"]) == (kind, name)]
        folders = [folder_of(folder / kind, name, one["seed"]) for one in some]
        counts = facts_of(folders[0])["data"]["counts"]["train"]
        metrics = evaluate_seeds(predictions_of(folders, "test"), train_group_counts=counts)
        figures = {one: getattr(metrics, one) for one in ("accuracy", "adjusted", "mean_of_groups", "worst_group")}
        figures["worst_group"] = figures["worst_group"] or metrics.worst_class
        groups = metrics.groups if len(metrics.groups) <= MANY_GROUPS else {}
        row = {"set": kind, "row": name, "selection": some[0]["selection"], "seeds": [one["seed"] for one in some]}
        row |= {key: asdict(one) for key, one in figures.items() if one is not None}
        found.append(row | {"groups": {key: asdict(one) for key, one in groups.items()}})
    return found


def figures_of(metrics: Metrics) -> dict[str, Any]:
    return {
        "n": metrics.n, "accuracy": number(metrics.accuracy), "adjusted": number(metrics.adjusted),
        "worst_group": number(metrics.worst_group or metrics.worst_class),
        "groups": {name: number(one) for name, one in metrics.groups.items() if len(metrics.groups) <= MANY_GROUPS},
    }  # fmt: skip


def sight_of(folder: Path, sees: dict[str, Any]) -> dict[str, Any]:
    """Of the test images; a method that sees everything covers all of each image."""
    if sees["everything"]:
        return {"pixel_iou": None, "coverage": 1.0}
    path = folder / "localization.json"
    figures = read_json(path)["splits"].get("test", {}).get("figures", {}) if path.exists() else {}
    return {name: round(figures[name]["value"], 4) if name in figures else None for name in ("pixel_iou", "coverage")}


def number(estimate: Any) -> float | None:
    return None if estimate is None else round(estimate.value, 4)


def show_runs(runs: Sequence[dict[str, Any]]) -> None:
    """A line for each row, with the means over its seeds."""
    columns = ("accuracy", "adjusted", "worst_group", "pixel_iou", "coverage")
    table = Table("set", "row", "selection", "seeds", *(name.replace("_", " ") for name in columns), "worst", box=None)
    for kind, name in dict.fromkeys((one["set"], one["row"]) for one in runs):
        some = [one for one in runs if (one["set"], one["row"]) == (kind, name)]
        means = [mean([one[column] for one in some]) for column in columns]
        worst = ", ".join(f"{100 * one['worst_group']:.1f}" for one in some)
        table.add_row(kind, name, some[0]["selection"], str(len(some)), *means, worst)
    Console(highlight=False, width=200).print(table)


def mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f}" if len(known) == len(values) else ""
