"""RobustViT, RRR, GradMask and MaskTune: what correcting relevance is worth, in and out of distribution.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds        # and cub-swapped, si-score
    python benchmarks/relevance.py --birds waterbirds --cub cub-swapped --si si-score --imagenet imagenet1k_samples \\
        --backbone vit_ti16_augreg_in1k.safetensors --self-supervised dino_s16_reg4.safetensors --minutes 9
    python benchmarks/relevance.py --collect --runs runs/relevance --out benchmarks/results/relevance_h200.json
    python benchmarks/relevance_claims.py runs/relevance --out benchmarks/results/claims_relevance.json

One run folder per row and seed, several trained side by side, a JSON line for each; what is finished is skipped, what
was interrupted goes on: call it again. Few validation pictures choose weights and rates (`--val`), since they are
looked at after every epoch. Of ImageNet there is one photograph per class: half of the classes teach, with masks that
nobody drew, and the other half are tested (n = 500: less than 3 points are undecided).
"""

from __future__ import annotations

import contextlib
import csv
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from lanes import Job, as_typed, deadline_in, say, side_by_side, with_files
from relevance_data import few_to_validate, imagenet_lines, lines_of, write_lines
from relevance_rows import COST, RATES, RULE, Row, beginnings, chosen, rates
from sightline.errors import UserError
from waterbirds_rows import folder_of

SETS = ("birds", "cub", "si", "imagenet")
FROM_A_METHOD = {"robustvit": "RobustViT", "rrr": "RRR", "gradmask": "GradMask"}
BATCH = 256  # in measuring
STEPS = 100  # in which the pixels of a picture go, when sufficient ones are sought


