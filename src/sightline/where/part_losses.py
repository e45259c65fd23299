"""Losses that shape the parts: those of PDiscoFormer (Aniraj et al., 2024, sec. 3), which stage 1 of iFAM keeps.

Part maps A (`maps`) are [B, K+1, H, W] with the background last, and sum to 1 over parts.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import Shaping
from ..training.distributed import process_count
from .parts import Parts, in_full_precision

ABSENT_BACKGROUND_LOSS = 100.0  # the background loss of a map without background, where -log is infinite; as published


def shaping_losses(parts: Parts, embeddings: Tensor, unwarped: Tensor | None, weights: Shaping) -> dict[str, Tensor]:
    """The losses with a non-zero weight, by name, each times its weight.

    `embeddings` are the modulated part embeddings [B, D, K+1]; `unwarped` are the part maps of transformed images,
    transformed back, which only the equivariance loss needs.
    """
    assert unwarped is not None or not weights.equivariance, "the equivariance loss needs the transformed images' maps"
    maps = parts.probabilities
    vectors = embeddings.mT if weights.orthogonality_over == "channels" else embeddings
    at = weights.total_variation_grid
    losses = {
        "total_variation": lambda: total_variation(maps) * (math.sqrt(maps[0, 0].numel()) / at if at else 1.0),
        "entropy": lambda: entropy(maps),
        "equivariance": lambda: equivariance(maps, cast(Tensor, unwarped)),
        "orthogonality": lambda: orthogonality(vectors),
        "presence": lambda: presence(maps),
        "background": lambda: background(maps),
        "concentration": lambda: concentration(maps),
    }
    return {name: getattr(weights, name) * loss() for name, loss in losses.items() if getattr(weights, name)}


@in_full_precision
def total_variation(maps: Tensor) -> Tensor:
    """PDiscoFormer's total variation: Σ |differences of neighbours| / (B·H·W), over all K+1 maps."""
    B, _, H, W = maps.shape
    return (maps.diff(dim=2).abs().sum() + maps.diff(dim=3).abs().sum()) / (B * H * W)


@in_full_precision
def entropy(maps: Tensor) -> Tensor:
    """PDiscoFormer's entropy loss: the mean over patches of -Σ_k A log A."""
    logs = maps.clamp_min(torch.finfo(maps.dtype).tiny).log()  # finite, with a finite gradient
    return -(maps * logs).sum(dim=1).mean()


@in_full_precision
def equivariance(maps: Tensor, unwarped: Tensor) -> Tensor:
    """PDiscoFormer's equivariance loss: 1 - mean cosine of a part's map and that of the transformed image."""
    here, there = maps[:, :-1].flatten(2), unwarped[:, :-1].flatten(2)
    return 1 - F.cosine_similarity(here, there, dim=2).mean()


@in_full_precision
def orthogonality(vectors: Tensor) -> Tensor:
    """PDiscoFormer's orthogonality loss: the mean of (V̂ᵀV̂ - 1)², V̂ the unit columns of [B, D, n], background too."""
    units = F.normalize(vectors, dim=1)
    return (units.mT @ units - torch.eye(units.shape[2], device=units.device)).square().mean()


@in_full_precision
def presence(maps: Tensor) -> Tensor:
    """PDiscoFormer's presence loss: 1 - mean_k max A_k, the maximum over 3×3 means in the batch of all processes."""
    return 1 - _over_processes(_smooth(maps[:, :-1]).amax(dim=(0, 2, 3))).mean()


@in_full_precision
def background(maps: Tensor) -> Tensor:
    """PDiscoFormer's background loss: the mean of -log max M·A_bg (3×3 means); M is 0 in the centre, 1 in corners."""
    smooth = _smooth(maps[:, -1])
    v, u = (torch.linspace(-1, 1, side, device=smooth.device, dtype=smooth.dtype) for side in smooth.shape[1:])
    outward = v[:, None].square() + u.square()
    strongest = (outward / outward.max() * smooth).amax(dim=(1, 2))
    tiny = torch.finfo(strongest.dtype).tiny
    return torch.where(strongest > tiny, -strongest.clamp_min(tiny).log(), ABSENT_BACKGROUND_LOSS).mean()


@in_full_precision
def concentration(maps: Tensor, unit: tuple[int, int] | None = None) -> Tensor:
    """PDiscoNet's concentration loss: the mean of A_k × squared offset from the part's centre.

    Offsets are in units of H and W (`unit`; the published code swaps them). An absent part contributes nothing.
    """
    foreground = maps[:, :-1]
    mass = foreground.sum(dim=(2, 3), keepdim=True).clamp_min(1e-8)
    offsets = torch.zeros_like(foreground)
    for axis, side in zip((2, 3), unit or foreground.shape[2:], strict=True):
        place = torch.arange(foreground.shape[axis], device=maps.device, dtype=maps.dtype)
        place = place[:, None] if axis == 2 else place
        centre = ((foreground * place).sum(dim=(2, 3), keepdim=True) / mass).detach()  # its gradient vanishes
        offsets = offsets + ((centre - place) / side).square()
    return (foreground * offsets).mean()


def _smooth(maps: Tensor) -> Tensor:
    return F.avg_pool2d(maps, 3, stride=1)


def _over_processes(highest: Tensor) -> Tensor:
    """The maximum over all processes; only those that hold it receive a gradient.

    The gradient is scaled by the number of processes, because these average their gradients afterwards.
    """
    if process_count() == 1:
        return highest
    mine = highest.detach()
    overall = mine.clone()
    dist.all_reduce(overall, dist.ReduceOp.MAX)
    holds = (mine == overall).to(mine.dtype)
    holders = holds.clone()
    dist.all_reduce(holders)
    return overall + (highest - mine) * holds * dist.get_world_size() / holders
