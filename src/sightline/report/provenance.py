"""What a run is: how it came about, and the command that makes it again."""

from __future__ import annotations

import shlex
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

from torch import nn

from .. import __version__
from ..config.flags import flag_name
from ..data.rows import SPLITS
from ..methods import METHODS
from ..training.run_folder import NEUTRAL, Run
from ..vit.weights import weights_sha256
from .case import Case

NO_FLAGS = NEUTRAL | {"data", "layout"}


def facts(case: Case) -> dict[str, str]:
    run, asked = case.model.run.facts, case.asked
    backbone, chosen = run.get("backbone") or {}, run.get("selection") or {}
    versions = run.get("versions", {})
    rule = f"{chosen['metric']} on the {chosen['on']} data" if chosen.get("metric") else "nothing was selected"
    said = {
        "Method": run["method"],
        "Backbone": run["config"].get("backbone") or backbone.get("name") or backbone.get("file") or "not known",
        "Data": f"{asked.rows.name}{'' if asked.own else ' (not those it was trained on)'}",
        "Fingerprint of the data": asked.fingerprint[:16],
        "Masks": case.masks_from,
        "Weights chosen by": rule,
        "Seed": str(run.get("seed", "not known")),
        "Fingerprint of the weights": weights_sha256(cast(nn.Module, case.method))[:16],
        "Trained with": ", ".join(f"{name} {version}" for name, version in versions.items()) or "not known",
        "Report written with": f"sightline {__version__}",
        "Intervention": intervention_words(case),
    }
    more = ["--quick"] * case.command.quick
    said |= {"Trained by": training_command(case.model.run), "This report": command_for(case, "audit", *more)}
    return {name: text for name, text in said.items() if text}


def intervention_words(case: Case) -> str:
    if case.parts is None:
        return "this method discovers no parts to intervene in"
    if not case.intervention.changes:
        return "none is applied"
    found = case.intervention.facts.get("found")
    how = f", found on the {found['split']} data of {found['data']}" if found else ", chosen by hand"
    return f"{case.intervention.words}{how}"


def counts(case: Case) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Groups (or classes), and of every split how many pictures are of each: of training, those of the run's own."""
    from ..data.rows import group_table

    table = group_table(case.rows)
    return list(case.rows.cells[1]), [(split, table[i].tolist()) for i, split in enumerate(SPLITS)]


# ---- commands --------------------------------------------------------------------------------------------------------


def training_command(run: Run) -> str:
    """With every setting that is not the default; nothing where the run was not trained here."""
    config, entry = run.facts.get("config", {}), METHODS.get(run.facts.get("method", ""))
    if entry is None or "data" not in config:
        return ""
    data = run.facts["data"]
    layout = ["--layout", data["layout"]] if data.get("layout") else []
    said = ["sightline", "train", run.facts["method"], str(data.get("path", config["data"])), *layout]
    return shlex.join([*said, *flags(config, entry.config)])


def command_for(case: Case, name: str, *more: str) -> str:
    """That asks the same run about the same data."""
    said = case.command
    data = [] if said.data is None else [str(said.data)]
    layout = ["--layout", said.layout] if said.layout else []
    changed = [] if said.split == "test" else ["--split", said.split]
    changed += [*more, *["--no-intervention"] * (not said.intervention)]
    changed += ["--seed", str(said.seed)] * (said.seed != 0)
    changed += ["--masks", said.masks] if said.masks else []
    return shlex.join(["sightline", name, str(said.run), *data, *layout, *changed])


def flags(config: dict[str, Any], kind: Any, prefix: str = "") -> list[str]:
    """As they are typed."""
    said = []
    for field in fields(kind):
        if field.name not in config or field.name in NO_FLAGS:
            continue
        value = config[field.name]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        name = f"--{prefix}{flag_name(kind, field.name)}"
        if is_dataclass(default) and isinstance(value, dict):
            usual = {one.name: getattr(default, one.name) for one in fields(default)}
            changed = {k: v for k, v in value.items() if v != usual.get(k)}
            said += flags(changed, type(default), f"{prefix}{field.name.replace('_', '-')}.")
        elif plain(value) != plain(default):
            said += flag(name, value, default)
    return said


def flag(name: str, value: Any, default: Any) -> list[str]:
    if isinstance(value, bool) and isinstance(default, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, *map(str, value)] if isinstance(value, list | tuple) else [name, str(value)]


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
