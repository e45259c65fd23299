"""Attention mass and hit rate (A², sec. 4): the one definition, used by `localize`, `stress` and pretraining.

They are measured at the pixels, as in A²: a map is upsampled to the size of the truth. Given a truth on the map's own
grid, the fraction of each patch that is true, the same formulas give the patch-level variants.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_columns(maps: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """Mass, hit and normalised entropy of maps [B, H, W], each [B, 2]: the value, and whether the image counts.

    `inside` is the truth [B, h, w]: bool, or the true fraction of each cell. Mass is the fraction of the map inside; a
    hit is a maximum inside (in a cell that is at least half inside); images where nothing is true count for neither.
    """
    shares, true = map_shares(maps, inside), inside.flatten(1).float()
    counts = true.any(dim=1)
    return {
        "mass": value_and_count((shares * true).sum(dim=1), counts),
        "hit": value_and_count(true.gather(1, shares.argmax(dim=1, keepdim=True))[:, 0] >= 0.5, counts),
        "entropy": value_and_count(torch.special.entr(shares).sum(dim=1) / math.log(max(2, shares.shape[1]))),
    }


def concentration_columns(maps: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """The mass of the highest 10 % and 25 % of the values (A², App., tables 19 to 23), as `attention_columns`."""
    shares = map_shares(maps, inside)
    cells = shares.shape[1]
    top = shares.topk(max(1, round(0.25 * cells)), dim=1).values.cumsum(dim=1)
    return {
        "top10": value_and_count(top[:, max(1, round(0.1 * cells)) - 1]),
        "top25": value_and_count(top[:, -1]),
    }


def mass_and_hit(maps: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention mass and hit, each [B, k], of k maps per image [B, k, H, W] and masks [B, h, w]."""
    columns = [attention_columns(one, masks) for one in maps.unbind(1)]
    mass, hit = (torch.stack([column[name][:, 0] for column in columns], dim=1) for name in ("mass", "hit"))
    return mass, hit


def map_shares(maps: Tensor, inside: Tensor) -> Tensor:
    """[B, h·w]: maps [B, H, W], upsampled (bilinear) to the size of `inside`, clamped at 0 and summing to 1."""
    size = (inside.shape[1], inside.shape[2])
    values = F.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0].clamp(min=0).flatten(1)
    return values / values.sum(dim=1, keepdim=True).clamp(min=1e-12)


def value_and_count(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """[B, 2]: values, 0 where they do not count, and whether they count, to be summed over images and divided."""
    counts = torch.ones_like(values, dtype=torch.float) if counts is None else counts.float()
    return torch.stack([values.float() * counts, counts], dim=1)
