"""Two-stage models with random weights and a given sight, and their training steps, for timing."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import bare  # noqa: F401 (first, for machines without tyro)
from sightline.config import Ifam
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.erm import Classifier
from sightline.methods.ifam import IFam, make_predictor, pixel_settings, selector_depth, selector_size
from sightline.sight import Sight, cell_share
from sightline.training.schedule import update_ema
from sightline.training.trainable import StepInfo, Trainable, TrainBatch
from sightline.vit import model as vit_model
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone

BACKBONES = ("augreg-ti16", "dinov2-s14-reg", "dinov2-b14-reg")
SIGHTS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "patches, no mask gradient": {"sight": "patches", "mask_gradient": False},
    "default": {},
    "default, all blocks at twice the size": {"selector_depth": -1, "scale": 2},  # of the images
    "default, look at the images' size": {"scale": 1},
    "default, look with 3 blocks": {"selector_depth": 3},  # as many as a distilled selector has by default
    "default, look with 3 blocks at the images' size": {"selector_depth": 3, "scale": 1},
    "default, learned": {"selector": "learned"},
}
VISIBLE = 0.25
CLASSES = 200


class GivenSight(IFam):
    """Stage 1 runs as usual; what it chose is then replaced by a given sight."""

    given: Sight

    def look(self, images: Tensor) -> Sight:
        own = super().look(images)
        return replace(own, keep=self.given.keep, keep_pixels=self.given.keep_pixels)

    def pixel_masks(self, images: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        super().pixel_masks(images, *others)
        assert self.given.keep is not None
        assert self.given.keep_pixels is not None
        return self.given.keep, self.given.keep_pixels

    def stage2_input(self, images: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        seen, keep, pixels = super().stage2_input(images, *others)
        if self.pixels is None:  # the same values as given, with the gradient of the mask if there is one
            given = self.given.keep
            assert given is not None
            keep = given if keep.dtype == torch.bool else given.to(keep.dtype) + (keep - keep.detach())
        return seen, keep, pixels


def given_sight(batch: int, side: int, grid: tuple[int, int], *, pixels: bool) -> Sight:
    """Ellipses that cover a quarter of the image on average, from .1 to .4; or the patches that are half inside."""
    generator = torch.Generator().manual_seed(0)
    area = VISIBLE + 0.15 * (2 * torch.rand(batch, 1, 1, generator=generator) - 1) * (batch > 1)
    stretch = 0.7 + 0.6 * torch.rand(batch, 1, 1, generator=generator)
    radius = (area / torch.pi).sqrt()
    y, x = torch.meshgrid(*(torch.linspace(-0.5, 0.5, side) for _ in range(2)), indexing="ij")
    inside = (y / stretch).square() + (x * stretch).square() < radius.square()
    keep = cell_share(inside, grid) >= (0.1 if pixels else 0.5)
    return Sight(keep=keep, keep_pixels=inside if pixels else None)


Kind = TypeVar("Kind", bound=IFam)


def assemble(kind: type[Kind], backbone: str, side: int, options: dict[str, Any], device: str) -> Kind:
    """Both stages on this architecture, for images of this side."""
    vit, options = random_vit(backbone, 0), dict(options)
    expects = replace(vit.config.input, size=(side, side))
    if "scale" in options:
        options["selector_size"] = options.pop("scale") * side
    if options.get("selector_depth") == -1:
        options["selector_depth"] = vit.config.depth
    config = Ifam(Path("none"), **options)
    stage1 = make_selector(vit, config, CLASSES, selector_size(config, vit, expects), selector_depth(config, vit))
    stage2 = make_predictor(vit, config, CLASSES)
    return kind(stage1, stage2, PartSettings.of(config), pixel_settings(config)).to(device)


def build(backbone: str, side: int, batch: int, options: dict[str, Any], device: str) -> GivenSight:
    model = assemble(GivenSight, backbone, side, options, device)
    grid = (side // model.what.vit.config.patch,) * 2
    model.given = given_sight(batch, side, grid, pixels=model.pixels is not None).to(device)
    return model


@lru_cache(maxsize=8)
def random_vit(backbone: str, classes: int) -> ViT:
    return load_backbone(f"random:{backbone}", classes=classes)


def classifier(backbone: str) -> Classifier:
    return Classifier(copy.deepcopy(random_vit(backbone, CLASSES)))


def initialise_quickly() -> None:
    """Weights are random; how exactly makes no difference to time, and a large model takes seconds otherwise."""
    nn.Linear.reset_parameters = nn.Conv2d.reset_parameters = lambda _: None
    nn.init.trunc_normal_ = lambda tensor, std=1.0, generator=None: nn.init.normal_(tensor, 0, std, generator)


def precision_of(settings: argparse.Namespace) -> torch.autocast:
    return torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16")


@contextmanager
def padded() -> Generator[None]:
    """The reference: shorter sequences are padded, and the padding is masked."""
    before = vit_model.can_pack
    vit_model.can_pack = lambda *_: False
    try:
        yield
    finally:
        vit_model.can_pack = before


def in_padded_form(run: Callable[[], object]) -> Callable[[], object]:
    def padded_run() -> object:
        with padded():
            return run()

    return padded_run


class Stepping:
    """Training steps on a resident batch: forward, backward, clipping, AdamW and the moving average of the weights."""

    def __init__(self, model: Trainable, images: Tensor, ema: float | None):
        device = images.device
        self.model, self.images, self.steps = model.to(device).train(), images, 0
        groups = [{"params": group.parameters} for group in model.parameter_groups(1.0) if group.parameters]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=images.is_cuda)
        self.trained = [p for group in groups for p in group["params"]]
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False) if ema else None
        self.decay = ema or 0.0
        positions = torch.arange(len(images))
        info = StepInfo(seed=0, epoch=0, step=0, epochs=1, steps=1, positions=positions)
        labels = positions.to(device) % CLASSES
        self.batch = TrainBatch(images, labels, None, None, positions.to(device), info)

    def __call__(self) -> None:
        self.model(self.batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 2.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.ema is not None:
            update_ema(self.ema, self.model, self.decay, self.steps)


def masked(model: GivenSight, images: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    keep = model.given.keep
    assert keep is not None
    seen = model.what.masked_input(images, keep, model.given.keep_pixels)
    return seen.images, seen.keep, seen.keep_pixels
