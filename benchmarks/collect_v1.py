"""Waterbirds v1.0: one object for each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evidence import facts_of, read_json
from rows.waterbirds_v1 import method_and_recipe
from sightline.metrics.estimates import Metrics, read_metrics


def v1_runs(runs: Path) -> list[dict[str, Any]]:
    """Of every set under `runs`, by row and seed."""
    found = [record_of(path.parent) for path in sorted(runs.glob("*/*/metrics.json"))]
    order = {name: k for k, name in enumerate(dict.fromkeys(one["row"] for one in found))}
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


def figures_of(metrics: Metrics) -> dict[str, Any]:
    return {
        "n": metrics.n, "accuracy": number(metrics.accuracy), "adjusted": number(metrics.adjusted),
        "worst_group": number(metrics.worst_group or metrics.worst_class),
        "groups": {name: number(one) for name, one in metrics.groups.items()},
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
    table = Table("row", "selection", "seeds", *(name.replace("_", " ") for name in columns), "each seed", box=None)
    for name in dict.fromkeys(one["row"] for one in runs):
        some = [one for one in runs if one["row"] == name]
        means = [mean([one[column] for one in some]) for column in columns]
        worst = ", ".join(f"{100 * one['worst_group']:.1f}" for one in some)
        table.add_row(name, some[0]["selection"], str(len(some)), *means, worst)
    Console(highlight=False, width=200).print(table)


def mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f}" if len(known) == len(values) else ""
