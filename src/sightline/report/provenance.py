"""Provenance of a run: its facts, and the commands that reproduce it."""

from __future__ import annotations

import shlex
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

from torch import nn

from .. import __version__
from ..data.rows import SPLITS
from ..methods import METHODS
from ..metrics.estimates import METRIC_LABELS
from ..training.run_folder import NEUTRAL, Run
from ..vit.weights import weights_sha256
from .case import ReportContext

NO_FLAGS = NEUTRAL | {"data", "layout"}


def run_facts(context: ReportContext) -> dict[str, str]:
    run, dataset = context.model.run.facts, context.dataset
    backbone, chosen = run.get("backbone") or {}, run.get("selection") or {}
    versions = run.get("versions", {})
    rule = f"{metric_label(chosen['metric'])} on {chosen['on']} data" if chosen.get("metric") else "no selection"
    listed = {
        "Method": run["method"],
        "Backbone": run["config"].get("backbone") or backbone.get("name") or backbone.get("file") or "unknown",
        "Data": f"{dataset.rows.name}{'' if dataset.own else ' (other than the training data)'}",
        "Data fingerprint": dataset.fingerprint[:16],
        "Masks": context.masks_from,
        "Checkpoint selected by": rule,
        "Seed": str(run.get("seed", "unknown")),
        "Weights fingerprint": weights_sha256(cast(nn.Module, context.method))[:16],
        "Versions in training": ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown",
        "Version of this report": f"sightline {__version__}",
        "Intervention": describe_intervention(context),
    }
    more = ["--quick"] * context.command.quick
    listed["Training command"] = training_command(context.model.run)
    listed["Report command"] = command_for(context, "audit", *more)
    return {name: text for name, text in listed.items() if text}


def metric_label(rule: str) -> str:
    """The rule as recorded begins with the name of a metric; here with what the report calls it."""
    name, space, rest = rule.partition(" ")
    return METRIC_LABELS.get(name.replace("-", "_"), name) + space + rest


def describe_intervention(context: ReportContext) -> str:
    if context.parts is None:
        return "not applicable: the method has no discovered parts"
    if not context.intervention.changes:
        return "none"
    found = context.intervention.facts.get("found")
    how = f", selected on {found['split']} data of {found['data']}" if found else ", set by hand"
    return f"{context.intervention.description}{how}"


def split_counts(context: ReportContext) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Groups (or classes), and the number of images of each in every split."""
    from ..data.rows import group_table

    table = group_table(context.rows)
    return list(context.rows.cells[1]), [(split, table[i].tolist()) for i, split in enumerate(SPLITS)]


# ---- commands --------------------------------------------------------------------------------------------------------


def training_command(run: Run) -> str:
    """With every non-default setting; empty if the run was not trained by Sightline."""
    config, entry = run.facts.get("config", {}), METHODS.get(run.facts.get("method", ""))
    if entry is None or "data" not in config:
        return ""
    data = run.facts["data"]
    layout = ["--layout", data["layout"]] if data.get("layout") else []
    path = str(data.get("path", config["data"]))
    return shlex.join(["sightline", "train", run.facts["method"], path, *layout, *flags(config, entry.config)])


def command_for(context: ReportContext, name: str, *more: str) -> str:
    """Another command for the same run and data."""
    command = context.command
    data = [] if command.data is None else [str(command.data)]
    layout = ["--layout", command.layout] if command.layout else []
    changed = [] if command.split == "test" else ["--split", command.split]
    changed += [*more, *["--no-intervention"] * (not command.intervention)]
    changed += ["--seed", str(command.seed)] * (command.seed != 0)
    changed += ["--masks", command.masks] if command.masks else []
    return shlex.join(["sightline", name, str(command.run), *data, *layout, *changed])


def flags(config: dict[str, Any], kind: Any, prefix: str = "") -> list[str]:
    """The command-line flags of all non-default settings."""
    typed = []
    for field in fields(kind):
        if field.name not in config or field.name in NO_FLAGS:
            continue
        value = config[field.name]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        name = f"--{prefix}{field.name.replace('_', '-')}"
        if is_dataclass(default) and isinstance(value, dict):
            defaults = {one.name: getattr(default, one.name) for one in fields(default)}
            changed = {k: v for k, v in value.items() if v != defaults.get(k)}
            typed += flags(changed, type(default), f"{prefix}{field.name.replace('_', '-')}.")
        elif as_list(value) != as_list(default):
            typed += flag(name, value, default)
    return typed


def flag(name: str, value: Any, default: Any) -> list[str]:
    if isinstance(value, bool) and isinstance(default, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *map(str, value)] if isinstance(value, list | tuple) else [name, str(value)]


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
