"""CLIP without training: on whole pictures, and on the crop that A² chooses."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config import A2Zs, Train, Ttr, Zs
from ..errors import UserError
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..sight import Look, Method, Sight
from ..training.checkpoint import save_tensors
from ..vit.model import Input, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.features import kept_features
from ..what.zeroshot import Clip, ZeroShot, open_clip, spoken
from ..where.attention import cls_attention_map
from .a2 import Crops, check_crowds, heads_of, plans
from .base import record_backbone, record_selector, recorded_selector
from .pair import Pair
from .probe import seen_at_once

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


def asked(config: Zs | A2Zs | Ttr, rows: Rows) -> tuple[Clip, Tensor, Input]:
    """CLIP, the embeddings of the classes, and what is expected of a picture."""
    clip = open_clip(config.clip)
    text = clip.say(spoken(rows.classes, config.names), config.prompts)
    expects, patch = clip.vit.config.input, clip.vit.config.patch
    if config.size is not None:
        if config.size < patch or config.size % patch:
            near = max(1, config.size // patch) * patch
            raise UserError(f"--size {config.size}: must be a multiple of CLIP's patch, {patch}, such as {near}")
        expects = replace(expects, size=(config.size, config.size))
    return clip, text, expects


def keep_untrained(
    run: Run, model: nn.Module, vit: ViT, expects: Input, config: Zs | A2Zs | Ttr, rows: Rows, line: dict[str, Any]
) -> None:
    """Weights and log of a method that learns nothing; what was said to CLIP is noted."""
    record_backbone(run, vit, expects, cast(Train, config))
    names = dict(zip(rows.classes, spoken(rows.classes, config.names), strict=True))
    run.note(said={"prompts": list(config.prompts), "names": names})
    run.cut_log(0)  # of a run that was interrupted, or finished, before
    run.log(line)
    save_tensors(run.best, model.state_dict(), {})


def unsaid(vit_config: ViTConfig, facts: dict[str, Any]) -> Tensor:
    """Room for what was said."""
    return torch.zeros(len(facts["data"]["classes"]), vit_config.classes)


# ---- whole pictures --------------------------------------------------------------------------------------------------


class WholeZeroShot(ZeroShot, Method):
    """Sees everything; its map is the attention of the last block."""

    sees_everything = True
    export_graph = "whole"

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}


def make_zs(config: Zs, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    clip, text, expects = asked(config, rows)
    model = WholeZeroShot(clip.vit, expects.size, text, clip.scale)
    if accelerator.is_main_process:
        keep_untrained(run, model, clip.vit, expects, config, rows, {})
    return model.to(accelerator.device).eval(), expects


def build_zs(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return WholeZeroShot(ViT(vit_config), vit_config.input.size, unsaid(vit_config, facts))


# ---- A²'s crop -------------------------------------------------------------------------------------------------------


def make_a2_zs(config: A2Zs, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    clip, text, expects = asked(config, rows)
    where = load_backbone(config.where, classes=0, seed=config.seed) if config.where else copy.deepcopy(clip.vit)
    ways = ways_to_look(config, where, expects)
    what = ZeroShot(clip.vit, seen_at_once(clip.vit, expects), text, clip.scale)
    tried = {}
    if len(ways) > 1:
        for crops in ways:
            tried[crops] = on_validation(config, crops.sight(where), what, expects, rows, run, accelerator)
    crops = max(ways, key=lambda each: tried.get(each, 0.0))  # the first where they tie
    model = Pair(cast(Look, crops.sight(where)), what, export_graph=crops.export_graph).to(accelerator.device).eval()
    if accelerator.is_main_process:
        record_selector(run, where)
        rule = f"highest {config.select} on val, the first where they tie" if tried else "the only one given"
        run.note(crops=asdict(crops) | {"size": list(what.size), "rule": rule})
        line = {"crops": crops.words, "tried_crops": {each.words: found for each, found in tried.items()}}
        keep_untrained(run, model, clip.vit, expects, config, rows, line)
        if tried:
            print(f"Looking by {crops.words}: {config.select} {tried[crops]:.1%} on val, the best of {len(tried)}.")
    return model, expects


def ways_to_look(config: A2Zs, where: ViT, expects: Input) -> list[Crops]:
    """Every side with every block and heads, one crop each."""
    depth = where.config.depth
    for layer in config.layer:
        if not -depth <= layer < depth:
            raise UserError(f"--layer {layer}: {config.where or config.clip} has {depth} blocks, 0 to {depth - 1}")
    sides = [sides for sides, _ in plans(config)]
    if many := [each for each in sides if len(each) > 1]:
        raise UserError(f"--crop {'+'.join(many[0])}: CLIP answers from one crop; give one side")
    heads = [heads_of(text, where.config) for text in config.heads]
    ways = [Crops(side, layer, each) for layer in config.layer for each in heads for side in sides]
    if not ways:
        raise UserError("--crop, --layer, --heads: name at least one of each")
    for crops in ways:
        check_crowds(crops, expects.size)
    return ways


def on_validation(
    config: A2Zs, where: nn.Module, what: ZeroShot, expects: Input, rows: Rows, run: Run, accelerator: Accelerator
) -> float:
    """What CLIP's answers are worth on the validation data, looking so."""
    looking, val = cast(Look, where), rows.where("val")
    tokens = kept_features(
        lambda images: what.embed(images, looking.look(images)), [where, what], rows, val, expects, accelerator,
        config.cache or run.folder / "features", decoded=config.cache, batch=config.batch, workers=config.workers,
    )  # fmt: skip
    with torch.no_grad():
        logits = what.answer(torch.from_numpy(tokens).to(accelerator.device)).cpu().numpy()
    return score(predictions_from_logits(rows, val, logits), config.select)


def build_a2_zs(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    said = facts["crops"]
    crops = Crops(tuple(said["sides"]), said["layer"], said["heads"], said["seed"])
    what = ZeroShot(ViT(vit_config), tuple(said["size"]), unsaid(vit_config, facts))
    return Pair(cast(Look, crops.sight(recorded_selector(facts))), what, export_graph=crops.export_graph)
