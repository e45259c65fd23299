"""RobustViT, RRR, GradMask and MaskTune: what correcting relevance is worth, in and out of distribution.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds        # and cub-swapped, si-score
    python benchmarks/relevance.py --birds waterbirds --cub cub-swapped --si si-score --imagenet imagenet1k_samples \\
        --backbone vit_ti16_augreg_in1k.safetensors --self-supervised dino_s16_reg4.safetensors --minutes 9
    python benchmarks/relevance.py --collect --runs runs/relevance --out benchmarks/results/relevance_h200.json
    python benchmarks/relevance_claims.py runs/relevance --out benchmarks/results/claims_relevance.json

One run folder per row and seed, several trained side by side, a JSON line for each; what is finished is skipped, also
where it lies without weights, as `--pack` takes it along; what was interrupted goes on: call it again. Few validation
pictures choose weights and rates (`--val`), since they are looked at after every epoch. Of ImageNet there is one
photograph per class: half of the classes teach, with masks that nobody drew, and the other half are tested (n = 500:
less than 3 points are undecided).
"""

from __future__ import annotations

import contextlib
import csv
import json
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from lanes import Job, as_typed, deadline_in, say, side_by_side, with_files
from relevance_data import few_to_validate, imagenet_lines, lines_of, write_lines
from relevance_rows import (
    COST,
    HEADLINES,
    RATES,
    RULE,
    SELF_SUPERVISED,
    STARTS,
    Row,
    beginnings,
    chosen,
    rates,
    same_as,
)
from sightline.errors import UserError
from waterbirds_rows import folder_of

if TYPE_CHECKING:
    from sightline.training.run_folder import Run

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

    def is_trained(self, row: Row) -> bool:
        return (self.folder(row) / "metrics.json").exists()

    def is_measured(self, row: Row) -> bool:
        return not row.tests or self.measured(row).exists()

    def has_weights(self, row: Row) -> bool:
        return self.is_trained(row) and (self.folder(row) / "best.safetensors").exists()

    def lacks(self, row: Row) -> bool:
        return not self.is_trained(row) or not self.is_measured(row)

    def trained_as(self, row: Row) -> Row | None:
        """The finished run of another name that is the same and can be had for it: with its weights, or with all that
        would be measured with them."""
        other = same_as(row)
        if other is None or not self.is_trained(other):
            return None
        whole = set(row.tests) <= set(other.tests) and self.is_measured(other)
        return other if whole or self.has_weights(other) else None

    def needed_by(self, row: Row) -> list[Row]:
        """The runs whose weights it takes to do what is left."""
        if self.is_trained(row):
            return [row]
        if self.trained_as(row) is not None:
            return []
        return [Row(row.set, word[1:], "", row.seed) for word in shlex.split(row.line) if word[0] == "@"]


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
    from sightline.config import Stress
    from sightline.explain.stress import stress
    from sightline.train import train
    from sightline.training.run_folder import read_run

    began, folder, config = time.perf_counter(), setting.folder(row), setting.config
    with contextlib.redirect_stdout(sys.stderr):
        if not setting.is_trained(row):
            if other := setting.trained_as(row):
                take_over(setting.folder(other), folder, measured=set(row.tests) <= set(other.tests))
            else:
                train(command_of(setting, row))
                (folder / "last.safetensors").unlink(missing_ok=True)  # three times the weights
        note_row(read_run(folder), row, note)
        trained = time.perf_counter() - began
        if not setting.is_measured(row):
            asked: Any = {"tests": row.tests, "maps": ("gae",), "limit": config.limit, "subsets": config.subsets}
            asked |= {
                "steps": STEPS,
                "batch": BATCH,
                "workers": config.workers,
                "device": config.device,
                "pictures": False,
            }
            stress(Stress(folder, cache=setting.cache, **asked))
    about = row.about | figures_of(folder)
    seconds = {"training": round(trained, 1), "all": round(time.perf_counter() - began, 1)}
    return about | {"seconds": seconds}


def take_over(finished: Path, folder: Path, *, measured: bool) -> None:
    """All files of a run that is the same. The one that says that it is finished comes last."""
    left = {"metrics.json", "last.safetensors"} | (set() if measured else {"stress"})
    shutil.copytree(finished, folder, ignore=lambda _, names: left & set(names), dirs_exist_ok=True)
    (folder / "last.safetensors").unlink(missing_ok=True)  # of one that was begun
    shutil.copy2(finished / "metrics.json", folder)


def note_row(run: Run, row: Row, rate: dict[str, Any] | None) -> None:
    """In run.json; if it was trained under another name, also that."""
    known = run.facts.get("benchmark", {})
    trained_as = known.get("trained_as") or known.get("row", row.name)
    other = {"trained_as": trained_as} if trained_as != row.name else {}
    run.note(benchmark={"row": row.name, "line": row.line, "rate": rate} | other)


