"""The frozen probe: what a backbone knows already, read out by logistic regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..answers import Answers
from ..checkpoint import save_tensors
from ..config import Probe
from ..evaluate import score
from ..vit import Input, ViTConfig
from ..what.features import cls_features
from ..what.probe import Linear, fit_logistic, tune_logistic
from .erm import Classifier, build_erm, note_backbone, open_backbone

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..runs import Run


@dataclass(frozen=True)
class Fitted:
    """A logistic regression, what it is worth on the validation data, and what else was tried."""

    linear: Linear
    score: float
    tried: dict[float, float]  # by C


def fit_probe(config: Probe, rows: Rows, features: dict[str, np.ndarray]) -> Fitted:
    """On the features of the split `train`: plain, or tuned on those of `val`."""
    at, classes = rows.where("val"), len(rows.classes)
    groups = None if rows.groups is None else rows.groups[at]
    images = [rows.images[i] for i in at]

    def on_validation(linear: Linear) -> float:
        logits = linear.logits(features["val"])
        return score(
            Answers.from_logits(images, rows.labels[at], logits, rows.classes, groups, rows.group_names, "val"),
            config.select,
        )

    labels = rows.labels[rows.where("train")]
    if config.plain:
        linear, tried = fit_logistic(features["train"], labels, classes, standardize=False), {}
    else:
        linear, tried = tune_logistic(features["train"], labels, classes, on_validation)
    return Fitted(linear, on_validation(linear), tried)


def set_head(head: nn.Linear, linear: Linear) -> None:
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(linear.weight))
        head.bias.copy_(torch.from_numpy(linear.bias))


def make_probe(config: Probe, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    folder = config.cache or run.folder / "features"
    features = {
        split: cls_features(
            vit, rows, rows.where(split), expects, accelerator, folder, batch=config.batch, workers=config.workers
        )
        for split in ("train", "val")
    }
    fitted = fit_probe(config, rows, features)
    assert vit.head is not None
    set_head(vit.head, fitted.linear)
    model = Classifier(vit).to(accelerator.device).eval()
    if accelerator.is_main_process:
        note_backbone(run, vit, expects, config)
        keep_fitted(run, model, fitted, config)
    return model, expects


def keep_fitted(
    run: Run, model: nn.Module, fitted: Fitted, config: Probe, more: Mapping[str, Any] | None = None
) -> None:
    """Weights and log of a method that learns in one go; `more` is to be logged besides."""
    linear = fitted.linear
    chosen = {"c": linear.c, "standardized": linear.standardized, config.select: fitted.score}
    run.cut_log(0)  # of a run that was interrupted, or finished, before
    run.log(chosen | {"tried": {str(c): value for c, value in fitted.tried.items()}} | dict(more or {}))
    save_tensors(run.best, model.state_dict(), chosen)


def build_probe(vit_config: ViTConfig, settings: dict[str, Any]) -> nn.Module:
    return build_erm(vit_config, settings)
