"""Configurations read back from run.json, and what was renamed since earlier formats.

Runs of every format must load, evaluate and resume: whoever renames a field of a configuration or another key of
run.json adds it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from ..errors import UserError
from .limits import shortened
from .training import Train

FORMAT = 3  # version of the run folder; run.json without a number is format 1
Config = TypeVar("Config", bound=Train)
Renaming = tuple[str, Mapping[Any, Any]]  # the new name, and new values for old ones

PIXELS: Renaming = ("sight", {True: "pixels", False: "patches"})
SAME: Renaming = ("clip", {})  # the name of a CLIP model, not the maximum gradient norm

# Settings of format 1 by method ("" for all methods; a method's own entry comes first): new name and changed values.
RENAMED: dict[str, dict[str, Renaming]] = {
    "": {
        # the training loop
        "average": ("ema", {}),
        "clip": ("clip_grad", {}),
        "accumulate": ("grad_accum", {}),
        "head_lr": ("head_lr_factor", {}),
        "balance": ("balance", {"loss": "logit-adjustment"}),
        "frozen": ("freeze_backbone", {}),
        "tensorboard": ("tracker", {True: "tensorboard", False: None}),
        # ifam, pdiscoformer, early-mask, late-mask
        "tune_selector": ("tune_selector", {True: "all", False: "tokens", "nothing": "none"}),
        "prototype_lr": ("prototype_lr_factor", {}),
        "look_size": ("selector_size", {}),
        "look_again": ("refine", {}),
        "guide": ("guide_radius", {}),
        "sure": ("pixel_threshold", {}),
        "soft": ("soft_mask", {}),
        "at_least": ("patch_threshold", {}),
        "shaping.orthogonal": ("orthogonality_over", {}),
        "shaping.total_variation_at": ("total_variation_grid", {}),
        # probe, dfr, a2 and its baselines, zero-shot
        "plain": ("untuned", {}),
        "crop": ("crop_size", {}),
        "crops": ("crop_count", {}),
        "kind": ("fit_on", {}),
        "weigh_classes": ("tune_class_weights", {}),
        "floor": ("min_group_size", {}),
        "fit_rate": ("fit_lr", {}),
        "draws": ("noise_samples", {}),
        "names": ("class_names", {}),
        "general": ("general_prompt", {}),
        # robustvit, rrr, gradmask, masktune
        "start": ("init_from", {}),
        "bright": ("mask_marks", {"thing": "object"}),
        "per_class": ("masks_per_class", {}),
        "classes": ("mask_classes", {}),
        "second_order": ("double_backward", {}),
        "background": ("background_weight", {}),
        "foreground": ("foreground_weight", {}),
        "explaining": ("relevance_weight", {}),
        "answering": ("classification_weight", {}),
        "answer": ("classification_target", {"confidence": "prediction"}),
        "relative": ("normalize_penalty", {}),
        # groupdro, cvar, lff, jtt
        "adjust": ("adjustment", {}),
        "worst": ("worst_fraction", {}),
        "easy": ("gce_q", {}),
        "memory": ("loss_ema", {}),
        "first": ("first_epochs", {}),
        "more": ("upweight", {}),
    },
    "early-mask": {"pixels": PIXELS},
    "late-mask": {"pixels": PIXELS},
    "zs": {"clip": SAME},
    "a2-zs": {"clip": SAME},
    "ttr": {"clip": SAME},
    "a2-adapter": {"pictures": ("train_images", {})},
    "aim": {"heads": ("num_heads", {})},
    "matrix": {"pictures": ("figures", {}), "mass": ("attention_mass", {})},
    "pretrain": {
        "size": ("arch", {}),
        "pixels": ("size", {}),
        "large": ("global_size", {}),
        "small": ("local_size", {}),
        "smalls": ("local_crops", {}),
        "finish": ("full_size_fraction", {}),
        "momentum": ("teacher_momentum", {}),
        "masked": ("ibot", {}),
        "examine_every": ("validate_every", {}),
    },
}

# Keys of run.json beside its settings, and of its "selection", up to format 2.
RENAMED_FACTS = {"look_size": "selector_size", "pictures": "images"}

# What runs did before a setting existed, where that is not today's default.
BEFORE_IT_EXISTED: dict[str, dict[str, Any]] = {"ifam": {"sight": "patches", "selector": "learned"}}


def renamed_keys(method: str, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a format 1 run under their present names, with their present values."""
    table = RENAMED[""] | RENAMED.get(method, {})
    renamed = {}
    for name, value in values.items():
        new, new_values = table.get(f"{prefix}{name}", (name, {}))
        if isinstance(value, dict):
            value = renamed_keys(method, value, f"{name}.")
        renamed[new] = new_values.get(value, value) if isinstance(value, str | bool) else value
    return renamed


def renamed_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a run.json of format 1 or 2 under its present keys."""
    renamed = {RENAMED_FACTS.get(name, name): value for name, value in facts.items()}
    if isinstance(selection := renamed.get("selection"), dict):
        renamed["selection"] = {RENAMED_FACTS.get(name, name): value for name, value in selection.items()}
    return renamed


def stored_config(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The dataclass that was stored with `dataclasses.asdict` as JSON; unknown settings are ignored."""
    given = typed_fields(kind, BEFORE_IT_EXISTED.get(kind.method, {}) | dict(values))
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in given]:
        raise UserError(f"the settings have no {missing[0]!r}")
    return kind(**given)


def typed_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: typed(values[field.name], hints[field.name]) for field in fields(kind) if field.name in values}


def typed(value: Any, hint: Any) -> Any:
    """A JSON value in the type of its field: paths, tuples and nested dataclasses are not JSON types."""
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{shortened(value)} must be an object")
        return hint(**typed_fields(hint, value))
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and (hint is Path or Path in get_args(hint)):
        return Path(value)
    return value