@dataclass(frozen=True)
class RelevanceBenchmark:
    birds: Path | None = None
    """`sightline data waterbirds`."""
    cub: Path | None = None
    """`sightline data cub-swapped`."""
    si: Path | None = None
    """`sightline data si-score`."""
    imagenet: Path | None = None
    """A folder with samples.csv: a photograph of each ImageNet class."""
    backbone: str = ""
    """With ImageNet's head: TI."""
    self_supervised: str = ""
    """Behind TokenCut, and of the rows with S: SELF."""
    runs: Path = Path("runs/relevance")
    cache: Path | None = None
    """Decoded pictures and masks, which are large. Default: cache, beside the runs."""
    only: tuple[str, ...] = ()
    """These sets. Default: all that there are data for."""
    rows: tuple[str, ...] = ()
    """These rows; * stands for anything. Default: all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    val: int = 160
    """Validation pictures for what learns from few masks."""
    limit: int = 600
    """Test pictures whose maps, curves and neighbours are measured."""
    subsets: int = 32
    """Pictures of ImageNet whose sufficient pixels are sought."""
    epochs: int | None = None
    """To try things out: all rows so long."""
    parallel: int = 12
    workers: int = 1
    device: str = "auto"
    precision: str = "bf16"
    minutes: float | None = None
    """End after so long: what is in training then is saved, and gone on with by the next call."""
    collect: bool = False
    """Run nothing; put together what is finished, also elsewhere."""
    pack: Path | None = None
    """A folder for the results, without weights, in .tgz files of at most 12 MB."""
    pictures: bool = True
    """Draw per-class changes (needs matplotlib) and maps before and after; never for a repository."""
    note: str = ""
    out: Path | None = None


@dataclass(frozen=True)
class Setting:
    """What all rows of one set share."""

    data: Path
    few: Path
    runs: Path
    cache: Path
    config: RelevanceBenchmark

    def folder(self, row: Row) -> Path:
        return folder_of(self.runs, row.name, row.seed)

    def measured(self, row: Row) -> Path:
        return self.folder(row) / "stress" / "test.csv"

    def lacks(self, row: Row) -> bool:
        return not (self.folder(row) / "metrics.json").exists() or not self.measured(row).exists()


# ---- data ------------------------------------------------------------------------------------------------------------


def settings_of(config: RelevanceBenchmark) -> dict[str, Setting]:
    cache = config.cache or config.runs.with_name(f"{config.runs.name}-cache")
    found = {}
    for name in SETS:
        source = getattr(config, name)
        if source is None or name not in (config.only or SETS):
            continue
        home = cache / name
        lines = imagenet_lines(source, home) if name == "imagenet" else lines_of(source, home)
        write_lines(home / "rows.csv", lines)
        write_lines(home / "few.csv", lines if name == "imagenet" else few_to_validate(lines, config.val))
        found[name] = Setting(home / "rows.csv", home / "few.csv", config.runs / name, cache, config)
    return found


# ---- one row ---------------------------------------------------------------------------------------------------------


def command_of(setting: Setting, row: Row) -> Any:
    """What a user would type, parsed as the command line does it."""
    config, (method, *flags) = setting.config, shlex.split(row.line)
    files = {"TI": (config.backbone, "--backbone"), "SELF": (config.self_supervised, "--self-supervised")}
    flags = [str(folder_of(setting.runs, flag[1:], row.seed)) if flag[0] == "@" else flag for flag in flags]
    if config.epochs is not None:
        flags += ["--epochs", str(config.epochs)]
    given = [
        str(setting.data if method == "erm" else setting.few), *with_files(row.name, flags, files),
        "--out", str(setting.folder(row)), "--seed", str(row.seed), "--device", config.device,
        "--precision", config.precision, "--workers", str(config.workers), "--cache", str(setting.cache), "--resume",
    ]  # fmt: skip
    return as_typed(row.name, method, given)


def do(setting: Setting, row: Row, note: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train and measure what is lacking; what came of it, in a line. `note` says how its rate was chosen."""
    from sightline.audit.stress import stress
    from sightline.config import Stress
    from sightline.runs import read_run
    from sightline.train import train

    began, folder, config = time.perf_counter(), setting.folder(row), setting.config
    with contextlib.redirect_stdout(sys.stderr):
        if not (folder / "metrics.json").exists():
            train(command_of(setting, row))
            (folder / "last.safetensors").unlink(missing_ok=True)  # three times the weights
        read_run(folder).note(benchmark={"row": row.name, "line": row.line, "rate": note})
        trained = time.perf_counter() - began
        if not setting.measured(row).exists():
            asked: Any = {"tests": row.tests, "maps": ("gae",), "limit": config.limit, "subsets": config.subsets}
            asked |= {
                "steps": STEPS,
                "batch": BATCH,
                "workers": config.workers,
                "device": config.device,
                "pictures": False,
            }
            stress(Stress(folder, cache=setting.cache, **asked))
    about = {"set": row.set, "row": row.name, "seed": row.seed} | figures_of(folder)
    seconds = {"training": round(trained, 1), "all": round(time.perf_counter() - began, 1)}
    return about | {"seconds": seconds}


def figures_of(folder: Path) -> dict[str, Any]:
    """In short."""
    from sightline.audit.stressed import Stressed
    from sightline.metrics import Metrics, read_metrics

    splits = read_metrics(folder / "metrics.json")["splits"]
    test = Metrics.from_dict(splits["test"])
    found = {"accuracy": test.accuracy.value, "worst": (test.worst_group or test.worst_class).value}
    if "val" in splits:
        found["val_balanced"] = Metrics.from_dict(splits["val"]).balanced.value
    known = Stressed.from_dict(json.loads((folder / "stress" / "test.json").read_text(encoding="utf-8")))
    found |= {f"{curve.direction} gae": curve.mean.value for curve in known.curves if curve.map == "gae"}
    found |= {"mass": known.masks["gae"]["mass"].value} if known.masks else {}
    found |= {f"{name.split()[0]}-NN": one.value for name, one in known.neighbours.items()}
    found |= {"any label": known.subsets.reached.value} if known.subsets else {}
    return {name: round(value, 4) for name, value in found.items()}


# ---- rates -----------------------------------------------------------------------------------------------------------


def best_line(folder: Path, score: str) -> dict[str, float] | None:
    """Of the log: the epoch that was kept."""
    path = folder / "log.jsonl"
    if not (folder / "metrics.json").exists() or not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return max(lines, key=lambda line: line[score])


