"""The studies: their datasets, and their rows stage by stage, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lanes import report
from options import Benchmark, is_wanted, named
from rows import Row, a2, interventions, relevance, waterbirds, waterbirds_v1
from selection import matched_states, selected_looks, selected_rates, validation_score
from sightline.errors import UserError
from study import Context

Stage = list[tuple[Row, dict[str, Any]]]  # with what is noted in run.json beside the row


def context_of(config: Benchmark) -> Context:
    cache = config.cache or config.folder.with_name(f"{config.folder.name}-cache")
    data = {name: Path(path) for name, path in named("--data", config.data).items()}
    known = STUDIES[config.study].sets
    if known and (unknown := set(data) | set(config.sets)) - set(known):
        raise UserError(f"{sorted(unknown - set(known))[0]!r}: the sets of {config.study} are {', '.join(known)}")
    files: dict[str, str] = named("--backbones", config.backbones)
    if config.study == "relevance":
        data = {
            kind: relevance.write_datasets(path, cache / kind, kind, config.val)
            for kind, path in data.items()
            if kind in (config.sets or data)
        }
    if config.study == "a2":
        family = a2.Family.in_folder(data.get("family"))
        files |= {name: file for name, file in family.files.items() if name not in files}
        if "birds" in data:
            data["turned"] = a2.turned_round(data["birds"], cache / "turned")
        if "family" in data:
            data["family"] = data["family"] / "toy"
    return Context(
        data, files, config.folder, cache, STUDIES[config.study].flags, config.device, config.precision,
        config.workers, config.compile, config.epochs, config.splits, config.packs, config.noise, config.limit,
        config.subsets,
    )  # fmt: skip


# ---- the studies: which rows, in which order -------------------------------------------------------------------------


def waterbirds_rows(config: Benchmark, sets: Iterable[str]) -> list[Row]:
    asked: Any = {"seeds": config.seeds, "every": bool(config.rows), "file": config.rows_file}
    return [row for kind in sets for row in waterbirds.rows_of(kind, config.table, **asked)]


def waterbirds_stage(config: Benchmark, context: Context) -> Stage:
    rows = sorted(waterbirds_rows(config, context.data), key=lambda row: row.method == "probe")
    return [(row, {}) for row in rows]


def interventions_rows() -> list[Row]:
    """What claims are decided by first, then further seeds, then rows beside them, and last what is timed."""
    from claims_interventions import deciding_rows

    deciding = deciding_rows()

    def order(row: Row) -> tuple[int, int]:
        first = (row.set, row.name) in deciding
        return (3 if row.timed else 1 if row.seed else 0 if first else 2), row.seed

    return sorted((row for kind in interventions.SETS for row in interventions.rows_of(kind)), key=order)


def interventions_stage(config: Benchmark, context: Context) -> Stage:  # noqa: ARG001 (as every stage)
    return [(row, {"cost": None}) for row in interventions_rows() if row.set in context.data]


def relevance_stage(rows_of: Callable[[str], list[Row]]) -> Callable[[Benchmark, Context], Stage]:
    def stage(config: Benchmark, context: Context) -> Stage:  # noqa: ARG001 (as every stage)
        return in_turn((row, {"rate": None}) for kind in context.data for row in rows_of(kind))

    return stage


def relevance_selected(config: Benchmark, context: Context) -> Stage:
    found = []
    for kind, home in context.data.items():
        rates = selected_rates(context.runs / kind, home / "few.csv", kind)
        for row in relevance.selected_rows(kind):
            of = relevance.SELF_SUPERVISED * row.name.endswith(relevance.SELF_SUPERVISED)
            rate = rates.get(row.method + of)
            if "RATE" not in row.line:
                found.append((row, {"rate": None}))
            elif rate is not None:
                found.append((replace(row, line=row.line.replace("RATE", rate["rate"])), {"rate": rate}))
            elif is_wanted(config, row):
                report(row.about | {"skipped": "no learning rate was selected"})
    return in_turn(found)


def in_turn(rows: Iterable[tuple[Row, dict[str, Any]]]) -> Stage:
    """The headline rows of all sets before others, seed by seed, and of every set one after the other."""
    keyed, before = [], {}
    for row, note in rows:
        before[row.set] = before.get(row.set, 0) + 1
        keyed.append(((row.name not in relevance.HEADLINES, row.seed, before[row.set]), (row, note)))
    return [asked for _, asked in sorted(keyed, key=lambda one: one[0])]


def a2_backbones(config: Benchmark, context: Context, kind: str) -> list[a2.Backbone]:
    from attention import opened_backbone

    sizes = a2.Family.in_folder(path.parent if (path := context.data.get("family")) else None).final
    found = []
    for name, file in sizes if kind == "toy" else named("--backbones", config.backbones).items():
        shape = opened_backbone(file).config
        found.append(a2.Backbone(name, file, shape.heads, shape.depth, shape.input.size[0]))
    return found


def a2_sets(context: Context) -> list[str]:
    return [kind for kind in a2.SETS if kind in context.data and kind not in ("displaced", "family")]


def a2_first(config: Benchmark, context: Context) -> Stage:
    rows = [row for kind in a2_sets(context) for row in a2.first_rows(kind, a2_backbones(config, context, kind))]
    if "family" in context.data:
        rows += a2.Family.in_folder(context.data["family"].parent).rows()
    return [(row, {"look": None}) for row in adapters_first(rows)]


def a2_second(config: Benchmark, context: Context) -> Stage:
    """With the look that validation data selected, which is noted with every row of A²."""
    found: Stage = []
    backbones = {kind: a2_backbones(config, context, kind) for kind in a2_sets(context)}
    looks = {kind: selected_looks(context.runs / kind, some) for kind, some in backbones.items()}
    for kind, some in backbones.items():
        by = {name: look for name, (look, _) in looks[kind].items()}
        if len(by) < len(some) and kind != "turned":
            report({"set": kind, "skipped": "no look was tried, so none can be selected"})
            continue
        birds = looks.get("birds", {}).get(some[0].name)
        for row in a2.second_rows(kind, some, by, birds[0] if birds else None):
            where = row.name.removeprefix("A2 ").partition(">")[0]
            of_a2 = row.name.startswith("A2 ") and where in looks[kind]
            found.append((row, {"look": looks[kind][where][1] if of_a2 else None}))
    if "toy" in context.data and "family" in context.data:
        family = a2.Family.in_folder(context.data["family"].parent)
        for size, state in matched_states(context.runs / "family", family).items():
            if state != size:
                plain = a2.a2(f"{size}-matched", family.sizes[-1], a2.PLAIN_LOOK, a2.PLAIN_LOOK.words)
                lines = {name: line.replace(f"@{size}-matched", f"@{state}") for name, line in plain.items()}
                found += [(Row("toy", name, line), {"look": None}) for name, line in lines.items()]
    return sorted(found, key=lambda one: not one[0].name.startswith("adapter"))


def adapters_first(rows: Iterable[Row]) -> list[Row]:
    """They take longest; and where the family attends comes last."""
    return sorted(rows, key=lambda row: (row.set == "family", not row.name.startswith("adapter")))


def v1_first(config: Benchmark, context: Context) -> Stage:  # noqa: ARG001 (as every stage)
    return [(row, waterbirds_v1.NOTED) for kind in context.data for row in waterbirds_v1.first_rows(kind)]


def v1_next(config: Benchmark, context: Context) -> Stage:  # noqa: ARG001 (as every stage)
    """Hyperparameters are selected with the first seed."""
    found = []
    for kind in context.data:
        selected = waterbirds_v1.selected_of_grids(lambda name, kind=kind: validation_score(context.runs / kind, name))
        found += waterbirds_v1.next_rows(kind, selected)
    return [(row, waterbirds_v1.NOTED) for row in found]


@dataclass(frozen=True)
class Study:
    sets: dict[str, str]
    stages: tuple[Callable[[Benchmark, Context], Stage], ...]
    flags: str = ""
    keeps_weights: bool = True


STUDIES = {
    "waterbirds": Study({}, (waterbirds_stage,)),
    "interventions": Study(interventions.SETS, (interventions_stage,)),
    "relevance": Study(
        relevance.SETS,
        (relevance_stage(relevance.starting_rows), relevance_stage(relevance.rate_rows), relevance_selected),
    ),
    "v1": Study(waterbirds_v1.SETS, (v1_first, v1_next)),
    "a2": Study(a2.SETS, (a2_first, a2_second), "--batch 512", keeps_weights=False),
}
