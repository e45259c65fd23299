"""What the shape of the sight alone says of the label: the leak that no hiding can stop.

The selector sees the whole picture, so it can write into the outline of what it shows something that the predictor was
never to know. A probe that is given nothing but the outline says how much; chance, and the outlines of true masks, say
how much of that is news.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from ..console.terminal import is_main_process
from ..data.rows import Rows
from ..errors import UserError
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import score
from ..metrics.inference import inference_batches, map_batches, sight_for
from ..metrics.overlap import patch_grid
from ..metrics.predictions import Predictions
from ..sight import Look, cell_share
from ..vit.model import Input
from ..what.probe import Linear, tune_logistic
from .localize import figures_before

if TYPE_CHECKING:
    from ..config import Shape


@dataclass(frozen=True, eq=False)
class FromShape:
    """The answers of a probe that sees the shape alone, and what they are worth."""

    answers: Predictions
    metrics: Metrics
    c: float  # chosen on the validation data
    cells: int

    @property
    def balanced(self) -> Estimate:
        return self.metrics.balanced

    @property
    def chance(self) -> float:
        """Of class-balanced accuracy, however large the classes are."""
        return 1 / len(self.metrics.classes)

    @property
    def sentence(self) -> str:
        verdict = "more than" if self.balanced.low > self.chance else "not surely more than"
        return (
            f"Label from the sight's shape alone: {self.balanced.figure} {self.balanced.interval} class-balanced, "
            f"chance {100 * self.chance:.1f} %: {verdict} chance (n {self.metrics.n:,})."
        )

    def to_dict(self) -> dict[str, Any]:
        return {"chance": self.chance, "c": self.c, "cells": self.cells, "metrics": self.metrics.to_dict()}


def shapes(
    method: Look,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int = 64,
    workers: int = 0,
    cache: Path | None = None,
) -> np.ndarray:
    """float32 [n, H·W]: how much of each patch may be seen; where whole patches are kept, that is `keep` itself."""

    def shape(images: Tensor, masks: Tensor | None) -> Tensor:
        sight, size = sight_for(method, images, masks), (images.shape[2], images.shape[3])
        return cell_share(sight.visible(size), patch_grid(sight, {}, size)).flatten(1)

    batches = inference_batches(
        method.with_masks(rows), indices, expects, accelerator,
        batch=batch, workers=workers, cache=cache, masks=method.needs_masks,
    )  # fmt: skip
    try:
        return map_batches(shape, batches, accelerator)
    finally:
        batches.close()


def label_from_shape(rows: Rows, seen: dict[str, np.ndarray], split: str) -> tuple[Predictions, Linear]:
    """Logistic regression on the shapes `seen` in training, standardised, C by class-balanced accuracy on `val`.

    Every class counts as equally likely beforehand: otherwise naming the commonest one would hide what is known.
    """
    labels = rows.labels[rows.where("train")]
    prior = np.log(np.maximum(np.bincount(labels, minlength=len(rows.classes)), 1) / len(labels))

    def answers(linear: Linear, on: str) -> Predictions:
        at = rows.where(on)
        groups = None if rows.groups is None else rows.groups[at]
        images, logits = [rows.images[i] for i in at], linear.logits(seen[on]) - prior
        return Predictions.from_logits(images, rows.labels[at], logits, rows.classes, groups, rows.group_names, on)

    best, _ = tune_logistic(seen["train"], labels, len(rows.classes), lambda linear: score(answers(linear, "val")))
    return answers(best, split), best


def shape_run(command: Shape, seen: dict[str, np.ndarray] | None = None) -> tuple[FromShape, Path]:
    """A trained model on a split of its own data or of others, and the file that says so.

    `seen` are its shapes by split, where they are known from another call; those that are not are put there.
    """
    from ..console.files import make_folder, write
    from ..load import evaluation_data, measure, opened, results_folder

    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    asked = evaluation_data(command, model.run)
    rows = asked.rows
    for split in (needed := dict.fromkeys(["train", "val", command.split])):
        if not len(rows.where(split)):
            raise UserError(f"{asked.path}: no pictures in the split {split!r}, which the probe of the shape needs")
    path = results_folder(command, model.run, asked) / "shape" / f"{command.split}.json"
    figures_before(path, asked)  # or it says that they are of other data
    seen = {} if seen is None else seen
    for split in [split for split in needed if split not in seen]:
        seen[split] = shapes(
            model.method, rows, rows.where(split), model.expects, accelerator,
            batch=command.batch, workers=command.workers, cache=command.cache,
        )  # fmt: skip
    if (seen["train"] == 1).all():
        raise UserError(f"{command.run}: sees everything, so its sight has no shape")
    answers, linear = label_from_shape(rows, seen, command.split)
    found = FromShape(answers, measure(answers, model.run), linear.c, seen["train"].shape[1])
    if accelerator.is_main_process:
        make_folder(path.parent)
        answers.save_csv(path.with_suffix(".csv"))
        content = {"data": rows.name, "fingerprint": asked.fingerprint} | found.to_dict()
        write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    accelerator.wait_for_everyone()
    return found, path


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Shape) -> int:
    found, path = shape_run(command)
    if is_main_process():
        print(found.sentence)
        print(f"Every group and the probe's answers are in {path.parent}.")
    return 0
