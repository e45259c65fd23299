"""The frozen probe: what a backbone knows already, at one scale or several (S²), read out by logistic regression."""

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
from ..what.features import cls_features, kept_features
from ..what.probe import Linear, ScaleProbe, fit_logistic, tune_logistic
from ..where.attention import cls_attention_map
from ..where.crops import resized
from .base import open_backbone, record_backbone
from .erm import Classifier, build_erm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


@dataclass(frozen=True)
class Fitted:
    """A logistic regression, what it is worth on the data that chose it, and what else was tried."""

    linear: Linear
    score: float
    tried: Mapping[Any, float]  # by C, or what else there is to choose
    selection: dict[str, Any] | None = None  # which data were used how, where that is not as usual


Fit = Callable[[Any, "Rows", dict[str, np.ndarray]], Fitted]  # from the configuration, and features by split


def fit_probe(config: Probe, rows: Rows, features: dict[str, np.ndarray]) -> Fitted:
    """On the features of the split `train`: plain, or tuned on those of `val`."""
    classes = len(rows.classes)

    def on_validation(linear: Linear) -> float:
        return score(predictions_from_logits(rows, rows.where("val"), linear.logits(features["val"])), config.select)

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


def make_probe(
    config: Probe, rows: Rows, run: Run, accelerator: Accelerator, fit: Fit = fit_probe
) -> tuple[nn.Module, Input]:
    vit, expects = open_backbone(config, len(rows.classes))
    folder = config.cache or run.folder / "features"
    features = {
        split: cls_features(
            vit, rows, rows.where(split), expects, accelerator, folder,
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
        keep_fitted(run, model, fitted, config)
    return model, expects


def keep_fitted(
    run: Run, model: nn.Module, fitted: Fitted, config: Probe, more: Mapping[str, Any] | None = None
) -> None:
    """Weights and log of a method that learns in one go; `more` is to be logged besides."""
    linear = fitted.linear
    chosen = {"c": linear.c, "standardized": linear.standardized, config.select: fitted.score}
    if fitted.selection is not None:
        run.note(selection=fitted.selection)
    run.cut_log(0)  # of a run that was interrupted, or finished, before
    run.log(chosen | {"tried": {str(c): value for c, value in fitted.tried.items()}} | dict(more or {}))
    save_tensors(run.best, model.state_dict(), chosen)


build_probe: Any = build_erm


# ---- several scales --------------------------------------------------------------------------------------------------


class ScaleClassifier(ScaleProbe, Method):
    """Sees everything, at several scales; its map is the attention of the last block at the smallest."""

    sees_everything = True
    export_graph = "whole"

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, resized(images, self.size))}


def seen_at_once(vit: ViT, expects: Input) -> tuple[int, int]:
    """The size of what is cut out of pictures for a ViT: whole patches, and no more than it was made for."""
    patch = vit.config.patch
    h, w = (min(pair) // patch * patch for pair in zip(expects.size, vit.config.input.size, strict=True))
    return h, w


def make_s2(config: S2, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    if not config.scales or min(config.scales) < 1 or len(set(config.scales)) < len(config.scales):
        said = " ".join(map(str, config.scales))
        raise UserError(f"--scales {said}: give whole numbers from 1, each once, such as 1 2")
    vit, expects = open_backbone(config, 0)
    size = seen_at_once(vit, expects)
    what = ScaleProbe(vit, size, config.scales)
    features = {
        split: kept_features(
            what.embed, [what], rows, rows.where(split), expects, accelerator,
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
        keep_fitted(run, model, fitted, config)
    return model.to(accelerator.device).eval(), expects


def build_s2(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    size, scales = tuple(facts["tiles"]["size"]), facts["tiles"]["scales"]
    return ScaleClassifier(ViT(vit_config), size, scales, len(facts["data"]["classes"]))
