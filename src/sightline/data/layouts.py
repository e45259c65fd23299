"""Layouts of published datasets by name, optionally NAME:VARIANT (`imagenet9:mixed_rand`, `metashift-animals:3`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from .rows import Rows

# Name -> "module:function" in `datasets`, or the function itself for a reader outside the package.
LAYOUTS: dict[str, str | Callable[..., Rows]] = {
    "celeba": "celeba:read_celeba",
    "cub": "cub:read_cub",
    "imagenet": "imagenet:read_imagenet",
    "imagenet-a": "imagenet:read_imagenet_a",
    "imagenet-r": "imagenet:read_imagenet_r",
    "imagenet-s": "imagenet:read_imagenet_s",
    "imagenet-segmentation": "imagenet:read_imagenet_segmentation",
    "imagenet-sketch": "imagenet:read_imagenet_sketch",
    "imagenet-v2": "imagenet:read_imagenet_v2",
    "imagenet9": "imagenet:read_imagenet9",
    "metashift-animals": "metashift:read_metashift_animals",
    "metashift-disc": "metashift:read_metashift_disc",
    "metashift-indoor-outdoor": "metashift:read_metashift_indoor_outdoor",
    "objectnet": "imagenet:read_objectnet",
    "si-score-location": "imagenet:read_si_score_location",
    "si-score-rotation": "imagenet:read_si_score_rotation",
    "si-score-size": "imagenet:read_si_score_size",
    "siim": "siim:read_siim",
    "spawrious-m2m": "spawrious:read_spawrious_m2m",
    "spawrious-o2o": "spawrious:read_spawrious_o2o",
    "waterbird200": "cub:read_waterbird200",
    "waterbirds": "waterbirds:read_waterbirds",
}
VARIANTS = {
    "imagenet9": "a variant, as in imagenet9:mixed_rand",
    "metashift-animals": "a seed, as in metashift-animals:3",
}


def layout_reader(layout: str) -> Callable[[Path], Rows]:
    """The function that reads a layout, with its variant."""
    name, colon, variant = layout.partition(":")
    if name not in LAYOUTS:
        raise UserError(f"unknown layout {name!r}; known layouts: {', '.join(LAYOUTS)}")
    read = LAYOUTS[name]
    if isinstance(read, str):
        module, function = read.split(":")
        read = getattr(importlib.import_module(f"sightline.datasets.{module}"), function)
    if not colon:
        return read
    if name not in VARIANTS:
        raise UserError(f"layout {layout!r}: {name} has no variants; use {name}")
    if not variant:
        raise UserError(f"layout {layout!r}: no variant after the colon; {name} takes {VARIANTS[name]}")
    return lambda path: read(path, variant)
