"""What validation data selects between the stages of a study: learning rates, and the look of a backbone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from evidence import arrays_in, columns_in
from rows import a2, folder_of, relevance
from sightline.errors import UserError
from sightline.metrics.estimates import Metrics, read_metrics

# ---- relevance: learning rates ---------------------------------------------------------------------------------------


def best_epoch(folder: Path, score: str) -> dict[str, float] | None:
    """The line of the log whose checkpoint was kept."""
    path = folder / "log.jsonl"
    if not (folder / "metrics.json").exists() or not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return max(lines, key=lambda line: line[score])


def balanced_on(folder: Path, few: Path) -> float:
    """Class-balanced accuracy of a run on the few validation images."""
    from sightline.explain.class_changes import read_predictions

    columns = columns_in(few)
    wanted = {image for image, split in zip(columns["image"], columns["split"], strict=True) if split == "val"}
    seen = read_predictions(folder / "predictions" / "val.csv")
    labels, right = np.array(seen.labels), seen.correct
    kept = np.array([image in wanted for image in seen.images])
    if kept.sum() < len(wanted):
        raise UserError(
            f"{folder}: has no predictions of the validation images of {few}, or names them differently; keep data and "
            "--cache where they were, relative to each other"
        )
    return float(np.mean([right[kept & (labels == label)].mean() for label in np.unique(labels[kept])]))


def selected_rates(runs: Path, few: Path, kind: str) -> dict[str, dict[str, Any]]:
    """By method and start: the learning rate, and the candidates."""
    names = {of: "before" if kind == "imagenet" else f"ERM{of}" for of in relevance.STARTS[kind]}
    starts, found = {of: folder_of(runs, name, 0) for of, name in names.items()}, {}
    usually = {of: balanced_on(start, few) for of, start in starts.items() if (start / "metrics.json").exists()}
    methods = {"robustvit": "RobustViT"} | relevance.PENALISED
    for (of, usual), (method, name) in product(usually.items(), methods.items()):
        score = "relevance" if method == "robustvit" else "balanced"
        folders = {rate: folder_of(runs, f"{name}, rate {rate}{of}", 0) for rate in relevance.RATES[method]}
        tried = {rate: line for rate, folder in folders.items() if (line := best_epoch(folder, score))}
        if not tried:
            continue
        cheap = [rate for rate in tried if score == "balanced" or tried[rate]["balanced"] >= usual - relevance.COST]
        rate = max(cheap, key=lambda rate: (round(tried[rate][score], 6), -float(rate)), default=min(tried, key=float))
        scores = {rate: {k: round(line[k], 5) for k in {score, "balanced"}} for rate, line in tried.items()}
        found[method + of] = {"rate": rate, "rule": relevance.RULE, "tried": scores, "before": round(usual, 5)}
    return found


# ---- A²: the look of a backbone --------------------------------------------------------------------------------------


def selected_looks(runs: Path, backbones: Sequence[a2.Backbone]) -> dict[str, tuple[a2.Look, dict[str, Any]]]:
    """Per backbone, the look with the highest validation accuracy, and what else was tried."""
    found = {}
    for backbone in backbones:
        tried: dict[a2.Look, float] = {}
        for look in backbone.looks:
            path = folder_of(runs, f"A2 {backbone.name}>{backbone.name}, {look.words}", 0) / "metrics.json"
            if path.exists():
                tried[look] = Metrics.from_dict(read_metrics(path)["splits"]["val"]).balanced.value
        if tried:
            best = max(tried, key=tried.__getitem__)  # the first of equals
            scores = {look.words: round(score, 5) for look, score in tried.items()}
            found[backbone.name] = best, {"chosen": best.words, "rule": a2.RULE, "tried": scores}
    return found


# ---- A²: checkpoints of equal k-NN accuracy --------------------------------------------------------------------------


def knn(runs: Path, name: str) -> float | None:
    folder = folder_of(runs, f"attention {name}", 0)
    return float(arrays_in(folder)["knn"].mean()) if (folder / "localization" / "test.csv").exists() else None


def matched_states(runs: Path, family: a2.Family) -> dict[str, str]:
    """Of each larger size, the checkpoint with the k-NN accuracy of the smallest size at the end."""
    goal = knn(runs, family.sizes[0]) if family.sizes else None
    if goal is None:
        return {}
    nearest = {}
    for size in family.sizes[1:]:
        states = [f"{size}@{epoch}" for of, epoch, _ in family.kept if of == size] + [size]
        known = {state: value for state in states if (value := knn(runs, state)) is not None}
        if len(known) > 1:
            nearest[size] = min(known, key=lambda state: abs(known[state] - goal))
    return nearest


# ---- Waterbirds v1.0: hyperparameters --------------------------------------------------------------------------------


def validation_score(runs: Path, row: str) -> float | None:
    """Worst-group accuracy of the first seed on the validation data; None if it is not trained."""
    path = folder_of(runs, row, 0) / "metrics.json"
    if not path.exists():
        return None
    found = Metrics.from_dict(read_metrics(path)["splits"]["val"])
    return (found.worst_group or found.worst_class).value
