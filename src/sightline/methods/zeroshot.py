"""Zero-shot CLIP: on whole images, and on the crop that A² selects."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..config import A2Zs, Train, Ttr, Zs
from ..errors import UserError
from ..metrics.groups import score
from ..metrics.inference import predictions_from_logits
from ..sight import Look, Method, Sight
from ..training.checkpoint import save_tensors
from ..vit.model import Input, ReadLogits, ViT, ViTConfig
from ..vit.weights import load_backbone
from ..what.features import cached_features
from ..what.zeroshot import Clip, ZeroShot, clip_class_names, open_clip
from ..where.attention import cls_attention_map
from ..where.crops import vit_input_size
from .a2 import CropPlan, check_crops_fit, check_layer, parse_crop_sizes, parse_heads
from .base import fitted_input, record_backbone, record_selector, recorded_selector, resized_input
from .pair import Pair

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


def prepare_clip(config: Zs | A2Zs | Ttr, rows: Rows) -> tuple[Clip, Tensor, Input]:
    """CLIP, the text embeddings of the classes, and CLIP's input at the configured image size."""
    clip = open_clip(config.clip)
    text = clip.class_embeddings(clip_class_names(rows.classes, config.class_names), config.prompts)
    return clip, text, fitted_input(resized_input(clip.vit, config.size, "CLIP"), config.fit)


def save_untrained(
    run: Run, model: nn.Module, vit: ViT, expects: Input, config: Zs | A2Zs | Ttr, rows: Rows, line: dict[str, Any]
) -> None:
    """Save the weights and the log of a method without training; run.json records prompts and class names."""
    record_backbone(run, vit, expects, cast(Train, config))
    names = dict(zip(rows.classes, clip_class_names(rows.classes, config.class_names), strict=True))
    run.note(said={"prompts": list(config.prompts), "names": names})
    run.cut_log(0)  # of an earlier run in this folder
    run.log(line)
    save_tensors(run.best, model.state_dict(), {})


def empty_text_embeddings(vit_config: ViTConfig, facts: dict[str, Any]) -> Tensor:
    """[C, P]: to load text embeddings into."""
    return torch.zeros(len(facts["data"]["classes"]), vit_config.classes)


# ---- whole images ----------------------------------------------------------------------------------------------------


class WholeZeroShot(ZeroShot, Method):
    """Sees everything; its map is the CLS attention of the last block."""

    sees_everything = True
    export_graph = "whole"

    def look(self, images: Tensor) -> Sight:
        return Sight.everything(images)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images)}

    def relevance_source(self) -> tuple[ViT, ReadLogits]:
        return self.vit, lambda out: self.logits_of(out.cls)


def make_zs(config: Zs, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    clip, text, expects = prepare_clip(config, rows)
    model = WholeZeroShot(clip.vit, expects.size, text, clip.scale)
    if accelerator.is_main_process:
        save_untrained(run, model, clip.vit, expects, config, rows, {})
    return model.to(accelerator.device).eval(), expects


def build_zs(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    return WholeZeroShot(ViT(vit_config), vit_config.input.size, empty_text_embeddings(vit_config, facts))


# ---- A²'s crop -------------------------------------------------------------------------------------------------------


def make_a2_zs(config: A2Zs, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    clip, text, expects = prepare_clip(config, rows)
    where = load_backbone(config.where, classes=0, seed=config.seed) if config.where else copy.deepcopy(clip.vit)
    plans = crop_plans(config, where, expects)
    what = ZeroShot(clip.vit, vit_input_size(clip.vit, expects.size), text, clip.scale)
    tried = {}
    if len(plans) > 1:
        for plan in plans:
            tried[plan] = validation_score(config, plan.selector(where), what, expects, rows, run, accelerator)
    best = max(plans, key=lambda plan: tried.get(plan, 0.0))  # ties go to the first
    model = Pair(cast(Look, best.selector(where)), what, export_graph=best.export_graph).to(accelerator.device).eval()
    if accelerator.is_main_process:
        record_selector(run, where)
        rule = f"highest {config.select} on val, the first where they tie" if tried else "the only one given"
        run.note(crops=asdict(best) | {"size": list(what.size), "rule": rule})
        line = {"crops": best.description, "tried_crops": {plan.description: value for plan, value in tried.items()}}
        save_untrained(run, model, clip.vit, expects, config, rows, line)
        if tried:
            print(f"Selected {best.description}: {config.select} {tried[best]:.1%} on val, the best of {len(tried)}.")
    return model, expects


def crop_plans(config: A2Zs, where: ViT, expects: Input) -> list[CropPlan]:
    """Every side with every block and head aggregation, one crop each."""
    for layer in config.layer:
        check_layer(config.where or config.clip, where.config, layer)
    sides = [sides for sides, _ in parse_crop_sizes(config)]
    if several := [each for each in sides if len(each) > 1]:
        raise UserError(f"--crop-size {'+'.join(several[0])}: CLIP predicts from one crop; give one side")
    heads = [parse_heads(text, where.config) for text in config.heads]
    plans = [CropPlan(side, layer, each) for layer in config.layer for each in heads for side in sides]
    if not plans:
        raise UserError("--crop-size, --layer, --heads: give at least one of each")
    for plan in plans:
        check_crops_fit(plan, expects.size)
    return plans


def validation_score(
    config: A2Zs, where: nn.Module, what: ZeroShot, expects: Input, rows: Rows, run: Run, accelerator: Accelerator
) -> float:
    """The score of CLIP's predictions on the validation data with this selector."""
    selector, val = cast(Look, where), rows.split_indices("val")
    tokens = cached_features(
        lambda images: what.embed(images, selector.look(images)), [where, what], rows, val, expects, accelerator,
        config.cache or run.folder / "features", decoded=config.cache, batch=config.batch, workers=config.workers,
    )  # fmt: skip
    with torch.no_grad():
        logits = what.logits_of(torch.from_numpy(tokens).to(accelerator.device)).cpu().numpy()
    return score(predictions_from_logits(rows, val, logits), config.select)


def build_a2_zs(vit_config: ViTConfig, _: Train, facts: dict[str, Any]) -> nn.Module:
    plan, size = CropPlan.recorded(facts["crops"]), tuple(facts["crops"]["size"])
    what = ZeroShot(ViT(vit_config), size, empty_text_embeddings(vit_config, facts))
    return Pair(cast(Look, plan.selector(recorded_selector(facts))), what, export_graph=plan.export_graph)
