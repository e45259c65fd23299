"""Settings of the papers and their code, by name: `--recipe ifam-cub`. docs/recipes.md says where they differ here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import UserError
from .methods import A2
from .parts import Ifam, Pdiscoformer
from .relevance import Robustvit
from .training import Train

Kind = TypeVar("Kind", bound=Train)

# iFAM: spec of its papers and commands. 2.828e-6 is 1e-6 · √(128/16).
_LOOP: dict[str, Any] = {
    "backbone": "dinov2-b14-reg", "size": 518, "batch": 128, "epochs": 90, "lr": 2.828427e-6, "head_lr_factor": 1e4,
    "prototype_lr_factor": 1e3, "weight_decay": 0.05, "clip_grad": 2.0, "warmup": 0.0, "ema": None, "balance": "none",
    "augment": "published", "precision": "fp32", "part_dropout": 0.3, "classify_parts": 1.0, "tune_selector": "tokens",
    "fit": "crop",
}  # fmt: skip
_IFAM = _LOOP | {"sight": "patches", "selector": "learned", "mask_gradient": True, "zoom": False, "preset": "papers"}
_A2: dict[str, Any] = {
    "backbone": "dinov2-s14-reg", "where": "dinov2-s14-reg", "size": 224, "fit": "squash", "untuned": True,
    "layer": (-1,), "heads": ("mean",),
}  # fmt: skip

RECIPES: Mapping[str, tuple[type[Train], dict[str, Any]]] = {
    "ifam-waterbirds": (Ifam, _IFAM | {"parts": 8}),
    "ifam-cub": (Ifam, _IFAM | {"parts": 8}),
    "ifam-metashift": (Ifam, _IFAM | {"parts": 4, "size": 224}),
    "ifam-siim": (Ifam, _IFAM | {"parts": 8, "backbone": "rad-dino", "fit": "squash", "augment": "flip"}),
    "ifam-imagenet": (
        Ifam,
        _IFAM
        | {"parts": 8, "size": 224, "batch": 1024, "epochs": 120, "ema": 0.9999, "precision": "bf16"}
        | {"augment": "imagenet"},
    ),
    "pdiscoformer-cub": (Pdiscoformer, _LOOP | {"parts": 8, "batch": 32, "epochs": 28, "weight_decay": 0.0}),
    "a2-waterbirds": (A2, _A2 | {"crop_size": ("2/7",)}),
    "a2-spawrious": (A2, _A2 | {"crop_size": ("2/7+1/7",)}),
    "a2-metashift": (A2, _A2 | {"crop_size": ("2/7+1/7",)}),
    "robustvit-imagenet": (
        Robustvit,
        {
            "masks_per_class": 3, "mask_classes": 500, "epochs": 50, "batch": 8, "lr": 1.2e-5, "weight_decay": 0.01,
            "relevance": "gae", "double_backward": False, "background_weight": 2.0, "foreground_weight": 0.3,
            "relevance_weight": 0.8, "classification_weight": 0.2, "select": "relevance", "augment": "none",
        },
    ),
}  # fmt: skip


def recipe_settings(name: str, kind: type[Train]) -> dict[str, Any]:
    """The settings of a recipe for this method."""
    if name not in RECIPES:
        raise UserError(f"--recipe {name}: unknown; choose among {', '.join(RECIPES)}")
    of, settings = RECIPES[name]
    if kind is not of:
        raise UserError(f"--recipe {name}: is for {of.method}, not for {kind.method}")
    return settings


def from_recipe(name: str, kind: type[Kind], **given: Any) -> Kind:
    """A configuration with the settings of a recipe: `from_recipe("ifam-cub", Ifam, data="CUB", parts=16)`."""
    settings: Any = recipe_settings(name, kind) | given | {"recipe": name}
    return kind(**settings)


def with_recipe(kind: type, arguments: Sequence[str]) -> list[str]:
    """Arguments of `sightline train`, with the flags of their --recipe that they do not set themselves."""
    words = [word for argument in arguments for word in argument.split("=", 1)[: 2 if argument[:2] == "--" else 1]]
    words = [word.replace("_", "-") if word[:2] == "--" else word for word in words]
    if "--recipe" not in words[:-1] or not issubclass(kind, Train):
        return [*arguments]
    flags: list[str] = []
    for field, value in recipe_settings(words[words.index("--recipe") + 1], kind).items():
        flag, negated = f"--{field.replace('_', '-')}", f"--no-{field.replace('_', '-')}"
        if flag in words or negated in words:
            continue
        if isinstance(value, bool) and isinstance(getattr(kind, field), bool):
            flags.append(flag if value else negated)
        else:
            flags += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return [*arguments, *flags]
