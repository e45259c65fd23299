"""Train and measure the rows of a study that are missing, several in parallel, and write its result file.

    sightline data waterbirds --cub PACKS --scenes PACKS --out data/birds                  # and the other datasets
    python benchmarks/run.py waterbirds --data birds=data/birds --backbones TI=vit_ti16_augreg_in1k.safetensors \\
        SELF=dino_s16_reg4.safetensors U2NET=u2netp.onnx --out wbr_ti_papers.json
    python benchmarks/run.py waterbirds --data o2o=data/o2o --table shifts --backbones ... --out shift_o2o.json
    python benchmarks/run.py interventions --data cub=... object=... pair=... birds=... mixed=... --packs PACKS \\
        --backbones TI=... --out interventions_h200.json
    python benchmarks/run.py relevance --data birds=... cub=... si=... imagenet=... --backbones TI=... SELF=... \\
        --out relevance_h200.json
    python benchmarks/run.py a2 --data birds=... o2o=... m2m=... disjoint=... displaced=... \\
        --backbones S=dino_s16_reg4.safetensors Ti=vit_ti16_augreg_in1k.safetensors --out a2_h200.json

The rows are data: rows/STUDY.py. There is a run folder for each row and seed, RUNS/SET/ROW-SEED, and a JSON line for
each job. Finished rows are skipped and interrupted ones resumed: run the same command again. `--collect` runs nothing
and needs neither data nor weights: what `--pack` wrote elsewhere, and `--unpack` brought here, is enough. Checkpoints,
learning rates, looks and interventions are selected on validation data. Then `benchmarks/claims.py` decides the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from collect import a2_results, interventions_results, is_in, relevance_results, short, with_looks_once, with_rows_of
from evidence import about, facts_of
from jobs import lacking, run_row, weights_missing
from lanes import Job, deadline_in, report, run_parallel
from packing import pack_all, unpack_all
from record import record
from rows import Row, a2, folder_of, interventions, relevance, waterbirds
from selection import matched_states, selected_looks, selected_rates
from sightline.errors import UserError
from study import Context
from tables import paired, result_of, show, show_figures

Stage = list[tuple[Row, dict[str, Any]]]  # with what is noted in run.json beside the row


@dataclass(frozen=True)
class Benchmark:
    study: Positional[Literal["waterbirds", "interventions", "relevance", "a2"]]
    data: tuple[str, ...] = ()
    """SET=FOLDER: what `sightline data` built. `--list` shows the sets of a study; waterbirds takes any. a2: also
    family=FOLDER of `pretrain.py family --keep-every 3 --runs FOLDER`, and toy=FOLDER of `sightline toy`."""
    backbones: tuple[str, ...] = ()
    """NAME=FILE. Rows that name no backbone start from the first; TI, SELF and U2NET are named in rows. a2: attention
    and embeddings of every pair; crops of the first one are counted, resized and adapted."""
    runs: Path | None = None
    """Default: runs/STUDY."""
    cache: Path | None = None
    """Decoded images and features, which are large. Default: RUNS-cache."""
    sets: tuple[str, ...] = ()
    """Only these sets."""
    rows: tuple[str, ...] = ()
    """Only these rows, such as 'iFAM K=4' or 'cub: iFAM*'; waterbirds: of any table, with every seed."""
    seeds: tuple[int, ...] = ()
    """Only these seeds."""
    table: str = "papers"
    """waterbirds: papers, pixels, shifts or rivals."""
    rows_file: Path | None = None
    """waterbirds: JSON, name -> arguments of `sightline train`, in place of a table."""
    parallel: int = 6
    """Rows at once."""
    workers: int = 2
    """Processes that decode images, of each row."""
    device: str = "auto"
    precision: str = "bf16"
    compile: bool = False
    """Compile the blocks of the ViTs, but of rows that are timed."""
    epochs: int | None = None
    """To try things out: of every row."""
    minutes: float | None = None
    """Stop after so long; what is in training then is saved, and resumed by the next call."""
    splits: tuple[str, ...] = ("val", "test")
    """waterbirds: where the sight is measured; the table is of the last one."""
    train: bool = True
    """Or only measure what is trained."""
    measure: bool = True
    """Or only train."""
    packs: Path | None = None
    """interventions: where the birds come from, for their key points."""
    noise: int = 40
    """interventions: searches on shuffled labels."""
    val: int = 160
    """relevance: validation images of what trains with few masks."""
    limit: int = 600
    """relevance: test images whose maps, curves and neighbours are measured."""
    subsets: int = 32
    """relevance: images of ImageNet whose sufficient pixels are searched for."""
    figures: bool = False
    """relevance: draw changes by class, and maps before and after, into the folder of runs."""
    list: bool = False
    """Only list the rows, and what they lack."""
    collect: bool = False
    """Run nothing; put together what is finished."""
    unpack: Path | None = None
    """First add the runs that --pack wrote into this folder."""
    pack: Path | None = None
    """A folder for the results of finished runs without weights, in .tar.xz files."""
    before: Path | None = None
    """interventions: a file that --out wrote: rows that are not there now, or not measured now, are taken from it; of
    rows that were trained again the figures of both are kept."""
    markdown: bool = False
    note: str = ""
    """Written beside the figures in --out."""
    out: Path | None = None

    @property
    def folder(self) -> Path:
        return self.runs or Path("runs") / self.study


def named(option: str, texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise UserError(f"{option} {text}: write NAME=PATH, such as TI=vit_ti16_augreg_in1k.safetensors")
        found[name] = value
    return found


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
    return [(row, {}) for row in waterbirds_rows(config, context.data)]


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
    "a2": Study(a2.SETS, (a2_first, a2_second), "--batch 512", keeps_weights=False),
}


# ---- running ---------------------------------------------------------------------------------------------------------


def is_wanted(config: Benchmark, row: Row) -> bool:
    names = (row.name, f"{row.set}: {row.name}")
    by_name = not config.rows or any(fnmatchcase(name, pattern) for name in names for pattern in config.rows)
    return by_name and row.set in (config.sets or [row.set]) and row.seed in (config.seeds or [row.seed])


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
        jobs = []
        for row, note in rows:
            left = lacking(context, row)
            if row.timed != timed or not (config.train if left == ["training"] else config.measure and left):
                continue
            if lost := weights_missing(context, row, note):
                report(row.about | {"skipped": lost})
                continue
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


def relevance_content(config: Benchmark, context: Context) -> dict[str, Any]:
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
    if config.figures:
        from draw import draw_all

        draw_all(config.folder, context.device)
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


CONTENT = {
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
        for line in pack_all(config.folder, config.pack, outcomes=config.study == "interventions"):
            report(line)


if __name__ == "__main__":
    main()
