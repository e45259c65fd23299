"""Interventions, ablations and background gaps of methods that discover parts.

    for set in cub-swapped spurious-object waterbirds mixed; do
        sightline data $set --cub PACKS --scenes PACKS --out data/$set; done
    sightline data spurious-object --objects post tag --correlation 1 --cub PACKS --out data/pair
    python benchmarks/interventions.py --estimate
    python benchmarks/interventions.py --cub data/cub-swapped --object data/spurious-object --pair data/pair \\
        --birds data/waterbirds --mixed data/mixed --packs PACKS --backbone vit_ti16_augreg_in1k.safetensors --minutes 9
    python benchmarks/interventions.py --pack PARCELS
    python benchmarks/interventions.py --collect --before interventions_h200.json --out interventions_h200.json
    python benchmarks/interventions_claims.py PARCELS --twice interventions_h200.json --out claims_interventions.json

One run folder per row and seed, several trained side by side, a JSON line for each; what is finished is skipped, what
was interrupted goes on: call it again, also elsewhere (`--pack`, `--earlier`: those of the published figures are in
benchmarks/results/interventions). One seed of what claims are decided by comes first, then further seeds, then rows
beside them (`--turns` says otherwise), and last, alone, what is timed. Weights, parts to leave out and quantiles are
chosen on validation data.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from interventions_claims import deciding_rows
from interventions_rows import BUILDS, SETS, WITH_OBJECTS, Row, rows_of
from lanes import Job, as_typed, deadline_in, say, side_by_side
from sightline.errors import UserError
from waterbirds_rows import folder_of

TURNS = ("deciding", "seeds", "beside", "timed")
NOISE_ROWS = ("iFAM K=8", "PDiscoFormer K=8")  # on the sets with objects


@dataclass(frozen=True)
class Interventions:
    cub: Path | None = None
    """`sightline data cub-swapped`."""
    object: Path | None = None
    """`sightline data spurious-object`."""
    pair: Path | None = None
    """`sightline data spurious-object --objects post tag --correlation 1`."""
    birds: Path | None = None
    """`sightline data waterbirds`."""
    mixed: Path | None = None
    """`sightline data mixed`."""
    packs: Path | None = None
    """Where the birds come from, for their key points; without it there is no key point error."""
    backbone: str = ""
    runs: Path = Path("runs/interventions")
    cache: Path | None = None
    """Decoded pictures. Default: cache, beside the runs."""
    only: tuple[str, ...] = ()
    """These sets. Default: all that there are data for."""
    rows: tuple[str, ...] = ()
    """These rows, such as 'iFAM K=4' or 'cub: iFAM K=4'; * stands for anything. Default: all."""
    turns: tuple[str, ...] = ()
    """In which order, or some only. Default: deciding, seeds, beside, timed."""
    noise: int = 40
    """Searches on shuffled labels."""
    epochs: int | None = None
    """To try things out: all rows so long."""
    parallel: int = 6
    workers: int = 2
    device: str = "auto"
    precision: str = "bf16"
    compile: bool = False
    """Compile the ViTs' blocks, but of what is timed: slow to begin with, then faster."""
    minutes: float | None = None
    """End after so long: what is in training then is saved, and gone on with by the next call."""
    estimate: bool = False
    """Only say what rows there are, and about how many seconds of a whole H200 each takes."""
    collect: bool = False
    """Run nothing; put together what is finished, also elsewhere."""
    pack: Path | None = None
    """Run nothing; put what is finished into this folder, without weights, a file for each set."""
    earlier: Path | None = None
    """A folder that --pack made: runs in it are finished."""
    before: Path | None = None
    """A file that --out made: rows that are not there now, or not measured now, are taken from it, and name its commit;
    of those trained twice the figures of both are kept."""
    note: str = ""
    out: Path | None = None


def wanted(config: Interventions) -> list[Row]:
    """The rows asked for, turn by turn; within a turn what claims are decided by, and what takes longest, first."""
    if unknown := (set(config.only) - set(SETS)) | (set(config.turns) - set(TURNS)):
        raise UserError(f"{sorted(unknown)[0]!r}: sets are {', '.join(SETS)}, turns {', '.join(TURNS)}")
    decide, turns = deciding_rows(), config.turns or TURNS
    rows = [row for kind in config.only or SETS for row in rows_of(kind)]
    named = [row for row in rows if not config.rows or any(is_named(row, one) for one in config.rows)]
    asked = [row for row in named if turn_of(row, decide) in turns]

    def order(row: Row) -> tuple[int, int, bool, int]:
        return turns.index(turn_of(row, decide)), row.seed, (row.set, row.name) not in decide, -row.seconds

    return sorted(asked, key=order)


