"""What JSON files that are read back must look like: run.json, intervention.json, and the configurations inside them.

Types are written as type hints with limits (see `limits`), JSON objects as `TypedDict`. A file is refused in one line
that names the place, before anything is built from it. Keys that are not declared are ignored: a later version of
Sightline may add some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import UserError
from .limits import Count, Seed, Side, Whole, Within, misfit, shortened

MOST_BYTES = 64 << 20  # of a JSON file
Length = Annotated[int, Within(1, 10**6)]


class DataFacts(TypedDict, total=False):
    name: str
    classes: list[str]
    group_names: list[str]
    counts: dict[str, dict[str, Whole]]
    notes: list[str]
    images: Whole
    path: str | None
    layout: str | None
    fingerprint: str


class Selection(TypedDict, total=False):
    metric: str | None
    on: str | None


class Selector(TypedDict, total=False):
    vit: dict[str, Any]
    backbone: dict[str, Any] | None


class Crops(TypedDict, total=False):
    sides: list[str]
    layer: int | None
    heads: str | int | None
    seed: Whole | None
    size: list[Side]


class Adapted(TypedDict, total=False):
    candidates: list[str]
    of_candidates: Length
    size: list[Side]
    crops: Length
    patches: Length


class Tiles(TypedDict, total=False):
    size: list[Side]
    scales: list[Annotated[int, Within(1, 64)]]


class RunFacts(TypedDict, total=False):
    format: Count
    checksums: bool
    method: str
    config: dict[str, Any]
    data: DataFacts
    versions: dict[str, str]
    seed: Seed
    selection: Selection | None
    state: str
    vit: dict[str, Any]
    backbone: dict[str, Any] | None
    where: Selector | None
    crops: Crops
    adapted: Adapted
    tiles: Tiles
    queue: list[Length]
    clustering: dict[str, int | float]
    pool: dict[str, Length]
    selector_size: Side | None
    masks: str | None
    saliency_sha256: str


RUN_KEYS = {"method": str, "config": dict, "data": dict, "seed": int}
DATA_KEYS = ("classes", "group_names", "fingerprint")


class InterventionFile(TypedDict, total=False):
    drop: list[Whole]
    force: list[Whole]
    quantile: float | None
    thresholds: list[float | None] | None
    names: dict[str, str]
    facts: dict[str, Any]


def read_json(path: Path) -> Any:
    """JSON of a bounded size. OSError and ValueError are the caller's to explain."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_misfit(value: Any, hint: Any, place: str = "") -> str | None:
    """Where a JSON value does not fit a type, and why; None if it does."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        if not isinstance(value, dict):
            return at(place, value, "must be an object")
        hints = get_type_hints(hint, include_extras=True)
        found = (json_misfit(value[key], hints[key], f"{place}.{key}".lstrip(".")) for key in hints if key in value)
        return next(filter(None, found), None)
    if origin is dict:
        if not isinstance(value, dict):
            return at(place, value, "must be an object")
        found = (json_misfit(item, inner[1], f"{place}.{shortened(key)}".lstrip(".")) for key, item in value.items())
        return next(filter(None, found), None)
    if origin is list:
        if not isinstance(value, list):
            return at(place, value, "must be a list")
        found = (json_misfit(item, inner[0], f"{place}[{i}]") for i, item in enumerate(value))
        return next(filter(None, found), None)
    if origin is Union or type(hint).__name__ == "UnionType":
        problems = [json_misfit(value, arm, place) for arm in inner if arm is not type(None)]
        return None if (value is None and type(None) in inner) or None in problems else problems[0]
    problem = misfit(value, hint)
    return None if problem is None else at(place, value, problem)


def at(place: str, value: Any, problem: str) -> str:
    return f"{place or 'its content'} is {shortened(value)}: {problem}"


def check_run_facts(facts: Any, path: Path) -> dict[str, Any]:
    """run.json, as far as everything relies on it."""
    problem = json_misfit(facts, RunFacts)
    if problem is None and isinstance(facts, dict):
        absent = [key for key in RUN_KEYS if key not in facts]
        absent += [f"data.{key}" for key in DATA_KEYS if key not in facts.get("data", {key: 0})]
        problem = f"has no {absent[0]}" if absent else None
    if problem is not None:
        raise UserError(f"{path}: damaged ({problem}); restore it, or train again")
    return facts
