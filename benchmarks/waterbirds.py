"""Waterbirds rebuilt (WB-R): every method with the same backbone, every group with its interval, and where it looked.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds
    python benchmarks/waterbirds.py waterbirds --backbone vit_ti16_augreg_in1k.safetensors --out wbr_ti.json
    python benchmarks/waterbirds.py waterbirds --backbone ... --table pixels --out wbr_pixels.json
    python benchmarks/waterbirds.py cub-swapped --backbone ... --table shifts --runs runs/cub --out cub_swapped.json
    python benchmarks/waterbirds.py waterbirds --backbone ... --collect --markdown --pack parcels

One run folder per row and seed, several trained side by side, skipped when finished: call it again to go on. Weights
are selected on validation data by class-balanced accuracy, without group labels (but for `--table rivals`). Rows
that are not finished are listed as missing. `--no-measure` only trains; `--no-train`, later, measures what is trained
by then, and needs its weights. `--collect` does neither, and needs neither data nor weights: what `--pack` puts
together is enough, unpacked into a folder of runs anywhere, for benchmarks/claims.py too.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from lanes import Job, as_typed, deadline_in, say, side_by_side, with_files
from record import record
from sightline import config as commands
from sightline.errors import UserError
from waterbirds_results import about, facts_of, pack, paired, result_of, show
from waterbirds_rows import HEADLINE, ROWS, TABLES, folder_of, folders_of

BATCH = 256  # in measuring: small models leave a GPU idle with less


@dataclass(frozen=True)
class Waterbirds:
    data: Positional[Path]
    backbone: str = ""
    runs: Path = Path("runs/waterbirds")
    table: Literal["papers", "pixels", "shifts", "rivals"] = "papers"
    """The papers' methods; pixel-exact sight and its controls; a few of both for other data; rivals that see
    everything."""
    only: tuple[str, ...] = ()
    """These rows, of any table, in this order. Default: all of the table."""
    rows: Path | None = None
    """Other rows than those of waterbirds_rows.py: JSON, name -> arguments of `sightline train`."""
    seeds: tuple[int, ...] = ()
    """The first one for every row, the others for the headline rows. Default: 0 1 2; of the table of shifts 0."""
    parallel: int = 6
    workers: int = 2
    """Processes that decode pictures, of each run."""
    self_supervised: str = ""
    """The backbone behind FOUND and TokenCut, and where it looks for iFAM."""
    u2net: str = ""
    """U2-Net-P as an ONNX file."""
    device: str = "auto"
    precision: str = "bf16"
    compile: bool = False
    """Compile the ViTs' blocks: slow to begin with, then faster."""
    minutes: float | None = None
    """End after so long: what is in training then is saved, and gone on with by the next call."""
    splits: tuple[str, ...] = ("val", "test")
    """Where to look at the sight, and what the table is of (the last one); to try things out: val."""
    train: bool = True
    """Or only measure what is trained already."""
    measure: bool = True
    """Where runs look and what that tells; or only train, and measure with another call."""
    collect: bool = False
    """Neither: put together what is finished, also while other processes train, or elsewhere."""
    pack: Path | None = None
    """A folder for the results of finished runs, without weights, in .tgz files of at most 12 MB."""
    markdown: bool = False
    """Print the table as Markdown."""
    note: str = ""
    """What has to be said beside the figures in --out: where runs were trained, what they saw."""
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.seeds:
            object.__setattr__(self, "seeds", (0,) if self.table == "shifts" else (0, 1, 2))


def table_of_rows(config: Waterbirds) -> dict[str, str]:
    if config.rows is not None:
        rows = json.loads(config.rows.read_text(encoding="utf-8"))
    else:
        rows = ROWS if config.only else TABLES[config.table]
    if unknown := set(config.only) - set(rows):
        raise UserError(f"--only {sorted(unknown)[0]!r}: known are {', '.join(rows)}")
    return {name: rows[name] for name in config.only or rows}


def seeds_of(row: str, config: Waterbirds) -> tuple[int, ...]:
    """All of them for headline rows, and for rows that were asked for by name; nothing in the probe is drawn."""
    every = row in HEADLINE or config.only or config.rows is not None
    return config.seeds if every and row != "probe" else config.seeds[:1]


def jobs_of(config: Waterbirds) -> list[tuple[str, int]]:
    """Rows and seeds, the first seed of every row first. The probe is last: it does not see what training sees."""
    lines = table_of_rows(config)
    jobs = [
        (row, seed)
        for number in range(len(config.seeds))
        for row in lines
        for seed in seeds_of(row, config)[number : number + 1]
    ]
    return sorted(jobs, key=lambda job: method_of(lines[job[0]]) == "probe")


def method_of(line: str) -> str:
    return line.split()[0]