def is_named(row: Row, words: str) -> bool:
    return any(fnmatchcase(name, words) for name in (row.name, f"{row.set}: {row.name}"))


def turn_of(row: Row, decide: set[tuple[str, str]]) -> str:
    if row.timed:
        return "timed"
    if row.seed:
        return "seeds"
    return "deciding" if (row.set, row.name) in decide else "beside"


def with_data(config: Interventions, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if getattr(config, row.set) is not None]


# ---- one row ---------------------------------------------------------------------------------------------------------


def folder(config: Interventions, row: Row) -> Path:
    return folder_of(config.runs / row.set, row.name, row.seed)


def cache_of(config: Interventions) -> Path:
    return config.cache or config.runs.with_name(f"{config.runs.name}-cache")


def lacks(config: Interventions, row: Row) -> list[str]:
    from interventions_measure import is_measured

    path = folder(config, row)
    if not (path / "metrics.json").exists():
        return ["training"]
    return ["interventions"] if row.interventions and not is_measured(path) else []


def command_of(config: Interventions, row: Row) -> Any:
    """What a user would type, parsed as the command line does it."""
    method, *flags = shlex.split(row.line)
    if config.epochs is not None and method != "probe":
        flags += ["--epochs", str(config.epochs)]
    if "--precision" not in flags:
        flags += ["--precision", config.precision]
    given = [
        str(getattr(config, row.set)), *flags, "--backbone", config.backbone, "--out", str(folder(config, row)),
        "--seed", str(row.seed), "--device", config.device, "--workers", str(config.workers),
        "--cache", str(cache_of(config)), "--resume",
    ]  # fmt: skip
    return as_typed(row.name, method, given, compile=config.compile and not row.timed)


def do(config: Interventions, row: Row) -> dict[str, Any]:
    """Train and measure what is lacking; what came of it, in a line."""
    from interventions_measure import How, is_measured, measure
    from sightline.train import train
    from sightline.training.run_folder import read_run

    began, path = time.perf_counter(), folder(config, row)
    with contextlib.redirect_stdout(sys.stderr):
        if not (path / "metrics.json").exists():
            train(command_of(config, row))
            (path / "last.safetensors").unlink(missing_ok=True)  # three times the weights
            cost = None if row.seed or row.timed else cost_of(path, config.device)
            read_run(path).note(benchmark={"set": row.set, "row": row.name, "line": row.line, "cost": cost})
        trained = time.perf_counter() - began
        if row.interventions and not is_measured(path):
            noise = config.noise if row.name in NOISE_ROWS and not row.seed and row.set in WITH_OBJECTS else 0
            how = How(
                row.set, config.packs, noise, workers=config.workers, cache=cache_of(config), device=config.device
            )
            measure(path, how)
    seconds = {"training": round(trained, 1), "all": round(time.perf_counter() - began, 1), "estimated": row.seconds}
    return row.about | figures_of(path) | {"seconds": seconds}


def cost_of(path: Path, device: str) -> dict[str, Any]:
    """Of an answer to some of its test pictures, at the share that it really sees."""
    from sightline.config import Evaluate
    from sightline.evaluate import data_asked_for, opened
    from sightline.metrics.cost import cost_on

    accelerator, model = opened(path, device)
    rows = data_asked_for(Evaluate(path), model.run).rows
    return asdict(cost_on(model.method, rows, rows.where("test"), model.expects, accelerator.device))


def figures_of(path: Path) -> dict[str, Any]:
    """In short."""
    from interventions_evidence import outcomes_in

    found: dict[str, Any] = {}
    known = outcomes_in(path)
    for how, right in known.right.items():
        for part, images in {"": list(right), **known.by_attribute}.items():
            value = sum(right[image] for image in images) / max(len(images), 1)
            found[f"{how} {part}".strip()] = round(value, 4)
    return found


# ---- doing it --------------------------------------------------------------------------------------------------------


def do_all(config: Interventions, rows: Sequence[Row], deadline: float | None) -> None:
    """Several at once; but what is timed has the GPU for itself, and time is left for it."""
    todo = [row for row in rows if lacks(config, row)]
    together, alone = ([row for row in todo if row.timed == timed] for timed in (False, True))
    before = None if deadline is None else deadline - sum(row.seconds for row in alone)
    for some, lanes, until in ((together, config.parallel, before), (alone, 1, deadline)):
        side_by_side([Job(row.about, do, (config, row)) for row in some], lanes, until)


