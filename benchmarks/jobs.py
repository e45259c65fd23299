"""One row of a study: trained, measured and noted in its run folder."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

from lanes import is_out_of_memory
from measure import cost_of, missing_measures, sees_of
from record import commit
from rows import Row
from rows.relevance import same_as
from study import Context, command_of

UNTRAINED = ("attention", "distances")  # methods that measure, and train nothing


def lacking(context: Context, row: Row) -> list[str]:
    """What is still to be done: training, or the files of measurements."""
    folder = context.folder(row)
    if row.method in UNTRAINED:
        return [] if (folder / "localization" / "test.csv").exists() else ["training"]
    if not context.is_trained(row):
        return ["training"]
    files = [file for measure in missing_measures(context, row) for file in measure.files]
    return [file for file in files if not (folder / file).exists()]


def weights_missing(context: Context, row: Row, note: dict[str, Any], coming: Collection[Row] = ()) -> str:
    """Why a row cannot be run: it, or the run that it fine-tunes, lies here without weights and is not coming."""
    if context.is_trained(row):
        needed = [row]
    elif trained_as(context, row, note) is not None:
        needed = []
    else:
        words = [word[1:] for word in shlex.split(row.line) if word.startswith("@") and word[1:] not in context.files]
        needed = [Row(row.set, name, "", row.seed) for name in words]
    before = {(one.set, one.name, one.seed) for one in coming}
    absent = (one for one in needed if not context.has_weights(one))
    lost = next((one for one in absent if (one.set, one.name, one.seed) not in before), None)
    if lost is None:
        return ""
    again = f"train it again, without the folder {context.folder(lost).name}, or bring best.safetensors"
    return f"no weights of {lost.name} seed {lost.seed}: {again}"


def trained_as(context: Context, row: Row, note: dict[str, Any]) -> Row | None:
    """The finished run of another name that is the same and can be copied: with its weights, or with all that would be
    measured with them. Only a candidate of a learning rate can be."""
    other = same_as(row) if note.get("rate") else None
    if other is None or not context.is_trained(other):
        return None
    whole = set(row.measures) <= set(other.measures) and not missing_measures(context, other)
    return other if whole or context.has_weights(other) else None


def run_row(context: Context, row: Row, note: dict[str, Any], measure: bool, keeps_weights: bool) -> dict[str, Any]:
    """Train and measure what is missing; what came of it, in a line."""
    seconds, problems, folder = defaultdict(float), [], context.folder(row)
    with contextlib.redirect_stdout(sys.stderr):
        if row.method in UNTRAINED or not context.is_trained(row):
            with timed(seconds, "training"):
                train_row(context, row, note)
        for one in missing_measures(context, row) if measure and row.method not in UNTRAINED else []:
            try:
                with timed(seconds, one.name):
                    one.take()
            except Exception as error:  # one measurement must not take the others with it; it is listed as missing
                if is_out_of_memory(error):
                    raise
                problems.append(f"{one.files[0]}: {type(error).__name__}: {error}")
    if not keeps_weights:
        (folder / "best.safetensors").unlink(missing_ok=True)  # they would fill the disk
    spent = {name: round(value, 1) for name, value in seconds.items()}
    return row.about | figures_of(folder) | {"seconds": spent} | ({"problems": problems} if problems else {})


def train_row(context: Context, row: Row, note: dict[str, Any]) -> None:
    from sightline.train import train
    from sightline.training.run_folder import read_run

    folder, began = context.folder(row), time.perf_counter()
    if row.method in UNTRAINED:
        import attention

        {"attention": attention.attention, "distances": attention.distances}[row.method](context, row)
        return
    if other := trained_as(context, row, note):
        copy_run(context.folder(other), folder, measured=set(row.measures) <= set(other.measures))
    elif row.method == "oracle":
        from oracle import oracle

        oracle(context, row)
    else:
        train(command_of(context, row))
        (folder / "last.safetensors").unlink(missing_ok=True)  # three times the weights
    run = read_run(folder)
    trained = run.facts.get("benchmark", {})
    name = trained.get("trained_as") or trained.get("row", row.name)
    if "cost" in note and not row.seed and not row.timed:
        note = note | {"cost": cost_of(folder, context.device)}
    if "sees" in note:
        note = note | {"sees": sees_of(folder, context.device)}
    other_name = {"trained_as": name} if name != row.name else {}
    about_row = {"set": row.set, "row": row.name, "line": row.line, "commit": commit()}
    run.note(benchmark=about_row | {"seconds": round(time.perf_counter() - began, 1)} | note | other_name)


def copy_run(finished: Path, folder: Path, *, measured: bool) -> None:
    """All files of a run that is the same. The one that says that it is finished comes last."""
    left = {"metrics.json", "last.safetensors"} | (set() if measured else {"stress"})
    shutil.copytree(finished, folder, ignore=lambda _, names: left & set(names), dirs_exist_ok=True)
    (folder / "last.safetensors").unlink(missing_ok=True)  # of one that was begun
    shutil.copy2(finished / "metrics.json", folder)


def figures_of(folder: Path) -> dict[str, float]:
    from sightline.metrics.estimates import Metrics, read_metrics

    if not (folder / "metrics.json").exists():
        return {}
    splits = {split: Metrics.from_dict(one) for split, one in read_metrics(folder / "metrics.json")["splits"].items()}
    found = {}
    if "val" in splits:
        found["val_balanced"] = splits["val"].balanced.value
    if "test" in splits:
        worst = splits["test"].worst_group or splits["test"].worst_class
        found |= {"accuracy": splits["test"].accuracy.value, "worst_group": worst.value}
    return {name: round(value, 4) for name, value in found.items()}


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Generator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - began
