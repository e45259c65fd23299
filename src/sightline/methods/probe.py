"""The frozen probe: what a backbone knows already, read out by logistic regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def make_probe(config: Probe, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    folder = config.cache or run.folder / "features"
    split = {name: rows.where(name) for name in ("train", "val")}
    features = {
        name: cls_features(
            vit, rows, indices, expects, accelerator, folder, batch=config.batch, workers=config.workers
        )
        for name, indices in split.items()
    }  # fmt: skip

    def on_validation(linear: Linear) -> float:
        at = split["val"]
        groups = None if rows.groups is None else rows.groups[at]
        images = [rows.images[i] for i in at]
        logits = linear.logits(features["val"])
        return score(
            Answers.from_logits(images, rows.labels[at], logits, rows.classes, groups, rows.group_names, "val"),
            config.select,
        )

    labels, classes = rows.labels[split["train"]], len(rows.classes)
    if config.plain:
        linear, scores = fit_logistic(features["train"], labels, classes, standardize=False), {}
    else:
        linear, scores = tune_logistic(features["train"], labels, classes, on_validation)
    assert vit.head is not None
    with torch.no_grad():
        vit.head.weight.copy_(torch.from_numpy(linear.weight))
        vit.head.bias.copy_(torch.from_numpy(linear.bias))
    model = Classifier(vit).to(accelerator.device).eval()
    if accelerator.is_main_process:
        chosen = {"c": linear.c, "standardized": linear.standardized, config.select: on_validation(linear)}
        run.cut_log(0)  # of a run that was interrupted, or finished, before
        run.log(chosen | {"tried": {str(c): value for c, value in scores.items()}})
        note_backbone(run, vit, expects, config)
        save_tensors(run.best, model.state_dict(), chosen)
    return model, expects


def build_probe(vit_config: ViTConfig, settings: dict[str, Any]) -> nn.Module:
    return build_erm(vit_config, settings)
