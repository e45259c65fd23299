"""`sightline evaluate`: predictions and metrics of a trained model, on its own data or on others."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .config import Evaluate, Suite, Train
from .console.checksums import write_json_with_checksum
from .console.terminal import counted, is_main_process, paragraph, present, print_notes
from .data.rows import Rows
from .datasets.imagenet import IMAGENET9_CLASSES, imagenet_classes, imagenet_to_imagenet9
from .errors import UserError
from .load import (
    EvaluationData,
    Model,
    check_same_data,
    evaluation_data,
    match_classes,
    measure,
    open_model,
    results_folder,
    same_intervention,
)
from .metrics.cost import Cost, measure_cost_on_rows
from .metrics.coverage import SightSummary, measure_sight
from .metrics.estimates import Metrics, read_metrics
from .metrics.inference import predict_rows
from .metrics.predictions import Predictions
from .metrics.tables import class_table, confusion_sentence, details_table, summary_table
from .training.baseline import baseline_sentence, loses_what_matters
from .training.run_folder import Run, digests_of, of_these_weights, read_run

SELECTION_METRICS = {
    "balanced": "class-balanced {} accuracy", "accuracy": "{} accuracy", "worst-group": "{} worst-group accuracy",
    "worst-class": "{} worst-class accuracy", "auc": "{} AUC", "relevance": "{} relevance",
}  # fmt: skip


def evaluate(command: Evaluate) -> Path:
    """Evaluate a run on a split of its own data, or of others; returns the folder with predictions and metrics."""
    accelerator, model = open_model(command.run, command.device, intervention=command.intervention)
    data = evaluation_data(command, model.run)
    nine = imagenet9_map(model, data.rows)
    rows = match_classes(model, data.rows, data.path) if nine is None else with_imagenet_labels(data.rows, nine, model)
    indices = rows.split_indices(command.split)
    if not len(indices):
        raise UserError(f"{data.path}: no images in the split {command.split!r}; choose another --split")
    folder = results_folder(command, model.run, data)
    content = earlier_metrics(folder, model.run, data)
    predictions = predict_rows(
        model.method, rows, indices, model.expects, accelerator,
        batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    seen = measure_sight(
        model.method, rows, indices, model.expects, accelerator, batch=command.batch, workers=command.workers
    )
    if nine is not None:
        predictions = to_imagenet9(predictions, nine)
    if accelerator.is_main_process:
        predictions.save_csv(folder / "predictions" / f"{command.split}.csv")
        content["splits"][command.split] = measure(predictions, model.run).to_dict()
        cost = measure_cost_on_rows(model.method, rows, indices, model.expects, accelerator.device)
        content["cost"] = content.get("cost", {}) | {command.split: asdict(cost)}
        if seen is not None:
            content["sight"] = content.get("sight", {}) | {command.split: seen.to_dict()}
        content |= digests_of(model.run, folder) | {"copies": model.run.facts.get("copies", "") if data.own else ""}
        write_json_with_checksum(folder / "metrics.json", content)
    accelerator.wait_for_everyone()
    return folder


def earlier_metrics(folder: Path, run: Run, data: EvaluationData) -> dict[str, Any]:
    """The present content of metrics.json: other splits, and how the checkpoint was selected."""
    path, own = folder / "metrics.json", run.folder / "metrics.json"
    selection = run.facts.get("selection") or {}
    content: dict[str, Any] = {"selected_by": selection.get("metric"), "selected_on": selection.get("on")}
    if own.exists():
        content |= {name: value for name, value in read_metrics(own).items() if name.startswith("selected_")}
    if folder.resolve() != run.folder.resolve():
        notes = list(data.rows.notes)
        content["data"] = {"name": data.rows.name, "fingerprint": data.fingerprint, "own": data.own, "notes": notes}
    before = read_metrics(path) if path.exists() else {"splits": {}}
    check_same_data(path, before.get("data", {}).get("fingerprint", data.fingerprint), data)
    intervention = run.facts.get("intervention")
    same = same_intervention(before.get("intervention"), intervention) and of_these_weights(before, run)
    before = before if same else {"splits": {}}
    return before | content | ({"intervention": intervention} if intervention else {})


# ---- ImageNet-9 with a model of ImageNet's 1,000 classes -------------------------------------------------------------


def imagenet9_map(model: Model, rows: Rows) -> np.ndarray | None:
    """For each ImageNet class its ImageNet-9 class, or -1; None if this is another model or dataset."""
    thousand = tuple(imagenet_classes().values())
    applies = rows.classes == IMAGENET9_CLASSES and model.classes == thousand
    return imagenet_to_imagenet9(rows.root) if applies else None


def with_imagenet_labels(rows: Rows, nine: np.ndarray, model: Model) -> Rows:
    """Each label as the first ImageNet class that maps to it, until predictions are mapped by `to_imagenet9`."""
    first = np.array([np.flatnonzero(nine == label)[0] for label in range(len(rows.classes))])
    return replace(rows, classes=model.classes, labels=first[rows.labels])


def to_imagenet9(predictions: Predictions, nine: np.ndarray) -> Predictions:
    """Map the prediction among 1,000 classes; one outside the nine counts as wrong (Xiao et al. 2021)."""
    members = nine[:, None] == np.arange(len(IMAGENET9_CLASSES))
    return replace(
        predictions,
        labels=nine[predictions.labels],
        probabilities=predictions.probabilities @ members.astype(np.float32),
        predicted=nine[predictions.predicted],
        classes=IMAGENET9_CLASSES,
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Suite) -> int:
    if command.suite is not None:
        return show_suite(command)
    folder = evaluate(command)
    if is_main_process():
        print_result(command, folder, command.split)
    return 0


def print_result(command: Suite | Train, folder: Path, split: str) -> None:
    """metrics.json of a folder, as the flags ask for it."""

    def show() -> None:
        show_metrics(folder, split, details=command.details)
        print(f"{'Run folder' if isinstance(command, Train) else 'Metrics and predictions per image'}: {folder}")

    present(command, {"folder": str(folder)} | read_metrics(folder / "metrics.json"), show)


def show_suite(command: Suite) -> int:
    from .explain.suite import run_suite

    results, folder = run_suite(command)

    def show() -> None:
        console = Console(highlight=False)
        console.print(results.table())
        print_notes(console, results.notes)
        print(f"Metrics and predictions per image: {folder}")

    present(command, {"folder": str(folder)} | results.to_dict(), show)
    return 0


def show_metrics(folder: Path, split: str, *, details: bool = False) -> None:
    """The table of one split, the selection rule, whether the sight makes sense, and the notes."""
    content = read_metrics(folder / "metrics.json")
    about = content.get("data") or read_run(folder).facts["data"] | {"own": True}
    shown = split if split in content["splits"] else next(iter(content["splits"]))
    metrics = Metrics.from_dict(content["splits"][shown])
    console = Console(highlight=False)
    about_split = f"{about['name']}, split {shown!r}: {counted(metrics.n)}. {selection_sentence(content)}"
    paragraph(console, about_split)
    console.print()
    console.print(summary_table(metrics))
    console.print()
    copies = f" {content['copies']}." if shown == "test" and content.get("copies") else ""
    paragraph(console, f"{metrics.headline()}{copies}", style="bold")
    show_sight(console, content, shown)
    if details:
        show_details(console, metrics, content, shown)
    notes = [f"no split {split!r}; showing {shown!r}"] if shown != split else []
    if about["own"] and shown == "train":
        notes.append("the model was trained on these images: expect lower accuracy on new ones")
    if about["own"] and content.get("selected_by") is not None and shown == content["selected_on"]:
        notes.append("the checkpoint was selected on these images: expect lower accuracy on new ones")
    print_notes(console, (*notes, *about["notes"], *metrics.warnings, *(metrics.remarks if details else ())))


def show_sight(console: Console, content: dict[str, Any], split: str) -> None:
    """What is seen, why that may be wrong, and the comparison with the baseline."""
    if split in content.get("sight", {}):
        seen = SightSummary.from_dict(content["sight"][split])
        paragraph(console, seen.sentence)
        for suspicion in seen.suspicions:
            paragraph(console, f"{suspicion}.", "warning", "bold red")
    baseline = content.get("baseline", {}).get("splits", {}).get(split)
    if baseline is not None:
        paragraph(console, baseline_sentence(baseline), "warning" * loses_what_matters(baseline), "bold red")


def show_details(console: Console, metrics: Metrics, content: dict[str, Any], split: str) -> None:
    console.print(details_table(metrics))
    if metrics.classification is not None:
        console.print(class_table(metrics.classification))
        paragraph(console, confusion_sentence(metrics.classification))
    if split in content.get("cost", {}):
        paragraph(console, Cost(**content["cost"][split]).sentence)


def selection_sentence(content: dict[str, Any]) -> str:
    """The rule of checkpoint and hyperparameter selection in metrics.json, as a sentence."""
    if content.get("selected_by") is None:
        return "Nothing was selected."
    name, bracket, detail = content["selected_by"].partition(" (")
    split = {"val": "validation", "train": "training", "train-split": "held-out training"}.get(
        content["selected_on"], content["selected_on"]
    )
    return f"Checkpoint selected by {SELECTION_METRICS.get(name, name + ' ({})').format(split)}{bracket}{detail}."
