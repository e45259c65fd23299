"""Linear probing: logistic regression on a frozen backbone's features, at one scale or several (S²)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config import S2, Probe, Train
from ..errors import UserError
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..sight import Method, Sight
from ..training.checkpoint import save_tensors
from ..vit.model import Input, ViT, ViTConfig
from ..what.features import cached_features, cls_features
from ..what.probe import Linear, ScaleProbe, fit_logistic, tune_logistic
from ..where.attention import cls_attention_map
from ..where.crops import resize, vit_input_size
from .base import open_backbone, record_backbone
from .erm import Classifier, build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class FittedProbe:
    """A logistic regression, its score on the data that selected it, and the scores of the alternatives."""

    linear: Linear
    score: float
    tried: Mapping[Any, float]  # by C, or by other hyperparameters
    selection: dict[str, Any] | None = None  # which data were used, if not as usual


Fit = Callable[
    [Any, "Rows", dict[str, np.ndarray]], FittedProbe
]  # from the configuration, the rows, and features by split


def fit_probe(config: Probe, rows: Rows, features: dict[str, np.ndarray]) -> FittedProbe:
    """Fitted on the training features; unless `--untuned`, C is selected on the validation features."""
    classes = len(rows.classes)

    def on_validation(linear: Linear) -> float:
        return score(
            predictions_from_logits(rows, rows.split_indices("val"), linear.logits(features["val"])), config.select
        )

    labels = rows.labels[rows.split_indices("train")]
    if config.untuned:
        linear, tried = fit_logistic(features["train"], labels, classes, standardize=False), {}
    else:
        linear, tried = tune_logistic(features["train"], labels, classes, on_validation)
    return FittedProbe(linear, on_validation(linear), tried)


def set_head(head: nn.Linear, linear: Linear) -> None:
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(linear.weight))
        head.bias.copy_(torch.from_numpy(linear.bias))


def make_probe(
    config: Probe, rows: Rows, run: Run, accelerator: Accelerator, fit: Fit = fit_probe
) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    folder = config.cache or run.folder / "features"
    features = {
        split: cls_features(
            vit, rows, rows.split_indices(split), expects, accelerator, folder,
            decoded=config.cache, batch=config.batch, workers=config.workers,
        )
        for split in config.uses
    }  # fmt: skip
    fitted = fit(config, rows, features)
    assert vit.head is not None
    set_head(vit.head, fitted.linear)
    model = Classifier(vit).to(accelerator.device).eval()
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        save_fitted(run, model, fitted, config)
    return model, expects


def save_fitted(
    run: Run, model: nn.Module, fitted: FittedProbe, config: Probe, more: Mapping[str, Any] | None = None
) -> None:
    """Save the weights and the log of a method without a training loop; `more` is logged too."""
    linear = fitted.linear
    chosen = {"c": linear.c, "standardized": linear.standardized, config.select: fitted.score}
    if fitted.selection is not None:
        run.note(selection=fitted.selection)
    run.cut_log(0)  # of an earlier run in this folder
    run.log(chosen | {"tried": {str(c): value for c, value in fitted.tried.items()}} | dict(more or {}))
    save_tensors(run.best, model.state_dict(), chosen)


build_probe: Any = build_erm


# ---- S² --------------------------------------------------------------------------------------------------------------


class ScaleClassifier(ScaleProbe, Method):
    """Sees everything, at several scales; its map is the CLS attention of the last block at the smallest scale."""

    sees_everything = True
    export_graph = "whole"

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, resize(images, self.size))}


def make_s2(config: S2, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not config.scales or min(config.scales) < 1 or len(set(config.scales)) < len(config.scales):
        given = " ".join(map(str, config.scales))
        raise UserError(f"--scales {given}: give different integers of at least 1, such as 1 2")
    vit, expects = open_backbone(config, 0)
    size = vit_input_size(vit, expects.size)
    what = ScaleProbe(vit, size, config.scales)
    features = {
        split: cached_features(
            what.embed, [what], rows, rows.split_indices(split), expects, accelerator,
            config.cache or run.folder / "features", decoded=config.cache, batch=config.batch, workers=config.workers,
        )
        for split in config.uses
    }  # fmt: skip
    fitted = fit_probe(config, rows, features)
    model = ScaleClassifier(vit, size, config.scales, len(rows.classes))
    set_head(cast(nn.Linear, model.head), fitted.linear)
    if accelerator.is_main_process:
        record_backbone(run, vit, expects, config)
        run.note(tiles={"scales": config.scales, "size": size})
        save_fitted(run, model, fitted, config)
    return model.to(accelerator.device).eval(), expects


def build_s2(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    size, scales = tuple(facts["tiles"]["size"]), facts["tiles"]["scales"]
    return ScaleClassifier(ViT(vit_config), size, scales, len(facts["data"]["classes"]))
