"""What trained models are worth: on their own data, on other data, beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from .config import Evaluate, Suite
from .console.files import write
from .console.terminal import counted, is_main_process, print_notes
from .data.rows import Rows
from .datasets.imagenet import IMAGENET9_CLASSES, imagenet_classes, imagenet_to_imagenet9
from .errors import UserError
from .load import (
    EvaluationData,
    Model,
    check_other_data,
    evaluation_data,
    match_classes,
    measure,
    opened,
    results_folder,
    same_change,
)
from .metrics.cost import Cost, cost_on
from .metrics.estimates import Metrics, read_metrics
from .metrics.inference import answer
from .metrics.predictions import Predictions
from .training.run_folder import Run, read_run


def evaluate(command: Evaluate) -> Path:
    """Answers and metrics of a run on a split of its own data, or of others; the folder they are in."""
    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    asked = evaluation_data(command, model.run)
    nine = imagenet9_map(model, asked.rows)
    rows = match_classes(model, asked.rows, asked.path) if nine is None else in_a_thousand(asked.rows, nine, model)
    indices = rows.where(command.split)
    if not len(indices):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    folder = results_folder(command, model.run, asked)
    content = metrics_before(folder, model.run, asked)
    answers = answer(
        model.method, rows, indices, model.expects, accelerator,
        batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    if nine is not None:
        answers = in_nine(answers, nine)
    if accelerator.is_main_process:
        answers.save_csv(folder / "predictions" / f"{command.split}.csv")
        content["splits"][command.split] = measure(answers, model.run).to_dict()
        spent = cost_on(model.method, rows, indices, model.expects, accelerator.device)
        content["cost"] = content.get("cost", {}) | {command.split: asdict(spent)}
        write(folder / "metrics.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    accelerator.wait_for_everyone()
    return folder


def metrics_before(folder: Path, run: Run, asked: EvaluationData) -> dict[str, Any]:
    """What metrics.json says already of other splits, and of how the weights were selected."""
    path, own = folder / "metrics.json", run.folder / "metrics.json"
    selection = run.facts.get("selection") or {}
    content: dict[str, Any] = {"selected_by": selection.get("metric"), "selected_on": selection.get("on")}
    if own.exists():
        content |= {name: value for name, value in read_metrics(own).items() if name.startswith("selected_")}
    if folder.resolve() != run.folder.resolve():
        notes = list(asked.rows.notes)
        content["data"] = {"name": asked.rows.name, "fingerprint": asked.fingerprint, "own": asked.own, "notes": notes}
    before = read_metrics(path) if path.exists() else {"splits": {}}
    check_other_data(path, before.get("data", {}).get("fingerprint", asked.fingerprint), asked)
    changed = run.facts.get("intervention")
    before = before if same_change(before.get("intervention"), changed) else {"splits": {}}
    return before | content | ({"intervention": changed} if changed else {})


def imagenet9_map(model: Model, rows: Rows) -> np.ndarray | None:
    """Which of the nine each class counts as, or -1, where a model of ImageNet's classes is asked about ImageNet-9."""
    thousand = tuple(imagenet_classes().values())
    asked = rows.classes == IMAGENET9_CLASSES and model.classes == thousand
    return imagenet_to_imagenet9(rows.root) if asked else None


def in_a_thousand(rows: Rows, nine: np.ndarray, model: Model) -> Rows:
    """With any ImageNet class that counts as the label, until the answers are `in_nine`."""
    some = np.array([np.flatnonzero(nine == label)[0] for label in range(len(rows.classes))])
    return replace(rows, classes=model.classes, labels=some[rows.labels])


def in_nine(answers: Predictions, nine: np.ndarray) -> Predictions:
    """The answer among 1,000 classes, then mapped; one that is none of the nine is wrong (Xiao et al. 2021)."""
    members = nine[:, None] == np.arange(len(IMAGENET9_CLASSES))
    return replace(
        answers,
        labels=nine[answers.labels],
        probabilities=answers.probabilities @ members.astype(np.float32),
        predicted=nine[answers.predicted],
        classes=IMAGENET9_CLASSES,
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Suite) -> int:
    if command.suite is not None:
        return show_suite(command)
    folder = evaluate(command)
    if is_main_process():
        show_metrics(folder, command.split)
        print(f"Metrics and answers per picture are in {folder}.")
    return 0


def show_suite(command: Suite) -> int:
    from .explain.suite import run_suite

    found, folder = run_suite(command)
    console = Console(highlight=False)
    console.print(found.table())
    print_notes(console, found.notes)
    print(f"The figures, and answers per picture, are in {folder}.")
    return 0


def show_metrics(folder: Path, split: str) -> None:
    """The table of one split, under what it is about, and what to know about it."""
    content = read_metrics(folder / "metrics.json")
    about = content.get("data") or read_run(folder).facts["data"] | {"own": True}
    shown = split if split in content["splits"] else next(iter(content["splits"]))
    metrics = Metrics.from_dict(content["splits"][shown])
    selected = content.get("selected_by") is not None
    console = Console(highlight=False)
    console.print(f"{escape(about['name'])}, split {shown!r}: {counted(metrics.n)}", soft_wrap=True)
    console.print(metrics.table())
    notes = [f"there is no split {split!r}, so this is {shown!r}"] if shown != split else []
    if about["own"] and shown == "train":
        notes.append("the model was trained on these pictures: expect less on others")
    if about["own"] and selected and shown == content["selected_on"]:
        notes.append("these pictures also chose the weights: expect less on others")
    print_notes(console, (*notes, *about["notes"], *metrics.warnings))
    chosen = f"Weights selected by {content['selected_by']} on the {content['selected_on']} data."
    rule = chosen if selected else "Nothing was selected."
    console.print(f"[bold]{escape(metrics.headline())}[/]. {rule}", soft_wrap=True)
    if shown in content.get("cost", {}):
        console.print(Cost(**content["cost"][shown]).sentence, soft_wrap=True)
