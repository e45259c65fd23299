"""The configurations that claim to be blind outside their sight: methods, architectures, and ways of hiding.

Weights are random: hiding is a matter of structure, and what matters is that visible pixels change the output, which
is checked as a control.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.config import A2, A2Adapter, A2Dfr, A2Zs, CentreCrop, EarlyMask, Ifam, RandomCrop, Train, Ttr
from sightline.datasets.toy_images import make_toy
from sightline.methods import builder_of
from sightline.sight import Method, Sight
from sightline.vit.backbones import BACKBONES, NANO
from sightline.vit.model import ViTConfig
from sightline.what.masked import MaskedViT

CLASSES = 10
SIGHTS = 16  # images with a sight; larger batches repeat them
DATA = Path("toy")

ARCHITECTURES: dict[str, ViTConfig] = {
    "nano, 96 px": NANO,
    "ViT-Ti/16, 224 px": replace(BACKBONES["augreg-ti16"].config, classes=0),
    "ViT-S/14 with registers, 336 px": replace(
        BACKBONES["dinov2-s14-reg"].config, input=replace(BACKBONES["dinov2-s14-reg"].config.input, size=(336, 336))
    ),
}

CROPS = {"sides": ["2/7"], "layer": -1, "heads": "mean", "seed": 0}
IFAM = {"selector": "learned", "parts": 4}

# Each way in which a method can be configured to hide: the settings, and what run.json would record.
Make = tuple[str, Train, Callable[[ViTConfig], dict[str, Any]]]


def with_crops(sides: tuple[str, ...] = ("2/7",), **changes: Any) -> Callable[[ViTConfig], dict[str, Any]]:
    def facts(vit: ViTConfig) -> dict[str, Any]:
        crops = CROPS | {"sides": list(sides), "size": list(vit.input.size)} | changes
        attends = crops["layer"] is not None
        return {"crops": crops, "where": {"vit": asdict(replace(vit, classes=0))} if attends else None}

    return facts


def adapted(vit: ViTConfig) -> dict[str, Any]:
    recorded = {
        "crops": 1, "adapter": "tokens", "layer": -1, "heads": "mean", "patches": list(grid_of(vit)),
        "candidates": ["1/4"], "of_candidates": 16, "size": list(vit.input.size),
    }  # fmt: skip
    return {"adapted": recorded, "where": {"vit": asdict(replace(vit, classes=0))}}


def queued(vit: ViTConfig) -> dict[str, Any]:
    H, W = grid_of(vit)
    return {"queue": [2, H * W], "clustering": {"clusters": 3, "components": 3, "rank": 16, "sigma": 0.72, "seed": 0}}


def grid_of(vit: ViTConfig) -> tuple[int, int]:
    return vit.input.size[0] // vit.patch, vit.input.size[1] // vit.patch


NONE: Callable[[ViTConfig], dict[str, Any]] = lambda _: {}  # noqa: E731
MAKES: list[Make] = [
    ("ifam, patches", Ifam(DATA, sight="patches", **IFAM), NONE),
    ("ifam, pixels", Ifam(DATA, sight="pixels", zoom=False, refine=False, **IFAM), NONE),
    ("ifam, pixels, zoom", Ifam(DATA, sight="pixels", refine=False, **IFAM), NONE),
    ("ifam, pixels, zoom, refined", Ifam(DATA, sight="pixels", refine=True, **IFAM), NONE),
    ("ifam, clusters", Ifam(DATA, sight="pixels", selector="clusters"), NONE),
    ("early-mask, patches", EarlyMask(DATA), NONE),
    ("early-mask, patches, zoom", EarlyMask(DATA, zoom=True), NONE),
    ("early-mask, pixels", EarlyMask(DATA, sight="pixels"), NONE),
    ("early-mask, pixels, noise", EarlyMask(DATA, sight="pixels", fill="noise"), NONE),
    ("early-mask, pixels, zoom, black", EarlyMask(DATA, sight="pixels", zoom=True, fill="black"), NONE),
    ("a2", A2(DATA), with_crops(("2/7", "2/7"))),
    ("a2-dfr", A2Dfr(DATA), with_crops()),
    ("a2-zs", A2Zs(DATA), with_crops(("4/7",))),
    ("a2-adapter", A2Adapter(DATA), adapted),
    ("centre-crop", CentreCrop(DATA), with_crops(("4/7",), layer=None, heads=None, seed=None)),
    ("random-crop", RandomCrop(DATA), with_crops(layer=None, heads=None)),
    ("ttr", Ttr(DATA, general_prompt="a photo."), queued),
]


@dataclass(frozen=True, eq=False)
class Case:
    """A method with its images, and the sight that is held fixed."""

    name: str
    architecture: str
    hiding: str
    method: Method
    images: Tensor  # float32 [SIGHTS, 3, h, w]
    sight: Sight


def cases(names: tuple[str, ...], architectures: tuple[str, ...], seed: int) -> Iterator[Case]:
    for architecture in architectures:
        vit = ARCHITECTURES[architecture]
        images, masks = toy_images(vit.input.size[0], seed)
        for name, config, facts in MAKES:
            if names and not any(name.startswith(start) for start in names):
                continue
            method = make_method(config, vit, facts(vit), seed)
            sight = own_sight(method, images, masks)
            for hiding in ways_of_hiding(method):
                yield Case(name, architecture, hiding, method, images, sight)


def toy_images(side: int, seed: int) -> tuple[Tensor, Tensor]:
    """[SIGHTS, 3, side, side] in [0, 1] and their masks; larger ones than the toy set draws are enlarged."""
    times = math.ceil(side / 256)
    toy = make_toy(SIGHTS, size=side // times, seed=seed)
    enlarged = [x.repeat_interleave(times, dim=-2).repeat_interleave(times, dim=-1) for x in (toy.images, toy.masks)]
    return enlarged[0].float() / 255, enlarged[1]


def make_method(config: Train, vit: ViTConfig, facts: dict[str, Any], seed: int) -> Method:
    torch.manual_seed(seed)
    zero_shot = config.method in ("a2-zs", "ttr")
    vit = replace(vit, classes=32 if zero_shot else CLASSES)
    facts = {"data": {"classes": [str(i) for i in range(CLASSES)]}} | facts
    method = builder_of(config.method)(vit, config, facts).eval().requires_grad_(False)
    for name, tensor in method.state_dict().items():  # what a fit would fill in
        if name.split(".")[-1] in ("text", "general", "start"):
            tensor.normal_()
    assert method.blind, f"{config.method} does not claim to be blind"
    return method


def own_sight(method: Method, images: Tensor, masks: Tensor) -> Sight:
    """True masks where a method takes masks: what an untrained selector finds may be everything or nothing."""
    with torch.no_grad():
        return method.look_at(images, masks) if method.accepts_masks else method.look(images)


def ways_of_hiding(method: nn.Module) -> Iterator[str]:
    """Each of them set in the method while it is used."""
    masked = [module for module in method.modules() if isinstance(module, MaskedViT)]
    if not masked:
        yield "not given"
        return
    for hide in ("removal", "mask"):
        for module in masked:
            module.hide = hide
        yield hide