def figures_of(folder: Path) -> dict[str, Any]:
    """In short."""
    from sightline.explain.stress_results import Stressed
    from sightline.metrics.estimates import Metrics, read_metrics

    splits = read_metrics(folder / "metrics.json")["splits"]
    test = Metrics.from_dict(splits["test"])
    found = {"accuracy": test.accuracy.value, "worst": (test.worst_group or test.worst_class).value}
    if "val" in splits:
        found["val_balanced"] = Metrics.from_dict(splits["val"]).balanced.value
    if (path := folder / "stress" / "test.json").exists():
        known = Stressed.from_dict(json.loads(path.read_text(encoding="utf-8")))
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
    from sightline.explain.class_changes import seen_in

    with few.open(newline="", encoding="utf-8") as file:
        wanted = {line["image"] for line in csv.DictReader(file) if line["split"] == "val"}
    seen = seen_in(folder / "predictions" / "val.csv")
    labels, right = np.array(seen.labels), seen.correct
    kept = np.array([image in wanted for image in seen.images])
    if kept.sum() < len(wanted):
        raise UserError(
            f"{folder}: has not answered the validation pictures of {few}, or calls them by other names; keep data and "
            "--cache where they were, seen from each other"
        )
    return float(np.mean([right[kept & (labels == label)].mean() for label in np.unique(labels[kept])]))


def chosen_rates(setting: Setting, kind: str) -> dict[str, dict[str, Any]]:
    """By method and what it begins with: the rate, and what was tried."""
    names = {of: "before" if kind == "imagenet" else f"ERM{of}" for of in STARTS[kind]}
    starts, found = {of: setting.folder(Row(kind, name, "")) for of, name in names.items()}, {}
    usually = {of: balanced_on(start, setting.few) for of, start in starts.items() if (start / "metrics.json").exists()}
    for (of, usual), (method, name) in product(usually.items(), FROM_A_METHOD.items()):
        score = "relevance" if method == "robustvit" else "balanced"
        rows = {rate: Row(kind, f"{name}, rate {rate}{of}", "") for rate in RATES[method]}
        tried = {rate: line for rate, row in rows.items() if (line := best_line(setting.folder(row), score))}
        if not tried:
            continue
        cheap = [rate for rate in tried if score == "balanced" or tried[rate]["balanced"] >= usual - COST]
        rate = max(cheap, key=lambda rate: (round(tried[rate][score], 6), -float(rate)), default=min(tried, key=float))
        scores = {rate: {k: round(line[k], 5) for k in {score, "balanced"}} for rate, line in tried.items()}
        found[method + of] = {"rate": rate, "rule": RULE, "tried": scores, "before": round(usual, 5)}
    return found


def with_rates(rows: Iterable[Row], by: dict[str, dict[str, Any]]) -> list[tuple[Row, dict[str, Any] | None]]:
    """Those whose rate is known."""
    found = []
    for row in rows:
        known = by.get(row.line.split()[0] + SELF_SUPERVISED * row.name.endswith(SELF_SUPERVISED))
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


def in_turn(rows: Iterable[Asked]) -> list[Asked]:
    """The headline rows of all sets before others, seed by seed, and of every set one after the other."""
    before: Counter[str] = Counter()
    keyed = []
    for asked in rows:
        row = asked[1]
        keyed.append(((row.name not in HEADLINES, row.seed, before[row.set]), asked))
        before[row.set] += 1
    return [asked for _, asked in sorted(keyed, key=lambda one: one[0])]


def do_all(config: RelevanceBenchmark, rows: Iterable[Asked], deadline: float | None) -> None:
    jobs = []
    for setting, row, note in in_turn(rows):
        about = row.about
        if not setting.lacks(row) or not is_wanted(row, config):
            continue
        if lost := next((one for one in setting.needed_by(row) if not setting.has_weights(one)), None):
            again = f"train it again, without the folder {setting.folder(lost).name}, or bring best.safetensors"
            say(about | {"skipped": f"no weights of {lost.name} seed {lost.seed}: {again}"})
            continue
        jobs.append(Job(about, do, (setting, row, note)))
    side_by_side(jobs, config.parallel, deadline)


def run(config: RelevanceBenchmark) -> None:
    deadline = deadline_in(config.minutes)
    settings = settings_of(config)
    plain: list[Callable[[str], list[Row]]] = [beginnings, rates]
    for rows_of in plain:
        do_all(config, [(setting, row, None) for name, setting in settings.items() for row in rows_of(name)], deadline)
    jobs = []
    for name, setting in settings.items():
        wanted = [row for row in chosen(name) if is_wanted(row, config)]
        jobs += [(setting, row, note) for row, note in with_rates(wanted, chosen_rates(setting, name))]
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
