"""Crops at true masks that are shifted step by step: what localisation is worth, all else being equal."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import write_columns
from rows import Row
from sightline.data.rows import read_rows
from sightline.sight import Method, Prediction, Sight
from study import Context, command_of


class ShiftedMasks(Method):
    """One crop where the true mask is, shifted so far that only `mass` of it still lies on the object."""

    blind = needs_masks = accepts_masks = True

    def __init__(self, side: float, mass: float, what: nn.Module | None = None):
        super().__init__()
        self.side, self.mass, self.what = side, mass, what

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:
        from sightline.where.crops import greedy_crops, side_in_pixels

        side = side_in_pixels(self.side, images.shape[-2:])
        shifted, width = shifted_masks(masks, self.mass).float(), side // 2 * 2 + 1
        dense = F.avg_pool2d(shifted[:, None], width, 1, width // 2)[:, 0]  # the densest region, not any point inside
        return Sight(boxes=greedy_crops(dense, [side]))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return cast(Any, self.what).judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (only the crops could be drawn)
        return {}


def shifted_masks(masks: Tensor, mass: float) -> Tensor:
    """bool [B, h, w]: each shifted towards the wider side of its image, in a direction of its own, until at most `mass`
    of it overlaps the original."""
    h, w = masks.shape[1:]
    y, x = torch.arange(h, device=masks.device), torch.arange(w, device=masks.device)
    area = masks.sum(dim=(1, 2)).clamp(min=1)
    centre_y, centre_x = (masks.sum(dim=2) * y).sum(1) / area, (masks.sum(dim=1) * x).sum(1) / area
    angle = (area * 0.6180339887).frac() * (math.pi / 2)  # as good as random, and reproducible
    down, right = torch.where(centre_y * 2 > h, -1, 1) * angle.sin(), torch.where(centre_x * 2 > w, -1, 1) * angle.cos()
    best, waiting = masks.clone(), torch.ones(len(masks), dtype=torch.bool, device=masks.device)
    for distance in range(0, max(h, w), max(1, max(h, w) // 112)):
        shifted = shifted_by(masks, (distance * down).round().long(), (distance * right).round().long())
        there = (shifted & masks).sum(dim=(1, 2)) / shifted.sum(dim=(1, 2)).clamp(min=1)
        best = torch.where(waiting[:, None, None] & shifted.any(dim=2).any(dim=1)[:, None, None], shifted, best)
        waiting = waiting & (there > mass)
        if not waiting.any():
            break
    return best


def shifted_by(masks: Tensor, down: Tensor, right: Tensor) -> Tensor:
    h, w = masks.shape[1:]
    y = torch.arange(h, device=masks.device) - down[:, None]
    x = torch.arange(w, device=masks.device) - right[:, None]
    inside = ((y >= 0) & (y < h))[:, :, None] & ((x >= 0) & (x < w))[:, None]
    image = torch.arange(len(masks), device=masks.device)[:, None, None]
    return masks[image, y.clamp(0, h - 1)[:, :, None], x.clamp(0, w - 1)[:, None]] & inside


def oracle(context: Context, row: Row) -> None:
    """A² with shifted true masks in place of attention: the effect of localisation alone."""
    from sightline.methods.base import open_backbone, record_backbone
    from sightline.methods.probe import fit_probe, save_fitted, set_head
    from sightline.metrics.inference import inference_batches, map_batches
    from sightline.train import begin_together, final_evaluation
    from sightline.training.distributed import make_accelerator
    from sightline.training.trainable import TrainContext
    from sightline.what.probe import BoxProbe
    from sightline.where.crops import vit_input_size

    words = shlex.split(row.line)
    mass, crop = (words[words.index(flag) + 1] for flag in ("--mass", "--crop-size"))
    config = command_of(context, Row(row.set, row.name, f"probe {' '.join(words[words.index('--backbone') :])}"))
    rows, accelerator = read_rows(config.data), make_accelerator(config.device, config.precision)
    run = begin_together(config, rows, accelerator)
    vit, expects = open_backbone(config, 0)
    where = ShiftedMasks(float(Fraction(crop)), float(mass))
    what = BoxProbe(vit, vit_input_size(vit, expects.size), 1, len(rows.classes)).to(accelerator.device).eval()

    def over(split: str, function: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        batches = inference_batches(
            rows, rows.split_indices(split), expects, accelerator, batch=config.batch, workers=config.workers,
            cache=config.cache, masks=True,
        )  # fmt: skip
        with contextlib.closing(batches):
            return map_batches(cast(Any, function), batches, accelerator)

    embed = lambda images, masks: what.embed(images, where.look_at(images, masks))  # noqa: E731
    fitted = fit_probe(config, rows, {split: over(split, embed) for split in ("train", "val")})
    set_head(cast(nn.Linear, what.head), fitted.linear)
    record_backbone(run, vit, expects, config)
    save_fitted(run, what, fitted, config, {"mass": float(mass), "crop": crop})
    final_evaluation(ShiftedMasks(where.side, where.mass, what), TrainContext(rows, run, accelerator, expects), config)
    found = over("test", lambda images, masks: on_object(where, images, masks))
    names = [rows.images[i] for i in rows.split_indices("test")]
    write_columns(run.folder, names, {"mass": found[:, 0], "crop": found[:, 1]})


def on_object(where: ShiftedMasks, images: Tensor, masks: Tensor) -> Tensor:
    """[B, 2]: the share of the shifted mask, and of the crop, that is on the object."""
    shifted, inside = shifted_masks(masks, where.mass), where.look_at(images, masks).visible(tuple(images.shape[-2:]))
    return torch.stack(
        [(some & masks).sum((1, 2)) / some.sum((1, 2)).clamp(min=1) for some in (shifted, inside)], dim=1
    )
