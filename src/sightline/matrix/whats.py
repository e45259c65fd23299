"""Predictors of the matrix: a linear probe or DFR on frozen features, CLIP zero-shot, or a fine-tuned ViT.

The way in which a selector is used is selected by the probe's validation accuracy, once per backbone and for masks and
crops separately: DFR uses the features the probe selected, and fine-tuning the mask that was best for the frozen probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Dfr, EarlyMask, Erm, Probe, Train
from ..data.images import Preprocess
from ..data.rows import TRAIN
from ..errors import UserError
from ..methods.base import open_backbone
from ..methods.dfr import fit_dfr
from ..methods.probe import fit_probe
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..metrics.predictions import Predictions
from ..sight import Sight
from ..vit.model import Input, ViT
from ..vit.weights import HEAD_PREFIXES, weights_sha256
from ..what.dfr import split_off
from ..what.masked import MaskedViT
from ..what.probe import BoxProbe, Linear
from ..what.zeroshot import ZeroShot, clip_class_names, open_clip
from ..where.crops import vit_input_size
from .bench import MatrixContext
from .ways import ZOOM, Sees, Way, window_around
from .wheres import Where, check_crops
from .words import Spec

SELECT = "balanced"  # class-balanced accuracy, which needs no group labels
Embed = Callable[[Tensor, Sight], Tensor]


@dataclass(frozen=True, eq=False)
class What:
    spec: Spec
    context: MatrixContext
    vit: ViT
    expects: Input
    identity: str  # of the weights
    clip: ZeroShot | None = None

    @property
    def sees(self) -> Sees:
        return "crop" if self.spec.kind.startswith("crop-") else "mask"

    @property
    def predictor(self) -> str:
        return self.spec.kind.removeprefix("crop-").removeprefix("mask-")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for name, p in self.vit.named_parameters() if not name.startswith(HEAD_PREFIXES))

    def settings(self) -> dict[str, Any]:
        """What its cells depend on besides data, weights and selector."""
        config = self.context.config
        found: dict[str, Any] = {"crop": config.crop_size, "mass": config.attention_mass, "seed": config.seed}
        if self.predictor == "fine-tune":
            found |= {"epochs": config.epochs, "lr": config.lr, "batch": config.batch}
        if self.predictor == "zero-shot":
            names = clip_class_names(self.context.rows.classes, config.class_names)
            found |= {"prompts": config.prompts, "names": names}
        return found | {"arithmetic": self.context.arithmetic}

    def embed(self, way: Way) -> Embed:
        """CLS tokens of the visible content."""
        size = vit_input_size(self.vit, self.expects.size)
        if self.clip is not None:
            clip = self.clip
            return lambda images, sight: clip.embed(images, zoom_in(sight, images) if way.window else sight)
        if self.sees == "crop":
            return BoxProbe(self.vit, size, max(1, len(way.sides))).embed
        hiding = MaskedViT(self.vit, zoom=ZOOM if way.window else None).to(self.context.device)
        return lambda images, sight: cls_tokens(hiding, images, sight)


def zoom_in(sight: Sight, images: Tensor) -> Sight:
    return sight if sight.boxes is not None else replace(sight, boxes=window_around(sight.visible(images.shape[-2:])))


def cls_tokens(hiding: MaskedViT, images: Tensor, sight: Sight) -> Tensor:
    tokens = hiding.judge(images, sight).tokens
    assert tokens is not None
    return tokens[:, 0]


def open_what(spec: Spec, context: MatrixContext) -> What:
    config, rows = context.config, context.rows
    if spec.kind.endswith("-dfr") and rows.groups is None:
        raise UserError(f"{config.data}: DFR needs group labels, and these data have none")
    if spec.kind.endswith("-zero-shot"):
        clip = open_clip(spec.of)
        text = clip.class_embeddings(clip_class_names(rows.classes, config.class_names), config.prompts)
        what = ZeroShot(clip.vit, vit_input_size(clip.vit, clip.vit.config.input.size), text, clip.scale)
        return What(spec, context, clip.vit, clip.vit.config.input, weights_sha256(what), what)
    settings = Probe(config.data, backbone=spec.of, size=config.size, seed=config.seed)
    vit, expects = open_backbone(settings, len(rows.classes))
    return What(spec, context, vit, expects, weights_sha256(vit, without=HEAD_PREFIXES))


# ---- features --------------------------------------------------------------------------------------------------------


def features(where: Where, way: Way, what: What, split: str) -> np.ndarray:
    """float32 [n, D]: features of the images of a split, cached."""
    context, preprocess = where.context, Preprocess.of(what.expects)

    def computed() -> dict[str, Tensor]:
        what.vit.to(context.device).eval()
        shown, embed = where.shown(what.expects), what.embed(way)

        def embed_batch(images: Tensor, at: Tensor) -> Tensor:
            selected = None if shown is None else shown[at]
            return embed(images, where.sight(way, what.sees, images, selected, what.vit.grid(images))).float()

        return {"features": context.over(embed_batch, context.rows.split_indices(split), preprocess, exact=False)}

    facts = f"{feature_facts(where, what)} {way} {split}"
    return context.kept("features", facts, computed)["features"].numpy()


def feature_facts(where: Where, what: What) -> str:
    context = where.context
    files = context.files(Preprocess.of(what.expects))
    about = context.data, files, where.identity, what.identity, what.expects, what.sees
    return f"{about} {what.clip is not None} {context.arithmetic}"


@dataclass(frozen=True)
class SelectedWay:
    """The best way, the probe fitted with it, and the validation accuracy of all ways."""

    way: Way
    linear: Linear
    tried: dict[str, float]

    @property
    def score(self) -> float:
        return max(self.tried.values())


def select_way(where: Where, what: What) -> SelectedWay:
    """By the validation accuracy of the tuned probe; the first of ties."""
    context, ways = where.context, check_crops(where.ways(what.sees), what.expects.size)
    config = Probe(context.config.data, select=SELECT, seed=context.config.seed)

    def computed() -> dict[str, Tensor]:
        scores, best = [], None
        for way in ways:
            by_split = {split: features(where, way, what, split) for split in ("train", "val")}
            fitted = fit_probe(config, context.rows, by_split)
            scores.append(fitted.score)
            best = fitted if best is None or fitted.score > best.score else best
        assert best is not None, "there is always a way"
        numbers = {"weight": best.linear.weight, "bias": best.linear.bias, "c": best.linear.c, "scores": scores}
        return {name: torch.from_numpy(np.asarray(number, dtype=np.float64)) for name, number in numbers.items()}

    found = context.kept("chosen", f"{feature_facts(where, what)} {ways}", computed)
    linear = Linear(found["weight"].numpy(), found["bias"].numpy(), float(found["c"]), standardized=True)
    tried = dict(zip((way.description for way in ways), found["scores"].tolist(), strict=True))
    return SelectedWay(ways[int(found["scores"].argmax())], linear, tried)


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    predictions: dict[str, Predictions]  # by split: test, and val unless it was fitted on
    validation: float  # class-balanced accuracy on validation data that were not fitted on
    way: Way
    tried: dict[str, float]  # by way
    rule: str
    facts: dict[str, Any] = field(default_factory=dict)


RULE = "way and C: highest class-balanced accuracy on val, without group labels; ties: the first way, the smallest C"


def probe(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    found, rows = select_way(where, what), where.context.rows

    def predict(split: str) -> Predictions:
        return predictions_from_logits(
            rows, rows.split_indices(split), found.linear.logits(features(where, found.way, what, split))
        )

    predictions = {split: predict(split) for split in ("val", "test")}
    return Outcome(predictions, found.score, found.way, found.tried, RULE, {"c": found.linear.c})


def dfr(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    """DFR fitted on all validation data; its validation accuracy is that of a fit to one half, on the other half."""
    context, found = where.context, select_way(where, what)
    rows, val = context.rows, context.rows.split_indices("val")
    assert rows.groups is not None
    config = Dfr(context.config.data, seed=context.config.seed)
    of_val = features(where, found.way, what, "val")
    fitted = fit_dfr(config, rows, {"val": of_val})
    kept, aside = split_off(rows.groups[val], 2, np.random.default_rng(context.config.seed))
    splits = rows.splits.copy()
    splits[val[aside]] = TRAIN  # which DFR-Val does not use
    half = fit_dfr(config, replace(rows, splits=splits), {"val": of_val[kept]})
    validation = score(predictions_from_logits(rows, val[aside], half.linear.logits(of_val[aside])), SELECT)
    test = predictions_from_logits(
        rows, rows.split_indices("test"), fitted.linear.logits(features(where, found.way, what, "test"))
    )
    rule = (
        f"way: that of the probe on these features ({RULE}); C and class weights: worst-group accuracy on half of val "
        "(DFR-Val, with group labels of val); validation accuracy: a fit to one half of val, on the other half"
    )
    facts = {"chosen": (fitted.selection or {}).get("chosen"), "group_labels": "of val"}
    return Outcome({"test": test}, validation, found.way, found.tried, rule, facts)


def zero_shot(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    clip, rows = what.clip, where.context.rows
    assert clip is not None
    ways = [way for way in check_crops(where.ways(what.sees), what.expects.size) if len(way.sides) < 2]
    if not ways:
        raise UserError("--crop-size: CLIP takes a single crop; name at least one single side, such as 2/7")

    def predict(way: Way, split: str) -> Predictions:
        tokens = torch.from_numpy(features(where, way, what, split)).to(where.context.device)
        with torch.no_grad():
            logits = clip.to(where.context.device).logits_of(tokens).cpu().numpy()
        return predictions_from_logits(rows, rows.split_indices(split), logits)

    val = {way: predict(way, "val") for way in ways}
    scores = {way: score(predictions, SELECT) for way, predictions in val.items()}
    way = max(scores, key=scores.__getitem__)
    rule = "nothing is fitted; way: highest class-balanced accuracy on val, without group labels; ties: the first"
    tried = {each.description: value for each, value in scores.items()}
    return Outcome({"val": val[way], "test": predict(way, "test")}, scores[way], way, tried, rule)


def fine_tune(where: Where, what: What, folder: Path) -> Outcome:
    """With the usual training loop, as `train erm` or `train early-mask --sight pixels`."""
    from ..train import train

    context, found = where.context, select_way(where, what)
    settings, masks = context.config, where.masks(found.way, what.expects)
    shared: dict[str, Any] = {
        "data": settings.data, "backbone": what.spec.of, "out": folder, "layout": settings.layout,
        "size": settings.size, "batch": settings.batch, "seed": settings.seed, "split_seed": settings.split_seed,
        "workers": settings.workers,
        "cache": context.folder, "device": settings.device, "precision": context.precision, "epochs": settings.epochs,
        "lr": settings.lr, "select": SELECT, "resume": True,
    }  # fmt: skip
    config: Train = Erm(**shared)
    if masks is not None:
        config = EarlyMask(**shared, masks=masks, sight="pixels", patch_threshold=0.1, zoom=found.way.window)
    run = train(config)
    names = tuple(context.rows.group_names)
    predictions = {
        split: Predictions.load_csv(run / "predictions" / f"{split}.csv", split=split, group_names=names)
        for split in ("val", "test")
    }
    rule = f"way: that of the frozen probe ({RULE}); checkpoint: highest class-balanced accuracy on val"
    facts = {"run": str(run), "epochs": settings.epochs, "lr": settings.lr}
    return Outcome(predictions, score(predictions["val"], SELECT), found.way, found.tried, rule, facts)


PREDICTORS: dict[str, Callable[[Where, What, Path], Outcome]] = {
    "probe": probe,
    "dfr": dfr,
    "zero-shot": zero_shot,
    "fine-tune": fine_tune,
}