def command_of(config: Waterbirds, row: str, seed: int) -> commands.Train:
    """What a user would type, parsed as the command line does it."""
    method, *flags = shlex.split(table_of_rows(config)[row])
    files = {"SELF": (config.self_supervised, "--self-supervised"), "U2NET": (config.u2net, "--u2net")}
    given = [
        str(config.data), *with_files(row, flags, files), "--backbone", config.backbone,
        "--out", str(folder_of(config.runs, row, seed)), "--seed", str(seed), "--device", config.device,
        "--precision", config.precision, "--workers", str(config.workers), "--cache", str(cache_of(config)), "--resume",
    ]  # fmt: skip
    return as_typed(row, method, given, compile=config.compile)


def cache_of(config: Waterbirds) -> Path:
    """Of decoded pictures, for training and measuring."""
    return config.runs / "cache"


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """What is measured of a trained run, and the file that it is written to."""

    name: str
    path: Path
    take: Callable[[], object]


def measures(config: Waterbirds, folder: Path, method: str) -> list[Measure]:
    if method in ("erm", "probe"):  # they see everything
        return []
    from claim_figures import Runs, certify
    from sightline.explain.localize import localize_run
    from sightline.explain.shape import shape_run

    found, seen = [], {}
    for split in config.splits:
        asked: Any = {"split": split, "batch": BATCH, "workers": config.workers, "device": config.device}
        look, probe = (kind(folder, cache=cache_of(config), **asked) for kind in (commands.Localize, commands.Shape))
        found += [
            Measure("localize", folder / "localization" / f"{split}.csv", partial(localize_run, look)),
            Measure("shape", folder / "shape" / f"{split}.csv", partial(shape_run, probe, seen)),
        ]
    proof, asked_of = folder / "certificate.json", Runs(config.runs, config.splits[-1], device=config.device)
    return [*found, Measure("certify", proof, lambda: certify(folder, asked_of).save(proof))]


def lacking(config: Waterbirds, row: str, seed: int) -> list[str]:
    """What is still to be done about a run."""
    folder, method = folder_of(config.runs, row, seed), method_of(table_of_rows(config)[row])
    if not (folder / "metrics.json").exists():
        return ["training"]
    return [str(some.path.relative_to(folder)) for some in measures(config, folder, method) if not some.path.exists()]


def is_to_be_done(config: Waterbirds, row: str, seed: int) -> bool:
    left = lacking(config, row, seed)
    return config.train if left == ["training"] else config.measure and bool(left)


def one(config: Waterbirds, row: str, seed: int) -> dict[str, Any]:
    """Train, see where it looks, what the shape of that tells, and that it sees nothing else; only what is lacking."""
    from sightline.train import train
    from sightline.training.run_folder import read_run

    folder, method = folder_of(config.runs, row, seed), method_of(table_of_rows(config)[row])
    seconds, problems = defaultdict(float), []
    if not (folder / "metrics.json").exists():
        with timed(seconds, "training"):
            train(command_of(config, row, seed))
    for measure in measures(config, folder, method) if config.measure else []:
        if not measure.path.exists():
            try:
                with timed(seconds, measure.name):
                    measure.take()
            except Exception as error:  # one figure must not take the others with it; it is listed as missing
                problems.append(f"{measure.path.relative_to(folder)}: {type(error).__name__}: {error}")
    spent = {name: round(value, 1) for name, value in seconds.items()}
    result = {"row": row, "seed": seed, "seconds": spent, "speed": read_run(folder).facts.get("speed")}
    return result | ({"problems": problems} if problems else {})


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Generator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - began


def main() -> None:
    config = tyro.cli(Waterbirds, description=__doc__)
    rows, jobs = table_of_rows(config), jobs_of(config)
    if not config.collect:
        if config.train and not config.backbone:
            raise UserError("--backbone: name the one that all rows begin with")
        todo = [(row, seed) for row, seed in jobs if is_to_be_done(config, row, seed)]
        asked = [Job({"row": row, "seed": seed}, one, (config, row, seed)) for row, seed in todo]
        side_by_side(asked, config.parallel, deadline_in(config.minutes))
    results = [
        found for row, line in rows.items()
        if (found := result_of(config.runs, row, line, config.splits, config.seeds)) is not None
    ]  # fmt: skip
    pairs = paired(config.runs, rows, config.splits[-1], config.seeds)
    show(results, pairs, config.splits[-1], markdown=config.markdown)
    missing = {f"{row}, seed {seed}": some for row, seed in jobs if (some := lacking(config, row, seed))}
    if missing:
        print("missing:", "; ".join(f"{name}: {', '.join(some)}" for name, some in missing.items()))
    if config.out and results:
        first = facts_of(folder_of(config.runs, results[0]["row"], results[0]["seeds"][0]))
        beside = {"note": config.note} if config.note else {}
        record(config.out, "cpu", about(first) | beside | {"rows": results, "paired": pairs, "missing": missing})
    if config.pack:
        every = [folders_of(config.runs, row, config.splits) for row in rows]
        finished = [folder for some in every for seed, folder in some.items() if seed in config.seeds]
        for path in pack(finished, config.pack):
            say({"packed": path.name, "megabytes": round(path.stat().st_size / 1e6, 2)})


if __name__ == "__main__":
    main()