# ---- what there is ---------------------------------------------------------------------------------------------------


def estimates(rows: Sequence[Row]) -> Table:
    table = Table("turn", "set", "row", "seed", "GPU seconds", "sightline train", box=None, pad_edge=False)
    decide = deciding_rows()
    for row in rows:
        table.add_row(turn_of(row, decide), row.set, row.name, str(row.seed), str(row.seconds), row.line)
    for turn in TURNS:
        some = [row.seconds for row in rows if turn_of(row, decide) == turn]
        table.add_row(turn, "", f"{len(some)} rows", "", str(sum(some)), "")
    return table


def collect(config: Interventions, rows: Sequence[Row]) -> dict[str, Any]:
    """By set and row: the figures under every intervention, with intervals over pictures and seeds."""
    from interventions_evidence import Evidence, table_of

    evidence, found = Evidence(config.runs), {}
    for row in rows:
        if (folder(config, row) / "metrics.json").exists() and row.name not in found.get(row.set, {}):
            found.setdefault(row.set, {})[row.name] = {"line": row.line} | table_of(evidence, row.set, row.name)
    return found


def with_rows_of(before: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What is found now comes first, unless more was measured before; `again` is what came of the other time."""
    old = json.loads(before.read_text(encoding="utf-8"))
    sets: dict[str, Any] = {}
    for kind in dict.fromkeys((*found, *old["sets"])):
        then = {name: {"commit": old["commit"]} | row for name, row in old["sets"].get(kind, {}).items()}
        now = found.get(kind, {})
        sets[kind] = {name: with_both(now.get(name), then.get(name)) for name in dict.fromkeys((*now, *then))}
    return sets


def with_both(now: dict[str, Any] | None, then: dict[str, Any] | None) -> Any:
    if now is None or then is None:
        return now or then
    if set(now["runs"]) & set(then.get("runs", [])):  # perhaps with more seeds
        return now | {"again": then["again"]} if "again" in then else now
    first, other = (now, then) if set(then["figures"]) <= set(now["figures"]) else (then, now)
    once = {key: value for key, value in other.items() if key not in ("line", "again")}
    return first | {"again": [once, *then.get("again", [])]}


def is_in(found: dict[str, Any], row: Row) -> bool:
    """Also if its run is not there any more."""
    known = found.get(row.set, {}).get(row.name, {"seeds": []})
    return row.seed in known["seeds"] and (not row.interventions or len(known["figures"]) > 1)


def show(found: dict[str, Any]) -> None:
    from sightline.metrics.estimates import Estimate

    console = Console(highlight=False, width=220)
    for kind, rows in found.items():
        table = Table("", "seeds", "under", "figures", box=None, pad_edge=False)
        for name, one in rows.items():
            for how, figures in one["figures"].items():
                said = [f"{key} {e.figure} {e.interval}" for key, v in figures.items() for e in [Estimate(**v)]]
                table.add_row(name, str(len(one["seeds"])), how, ", ".join(said))
        console.print(f"{kind} ({BUILDS[kind]}), test data:", table)


def main() -> None:
    config = tyro.cli(Interventions, description=__doc__)
    rows = wanted(config)
    if config.estimate:
        Console(highlight=False, width=200).print(estimates(rows))
        return
    if config.pack:
        from interventions_evidence import pack_all

        for line in pack_all(config.runs, config.pack):
            say(line)
        return
    if config.earlier:
        from interventions_evidence import unpack_all

        unpack_all(config.earlier, config.runs)
    if not config.collect:
        if not config.backbone or not with_data(config, rows):
            raise UserError("--backbone and at least one of --cub, --object, --pair, --birds, --mixed: name them")
        do_all(config, with_data(config, rows), deadline_in(config.minutes))
    found = collect(config, rows)
    found = with_rows_of(config.before, found) if config.before else found
    show(found)
    missing = [
        asdict(row) | {"lacks": some, "seconds": row.seconds}
        for row in rows
        if (some := lacks(config, row)) and not is_in(found, row)
    ]
    if missing:
        print("missing:", "; ".join(f"{one['set']}, {one['name']}, seed {one['seed']}" for one in missing))
    if config.out and found:
        from record import record

        record(config.out, "cpu", {"note": config.note, "sets": found, "missing": missing})


if __name__ == "__main__":
    main()
