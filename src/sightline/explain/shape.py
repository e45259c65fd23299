"""Label information in the mask shape: what the outline of the sight alone reveals about the label.

The selector sees the whole image, so it can encode in the outline of the sight what the predictor must not know; no
masking prevents that. A probe that is given nothing but the outline measures how much. Chance, and the outlines of
true masks, are the baselines.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from ..console.terminal import is_main_process, present
from ..data.rows import Rows
from ..errors import UserError
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import score
from ..metrics.inference import inference_batches, map_batches, sight_for
from ..metrics.overlap import patch_grid
from ..metrics.predictions import Predictions
from ..sight import Method, cell_share
from ..what.probe import Linear, tune_logistic
from .localize import previous_results

if TYPE_CHECKING:
    from ..config import Shape
    from ..data.batches import Batches
    from ..load import Model


@dataclass(frozen=True, eq=False)
class ShapeProbe:
    """The predictions of a probe that sees the mask shape alone, and their accuracy."""

    predictions: Predictions
    metrics: Metrics
    c: float  # chosen on the validation data
    cells: int

    @property
    def balanced(self) -> Estimate:
        return self.metrics.balanced

    @property
    def chance(self) -> float:
        """Class-balanced accuracy at chance, whatever the class sizes."""
        return 1 / len(self.metrics.classes)

    @property
    def sentence(self) -> str:
        verdict = "above" if self.balanced.low > self.chance else "not significantly above"
        return (
            f"Label predicted from the mask shape alone: class-balanced accuracy {self.balanced.value_text} "
            f"{self.balanced.interval} (n = {self.metrics.n:,}), {verdict} chance ({100 * self.chance:.1f} %)."
        )

    def to_dict(self) -> dict[str, Any]:
        return {"chance": self.chance, "c": self.c, "cells": self.cells, "metrics": self.metrics.to_dict()}


def mask_shapes(method: Method, batches: Batches, accelerator: Accelerator) -> np.ndarray:
    """float32 [n, H·W]: the visible fraction of every patch, which is `keep` itself if whole patches are kept."""

    def shape(images: Tensor, masks: Tensor | None) -> Tensor:
        sight, size = sight_for(method, images, masks), (images.shape[2], images.shape[3])
        return cell_share(sight.visible(size), patch_grid(sight, {}, size)).flatten(1)

    return map_batches(shape, batches, accelerator)


def fit_shape_probe(rows: Rows, shapes: dict[str, np.ndarray], split: str) -> tuple[Predictions, Linear]:
    """Logistic regression on the standardised training shapes, C chosen by class-balanced validation accuracy.

    The training class priors are subtracted (logit adjustment): predicting the most common class would otherwise hide
    what the shape reveals.
    """
    labels = rows.labels[rows.split_indices("train")]
    prior = np.log(np.maximum(np.bincount(labels, minlength=len(rows.classes)), 1) / len(labels))

    def predict(linear: Linear, on: str) -> Predictions:
        at = rows.split_indices(on)
        groups = None if rows.groups is None else rows.groups[at]
        images, logits = [rows.images[i] for i in at], linear.logits(shapes[on]) - prior
        return Predictions.from_logits(images, rows.labels[at], logits, rows.classes, groups, rows.group_names, on)

    best, _ = tune_logistic(shapes["train"], labels, len(rows.classes), lambda linear: score(predict(linear, "val")))
    return predict(best, split), best


def shape_run(command: Shape, shapes: dict[str, np.ndarray] | None = None) -> tuple[ShapeProbe, Path]:
    """Probe the mask shapes of a trained model on a split of its own or other data; the file they are written to.

    `shapes` are the model's shapes by split if known from an earlier call; missing ones are added to it.
    """
    from ..console.files import make_folder, write_json
    from ..load import evaluation_data, measure, open_model, results_folder

    accelerator, model = open_model(command.run, command.device, intervention=command.intervention)
    dataset = evaluation_data(command, model.run)
    rows = dataset.rows
    for split in (needed := dict.fromkeys(["train", "val", command.split])):
        if not len(rows.split_indices(split)):
            raise UserError(f"{dataset.path}: no images in the split {split!r}, which the shape probe needs")
    path = results_folder(command, model.run, dataset) / "shape" / f"{command.split}.json"
    previous_results(path, dataset)  # raises if they are about other data
    shapes = {} if shapes is None else shapes
    for split in [split for split in needed if split not in shapes]:
        with closing(shape_batches(command, model, rows, split, accelerator)) as batches:
            shapes[split] = mask_shapes(model.method, batches, accelerator)
    if (shapes["train"] == 1).all():
        raise UserError(f"{command.run}: sees the whole image, so its mask has no shape")
    predictions, linear = fit_shape_probe(rows, shapes, command.split)
    found = ShapeProbe(predictions, measure(predictions, model.run), linear.c, shapes["train"].shape[1])
    if accelerator.is_main_process:
        make_folder(path.parent)
        predictions.save_csv(path.with_suffix(".csv"))
        content = {"data": rows.name, "fingerprint": dataset.fingerprint} | found.to_dict()
        write_json(path, content)
    accelerator.wait_for_everyone()
    return found, path


def shape_batches(command: Shape, model: Model, rows: Rows, split: str, accelerator: Accelerator) -> Batches:
    return inference_batches(
        model.method.with_masks(rows), rows.split_indices(split), model.expects, accelerator,
        batch=command.batch, workers=command.workers, cache=command.cache, masks=model.method.needs_masks,
    )  # fmt: skip


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Shape) -> int:
    found, path = shape_run(command)
    if is_main_process():

        def show() -> None:
            print(found.sentence)
            print(f"Metrics of all groups and the probe's predictions saved to {path.parent}.")

        present(command, json.loads(path.read_text(encoding="utf-8")), show)
    return 0