def balanced_on(folder: Path, few: Path) -> float:
    """Class-balanced accuracy of a run on the few validation pictures, of which it may have answered more."""
    from sightline.audit.changes import seen_in

    with few.open(newline="", encoding="utf-8") as file:
        wanted = {line["image"] for line in csv.DictReader(file) if line["split"] == "val"}
    seen = seen_in(folder / "predictions" / "val.csv")
    labels, right = np.array(seen.labels), seen.correct
    kept = np.array([image in wanted for image in seen.images])
    return float(np.mean([right[kept & (labels == label)].mean() for label in np.unique(labels[kept])]))


def chosen_rates(setting: Setting, kind: str) -> dict[str, dict[str, Any]]:
    """By method: the rate, and what was tried."""
    start = setting.folder(Row(kind, "before" if kind == "imagenet" else "ERM", ""))
    if not (start / "metrics.json").exists():
        return {}
    usual = balanced_on(start, setting.few)
    found = {}
    for method, name in FROM_A_METHOD.items():
        score = "relevance" if method == "robustvit" else "balanced"
        rows = {rate: Row(kind, f"{name}, rate {rate}", "") for rate in RATES[method]}
        tried = {rate: line for rate, row in rows.items() if (line := best_line(setting.folder(row), score))}
        if not tried:
            continue
        cheap = [rate for rate in tried if score == "balanced" or tried[rate]["balanced"] >= usual - COST]
        rate = max(cheap, key=lambda rate: tried[rate][score]) if cheap else min(tried, key=float)
        scores = {rate: {k: round(line[k], 5) for k in {score, "balanced"}} for rate, line in tried.items()}
        found[method] = {"rate": rate, "rule": RULE, "tried": scores, "before": round(usual, 5)}
    return found


def with_rates(rows: Iterable[Row], by: dict[str, dict[str, Any]]) -> list[tuple[Row, dict[str, Any] | None]]:
    """Those whose rate is known."""
    found = []
    for row in rows:
        known = by.get(row.line.split()[0])
        if "RATE" not in row.line:
            found.append((row, None))
        elif known is not None:
            found.append((replace(row, line=row.line.replace("RATE", known["rate"])), known))
        else:
            say({"set": row.set, "row": row.name, "seed": row.seed, "skipped": "no rate was chosen"})
    return found


# ---- doing it --------------------------------------------------------------------------------------------------------

Asked = tuple[Setting, Row, dict[str, Any] | None]


def is_wanted(row: Row, config: RelevanceBenchmark) -> bool:
    named = not config.rows or any(fnmatchcase(row.name, pattern) for pattern in config.rows)
    return named and row.seed in config.seeds


def do_all(config: RelevanceBenchmark, rows: Iterable[Asked], deadline: float | None) -> None:
    jobs = [
        Job({"set": row.set, "row": row.name, "seed": row.seed}, do, (setting, row, note))
        for setting, row, note in sorted(rows, key=lambda asked: asked[1].seed)
        if setting.lacks(row) and is_wanted(row, config)
    ]
    side_by_side(jobs, config.parallel, deadline)


def run(config: RelevanceBenchmark) -> None:
    deadline = deadline_in(config.minutes)
    settings = settings_of(config)
    plain: list[Callable[[str], list[Row]]] = [beginnings, rates]
    for rows_of in plain:
        do_all(config, [(setting, row, None) for name, setting in settings.items() for row in rows_of(name)], deadline)
    jobs = []
    for name, setting in settings.items():
        found = chosen_rates(setting, name)
        jobs += [(setting, row, note) for row, note in with_rates(chosen(name), found)]
    do_all(config, jobs, deadline)


def main() -> None:
    config = tyro.cli(RelevanceBenchmark, description=__doc__)
    if not config.collect:
        if not config.backbone:
            raise UserError("--backbone: name the one that rows begin with, which has ImageNet's head")
        run(config)
    from relevance_results import collect, draw_all, pack_all, show

    found = collect(config.runs)
    show(found)
    if config.pictures:
        draw_all(config.runs, config.device)
    if config.out and found:
        from record import record

        record(config.out, "cpu", {"note": config.note, "rule": RULE, "limit": config.limit, "sets": found})
    if config.pack:
        for line in pack_all(config.runs, config.pack):
            say(line)


if __name__ == "__main__":
    main()
