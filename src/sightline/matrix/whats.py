"""What to make of a sight: frozen features read out by a fit, with or without group labels; words; or all of a ViT.

In which way a where is used, validation data choose, once for each backbone and whether it hides or crops: DFR has the
features that the probe chose, and fine-tuning hides what the frozen probe did best without.
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
from ..data.images import Canvas
from ..data.rows import TRAIN
from ..errors import UserError
from ..methods.base import open_backbone
from ..methods.dfr import fit_dfr
from ..methods.probe import fit_probe, seen_at_once
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..metrics.predictions import Predictions
from ..sight import Sight
from ..vit.model import Input, ViT
from ..vit.weights import HEAD, weights_sha256
from ..what.dfr import set_aside
from ..what.features import HEADS
from ..what.masked import MaskedViT
from ..what.probe import BoxProbe, Linear
from ..what.zeroshot import ZeroShot, open_clip, spoken
from .bench import Bench
from .ways import CLOSER, Sees, Way, window_around
from .wheres import Where, fitting
from .words import Word

SELECT = "balanced"  # the accuracy averaged over classes, which needs no group labels
Embed = Callable[[Tensor, Sight], Tensor]


@dataclass(frozen=True, eq=False)
class What:
    word: Word
    bench: Bench
    vit: ViT
    expects: Input
    identity: str  # of the weights
    clip: ZeroShot | None = None

    @property
    def sees(self) -> Sees:
        return "crop" if self.word.kind.startswith("crop-") else "mask"

    @property
    def answers(self) -> str:
        return self.word.kind.removeprefix("crop-").removeprefix("mask-")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for name, p in self.vit.named_parameters() if not name.startswith(HEAD))

    def settings(self) -> dict[str, Any]:
        """That its cells depend on, besides data, weights and where."""
        config = self.bench.config
        found: dict[str, Any] = {"crop": config.crop, "mass": config.mass, "seed": config.seed}
        if self.answers == "fine-tune":
            found |= {"epochs": config.epochs, "lr": config.lr, "batch": config.batch}
        if self.answers == "zero-shot":
            found |= {"prompts": config.prompts, "names": spoken(self.bench.rows.classes, config.names)}
        return found | {"arithmetic": self.bench.arithmetic}

    def embed(self, way: Way) -> Embed:
        """CLS tokens of what may be seen."""
        size = seen_at_once(self.vit, self.expects)
        if self.clip is not None:
            clip = self.clip
            return lambda images, sight: clip.embed(images, closer(sight, images) if way.window else sight)
        if self.sees == "crop":
            return BoxProbe(self.vit, size, max(1, len(way.sides))).embed
        hiding = MaskedViT(self.vit, zoom=CLOSER if way.window else None).to(self.bench.device)
        return lambda images, sight: cls_of(hiding, images, sight)


def closer(sight: Sight, images: Tensor) -> Sight:
    return sight if sight.boxes is not None else replace(sight, boxes=window_around(sight.visible(images.shape[-2:])))


def cls_of(hiding: MaskedViT, images: Tensor, sight: Sight) -> Tensor:
    tokens = hiding.judge(images, sight).tokens
    assert tokens is not None
    return tokens[:, 0]


def open_what(word: Word, bench: Bench) -> What:
    config, rows = bench.config, bench.rows
    if word.kind.endswith("-dfr") and rows.groups is None:
        raise UserError(f"{config.data}: DFR needs groups, and these data have none")
    if word.kind.endswith("-zero-shot"):
        clip = open_clip(word.of)
        text = clip.say(spoken(rows.classes, config.names), config.prompts)
        what = ZeroShot(clip.vit, seen_at_once(clip.vit, clip.vit.config.input), text, clip.scale)
        return What(word, bench, clip.vit, clip.vit.config.input, weights_sha256(what), what)
    asked = Probe(config.data, backbone=word.of, size=config.size, seed=config.seed)
    vit, expects = open_backbone(asked, len(rows.classes))
    return What(word, bench, vit, expects, weights_sha256(vit, without=HEADS))


# ---- features --------------------------------------------------------------------------------------------------------


def features(where: Where, way: Way, what: What, split: str) -> np.ndarray:
    """float32 [n, D]: of the pictures of a split, computed now or kept."""
    bench, canvas = where.bench, Canvas.of(what.expects)

    def computed() -> dict[str, Tensor]:
        what.vit.to(bench.device).eval()
        shown, embed = where.shown(what.expects), what.embed(way)

        def of_some(images: Tensor, at: Tensor) -> Tensor:
            some = None if shown is None else shown[at]
            return embed(images, where.sight(way, what.sees, images, some, what.vit.grid(images))).float()

        return {"features": bench.over(of_some, bench.rows.where(split), canvas, exact=False)}

    facts = f"{common_facts(where, what)} {way} {split}"
    return bench.kept("features", facts, computed)["features"].numpy()


def common_facts(where: Where, what: What) -> str:
    bench = where.bench
    about = bench.data, bench.files(Canvas.of(what.expects)), where.identity, what.identity, what.expects, what.sees
    return f"{about} {what.clip is not None} {bench.arithmetic}"


@dataclass(frozen=True)
class Chosen:
    """The best of the ways, and the fit to it."""

    way: Way
    linear: Linear
    tried: dict[str, float]

    @property
    def score(self) -> float:
        return max(self.tried.values())


def chosen(where: Where, what: What) -> Chosen:
    """By the tuned probe on validation data; the first where they tie."""
    bench, ways = where.bench, fitting(where.ways(what.sees), what.expects.size)
    config = Probe(bench.config.data, select=SELECT, seed=bench.config.seed)

    def computed() -> dict[str, Tensor]:
        scores, best = [], None
        for way in ways:
            of_splits = {split: features(where, way, what, split) for split in ("train", "val")}
            fitted = fit_probe(config, bench.rows, of_splits)
            scores.append(fitted.score)
            best = fitted if best is None or fitted.score > best.score else best
        assert best is not None, "there is always a way"
        numbers = {"weight": best.linear.weight, "bias": best.linear.bias, "c": best.linear.c, "scores": scores}
        return {name: torch.from_numpy(np.asarray(number, dtype=np.float64)) for name, number in numbers.items()}

    found = bench.kept("chosen", f"{common_facts(where, what)} {ways}", computed)
    linear = Linear(found["weight"].numpy(), found["bias"].numpy(), float(found["c"]), standardized=True)
    tried = dict(zip((way.words for way in ways), found["scores"].tolist(), strict=True))
    return Chosen(ways[int(found["scores"].argmax())], linear, tried)


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    answers: dict[str, Predictions]  # by split: test, and val where it was not fitted
    validation: float  # class-balanced accuracy on validation data that were not fitted
    way: Way
    tried: dict[str, float]  # by way
    rule: str
    facts: dict[str, Any] = field(default_factory=dict)


RULE = f"way and C: highest {SELECT} accuracy on val, without group labels; the first way and the smallest C of equals"


def probe(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    found, rows = chosen(where, what), where.bench.rows

    def answered(split: str) -> Predictions:
        return predictions_from_logits(
            rows, rows.where(split), found.linear.logits(features(where, found.way, what, split))
        )

    answers = {split: answered(split) for split in ("val", "test")}
    return Outcome(answers, found.score, found.way, found.tried, RULE, {"c": found.linear.c})


def dfr(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    """Fitted to all validation data; what it is worth on them, half of them say of a fit to the other half."""
    bench, found = where.bench, chosen(where, what)
    rows, val = bench.rows, bench.rows.where("val")
    assert rows.groups is not None
    config = Dfr(bench.config.data, seed=bench.config.seed)
    of_val = features(where, found.way, what, "val")
    fitted = fit_dfr(config, rows, {"val": of_val})
    kept, aside = set_aside(rows.groups[val], 2, np.random.default_rng(bench.config.seed))
    splits = rows.splits.copy()
    splits[val[aside]] = TRAIN  # where DFR-Val does not look
    half = fit_dfr(config, replace(rows, splits=splits), {"val": of_val[kept]})
    validation = score(predictions_from_logits(rows, val[aside], half.linear.logits(of_val[aside])), SELECT)
    test = predictions_from_logits(
        rows, rows.where("test"), fitted.linear.logits(features(where, found.way, what, "test"))
    )
    rule = (
        f"way: that of the probe on these features ({RULE}); C and class weights: worst group on half of val (DFR-Val, "
        "fitted and chosen with group labels of val); its validation figure: a fit to one half of val, on the other"
    )
    facts = {"chosen": (fitted.selection or {}).get("chosen"), "group_labels": "of val"}
    return Outcome({"test": test}, validation, found.way, found.tried, rule, facts)


def zero_shot(where: Where, what: What, folder: Path) -> Outcome:  # noqa: ARG001
    clip, rows = what.clip, where.bench.rows
    assert clip is not None
    ways = [way for way in fitting(where.ways(what.sees), what.expects.size) if len(way.sides) < 2]
    if not ways:
        raise UserError("--crop: CLIP answers from one crop; name a single side, too")

    def answered(way: Way, split: str) -> Predictions:
        tokens = torch.from_numpy(features(where, way, what, split)).to(where.bench.device)
        with torch.no_grad():
            logits = clip.to(where.bench.device).answer(tokens).cpu().numpy()
        return predictions_from_logits(rows, rows.where(split), logits)

    val = {way: answered(way, "val") for way in ways}
    scores = {way: score(answers, SELECT) for way, answers in val.items()}
    way = max(scores, key=scores.__getitem__)
    rule = f"nothing is fitted; way: highest {SELECT} accuracy on val, without group labels; the first of equals"
    tried = {each.words: found for each, found in scores.items()}
    return Outcome({"val": val[way], "test": answered(way, "test")}, scores[way], way, tried, rule)


def fine_tune(where: Where, what: What, folder: Path) -> Outcome:
    """Through the one training loop, as `train erm` or `train early-mask --pixels`."""
    from ..train import train

    bench, found = where.bench, chosen(where, what)
    asked, masks = bench.config, where.masks(found.way, what.expects)
    shared: dict[str, Any] = {
        "data": asked.data, "backbone": what.word.of, "out": folder, "layout": asked.layout, "size": asked.size,
        "batch": asked.batch, "seed": asked.seed, "split_seed": asked.split_seed, "workers": asked.workers,
        "cache": bench.folder, "device": asked.device, "precision": bench.precision, "epochs": asked.epochs,
        "lr": asked.lr, "select": SELECT, "resume": True,
    }  # fmt: skip
    config: Train = Erm(**shared)
    if masks is not None:
        config = EarlyMask(**shared, masks=masks, sight="pixels", at_least=0.1, zoom=found.way.window)
    run = train(config)
    names = tuple(bench.rows.group_names)
    answers = {
        split: Predictions.load_csv(run / "predictions" / f"{split}.csv", split=split, group_names=names)
        for split in ("val", "test")
    }
    rule = f"way: that of the frozen probe with the same mask ({RULE}); epoch: highest {SELECT} accuracy on val"
    facts = {"run": str(run), "epochs": asked.epochs, "lr": asked.lr}
    return Outcome(answers, score(answers["val"], SELECT), found.way, found.tried, rule, facts)


ANSWERS: dict[str, Callable[[Where, What, Path], Outcome]] = {
    "probe": probe,
    "dfr": dfr,
    "zero-shot": zero_shot,
    "fine-tune": fine_tune,
}
