"""Train and measure the rows of a study that are missing, several in parallel, and write its result file.

    sightline data waterbirds --cub PACKS --scenes PACKS --out data/birds                  # and the other datasets
    python benchmarks/run.py waterbirds --data birds=data/birds --backbones TI=vit_ti16_augreg_in1k.safetensors \\
        SELF=dino_s16_reg4.safetensors U2NET=u2netp.onnx --out wbr_ti_papers.json
    python benchmarks/run.py waterbirds --data o2o=data/o2o --table shifts --backbones ... --out shift_o2o.json
    python benchmarks/run.py interventions --data cub=... object=... pair=... birds=... mixed=... --packs PACKS \\
        --backbones TI=... --out interventions_h200.json
    python benchmarks/run.py relevance --data birds=... cub=... si=... imagenet=... --backbones TI=... SELF=... \\
        --out relevance_h200.json
    python benchmarks/run.py v1 --data birds=data/v1 --backbones TI=vit_ti16_augreg_in1k.safetensors \\
        SELF=dino_s16_reg4.safetensors --out waterbirds_v1.json
    python benchmarks/run.py a2 --data birds=... o2o=... m2m=... disjoint=... displaced=... \\
        --backbones S=dino_s16_reg4.safetensors Ti=vit_ti16_augreg_in1k.safetensors --out a2_h200.json

The rows are data: rows/STUDY.py. There is a run folder for each row and seed, RUNS/SET/ROW-SEED, and a JSON line for
each job. Finished rows are skipped and interrupted ones resumed: run the same command again. `--collect` runs nothing
and needs neither data nor weights: what `--pack` wrote elsewhere, and `--unpack` brought here, is enough. Checkpoints,
learning rates, looks and interventions are selected on validation data. Then `benchmarks/claims.py` decides the claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from collect import a2_results, interventions_results, is_in, relevance_results, short, with_looks_once, with_rows_of
from collect_v1 import show_runs, v1_rows, v1_runs
from evidence import about, facts_of
from jobs import lacking, run_row, weights_missing
from lanes import Job, deadline_in, report, run_parallel
from options import Benchmark, is_wanted
from packing import pack_all, unpack_all
from record import record
from rows import a2, folder_of, relevance
from sightline.errors import UserError
from stages import STUDIES, Stage, context_of, interventions_rows, waterbirds_rows
from study import Context
from tables import paired, result_of, show, show_figures


def run(config: Benchmark) -> None:
    deadline, context = deadline_in(config.minutes), context_of(config)
    if not config.data or (config.train and not config.backbones):
        raise UserError("--data SET=FOLDER and --backbones NAME=FILE: name them, or --collect what is finished")
    for stage in STUDIES[config.study].stages:
        run_stage(config, context, [one for one in stage(config, context) if is_wanted(config, one[0])], deadline)


def run_stage(config: Benchmark, context: Context, rows: Stage, deadline: float | None) -> None:
    """What is timed comes last, alone on the device."""
    keeps = STUDIES[config.study].keeps_weights
    for timed, lanes in ((False, config.parallel), (True, 1)):
        jobs, coming = [], []
        for row, note in rows:
            left = lacking(context, row)
            if row.timed != timed or not (config.train if left == ["training"] else config.measure and left):
                continue
            if lost := weights_missing(context, row, note, coming):
                report(row.about | {"skipped": lost})
                continue
            coming.append(row)
            jobs.append(Job(row.about, run_row, (context, row, note, config.measure, keeps)))
        run_parallel(jobs, lanes, deadline)


def list_rows(config: Benchmark) -> None:
    """Of every stage, as far as it can be known."""
    table = Table("set", "row", "seed", "lacks", "sightline train", box=None, pad_edge=False)
    context = context_of(config)
    for stage in STUDIES[config.study].stages:
        for row, _ in (one for one in stage(config, context) if is_wanted(config, one[0])):
            table.add_row(row.set, row.name, str(row.seed), ", ".join(lacking(context, row)), row.line)
    console = Console(highlight=False, width=220)
    console.print(f"sets: {STUDIES[config.study].sets}", markup=False)
    console.print(table)


# ---- result files ----------------------------------------------------------------------------------------------------


def waterbirds_content(config: Benchmark, context: Context) -> dict[str, Any]:
    sets = config.sets or tuple(context.data) or tuple(path.name for path in config.folder.glob("*") if path.is_dir())
    if len(set(sets) - {"cache"}) != 1:
        raise UserError(f"--sets: name the one to collect, of {', '.join(sets) or 'none'}")
    (kind,), split = set(sets) - {"cache"}, config.splits[-1]
    rows = [row for row in waterbirds_rows(config, [kind]) if is_wanted(config, row)]
    lines, seeds = {row.name: row.line for row in rows}, sorted({row.seed for row in rows})
    runs = config.folder / kind
    results = [
        found
        for name, line in lines.items()
        if (found := result_of(runs, name, line, config.splits, seeds)) is not None
    ]
    pairs = paired(runs, lines, split, seeds)
    show(results, pairs, split, markdown=config.markdown)
    missing = {f"{row.name}, seed {row.seed}": left for row in rows if (left := lacking(context, row))}
    if missing:
        print("missing:", "; ".join(f"{name}: {', '.join(left)}" for name, left in missing.items()))
    if not results:
        return {}
    facts = about(facts_of(folder_of(runs, results[0]["row"], results[0]["seeds"][0])))
    note = {"note": config.note} if config.note else {}
    return facts | note | {"rows": results, "paired": pairs, "missing": missing}


def interventions_content(config: Benchmark, context: Context) -> dict[str, Any]:
    rows = [row for row in interventions_rows() if is_wanted(config, row)]
    found = interventions_results(config.folder, rows)
    found = with_rows_of(config.before, found) if config.before else found
    show_figures(
        (kind, name, len(one["seeds"]), how, figures)
        for kind, some in found.items()
        for name, one in some.items()
        for how, figures in one["figures"].items()
    )
    missing = [
        {"set": row.set, "name": row.name, "line": row.line, "seed": row.seed, "lacks": left}
        for row in rows
        if (left := lacking(context, row)) and not is_in(found, row)
    ]
    if missing:
        print("missing:", "; ".join(f"{one['set']}, {one['name']}, seed {one['seed']}" for one in missing))
    return {"note": config.note, "sets": found, "missing": missing} if found else {}


def relevance_content(config: Benchmark, context: Context) -> dict[str, Any]:  # noqa: ARG001 (as of every study)
    found = relevance_results(config.folder)
    for kind, one in found.items():
        lines = [(kind, row["row"], len(row["seeds"]), "", estimates_in(row)) for row in one["rows"]]
        differences = [
            (kind, f"{pair['row']} − {pair['against']}", pair.get("seeds", 0), "", estimates_in(pair))
            for pair in one["paired"]
        ]
        show_figures([*lines, *differences])
        for warning in one["warnings"]:
            print(f"warning: {kind}: {warning}")
    facts = {"note": config.note, "rule": relevance.RULE, "limit": config.limit}
    return facts | {"sets": found} if found else {}


def estimates_in(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in row.items() if isinstance(one, dict) and "low" in one}


def a2_content(config: Benchmark, context: Context) -> dict[str, Any]:  # noqa: ARG001 (as of every study)
    found = a2_results(config.folder)
    for name, one in found.items():
        print(f"\n{name}")
        if one["rows"]:
            show(one["rows"], one["paired"], "test", markdown=config.markdown)
    sets = {name: with_looks_once(short(one)) for name, one in found.items()}
    note = {"note": config.note} if config.note else {}
    return note | {"looks_chosen_by": a2.RULE, "sets": sets} if found else {}


def v1_content(config: Benchmark, context: Context) -> dict[str, Any]:  # noqa: ARG001 (as of every study)
    runs = v1_runs(config.folder)
    if not runs:
        return {}
    show_runs(runs)
    facts = about(facts_of(folder_of(config.folder / runs[0]["set"], runs[0]["row"], runs[0]["seed"])))
    note = {"note": config.note} if config.note else {}
    return (
        {name: facts[name] for name in ("backbone", "data", "trained_on")}
        | note
        | {"rows": v1_rows(config.folder, runs), "runs": runs}
    )


CONTENT = {
    "v1": v1_content,
    "waterbirds": waterbirds_content,
    "interventions": interventions_content,
    "relevance": relevance_content,
    "a2": a2_content,
}


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Benchmark, args=arguments, description=__doc__)
    if config.unpack:
        unpack_all(config.unpack, config.folder)
    if config.list:
        list_rows(config)
        return
    if not config.collect:
        run(config)
    content = CONTENT[config.study](config, context_of(replace(config, data=()) if config.collect else config))
    if config.out and content:
        record(config.out, "cpu", content)
    if config.pack:
        short = {"outcomes": config.study == "interventions", "digits": 4 if config.study == "v1" else None}
        for line in pack_all(config.folder, config.pack, **short):
            report(line)


if __name__ == "__main__":
    main()
