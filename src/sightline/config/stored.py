"""Configurations read back from run.json, typed again; and the one table of what older formats called things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from .training import Train

FORMAT = 2  # of the run folder; run.json without a number is format 1
Config = TypeVar("Config", bound=Train)

# What format 1 called a setting, by method ("" for all): its name now, and how its values changed.
RENAMED: dict[str, dict[str, tuple[str, Mapping[Any, Any]]]] = {
    "": {"tune_selector": ("tune_selector", {True: "all", False: "tokens"})},
    "early-mask": {"pixels": ("sight", {True: "pixels", False: "patches"})},
    "late-mask": {"pixels": ("sight", {True: "pixels", False: "patches"})},
}

# What runs did that were trained before a setting existed, where that is not its default now.
BEFORE_IT_EXISTED: dict[str, dict[str, Any]] = {"ifam": {"sight": "patches"}}


def renamed_keys(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a format 1 run by their names and values of today."""
    table = RENAMED[""] | RENAMED.get(method, {})
    now = {}
    for name, value in values.items():
        new, changed = table.get(name, (name, {}))
        now[new] = changed[value] if isinstance(value, str | bool) and value in changed else value
    return now


def stored_config(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The dataclass that `dataclasses.asdict` and JSON made these values of; settings it does not know are ignored."""
    hints, missing = get_type_hints(kind), BEFORE_IT_EXISTED.get(kind.method, {})
    known = {field.name for field in fields(kind)}
    given = missing | {name: value for name, value in values.items() if name in known}
    return kind(**{name: typed(value, hints[name]) for name, value in given.items()})


def typed(value: Any, hint: Any) -> Any:
    """A JSON value as the type that a field is declared with: paths, tuples and nested dataclasses are no JSON."""
    if is_dataclass(hint):
        return hint(**value)
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and (hint is Path or Path in get_args(hint)):
        return Path(value)
    return value
