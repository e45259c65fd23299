"""What shapes the parts: the losses of PDiscoFormer (Aniraj et al., 2024, sec. 3), which iFAM's first stage keeps.

Shares are [B, K+1, H, W] with the background last, and sum to 1 over the parts.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import Shaping
from ..training.distributed import processes
from .parts import Parts, in_full_precision

ABSENT = 100.0  # what a background that is nowhere costs, as in published code: there -log is infinite


def shaping_losses(parts: Parts, embeddings: Tensor, unwarped: Tensor | None, weights: Shaping) -> dict[str, Tensor]:
    """Those asked for, by name, each times its weight: their sum is what to minimise.

    `embeddings` are modulated [B, D, K+1]; `unwarped` are the shares of moved images, put back in place, which only
    equivariance needs.
    """
    assert unwarped is not None or not weights.equivariance, "equivariance compares with a moved image"
    shares = parts.shares
    vectors = embeddings.mT if weights.orthogonal == "channels" else embeddings
    at = weights.total_variation_at
    losses = {
        "total_variation": lambda: total_variation(shares) * (math.sqrt(shares[0, 0].numel()) / at if at else 1.0),
        "entropy": lambda: entropy(shares),
        "equivariance": lambda: equivariance(shares, cast(Tensor, unwarped)),
        "orthogonality": lambda: orthogonality(vectors),
        "presence": lambda: presence(shares),
        "background": lambda: background(shares),
        "concentration": lambda: concentration(shares),
    }
    return {name: getattr(weights, name) * loss() for name, loss in losses.items() if getattr(weights, name)}


@in_full_precision
def total_variation(shares: Tensor) -> Tensor:
    """PDiscoFormer's total variation: Σ |differences of neighbours| / (B·H·W), over all K+1 maps."""
    B, _, H, W = shares.shape
    return (shares.diff(dim=2).abs().sum() + shares.diff(dim=3).abs().sum()) / (B * H * W)


@in_full_precision
def entropy(shares: Tensor) -> Tensor:
    """PDiscoFormer's entropy loss: the mean over patches of -Σ_k A log A."""
    logs = shares.clamp_min(torch.finfo(shares.dtype).tiny).log()  # finite, and so is its gradient
    return -(shares * logs).sum(dim=1).mean()


@in_full_precision
def equivariance(shares: Tensor, unwarped: Tensor) -> Tensor:
    """PDiscoFormer's equivariance loss: 1 - the mean cosine of a part's map and that of the moved image, put back."""
    here, there = shares[:, :-1].flatten(2), unwarped[:, :-1].flatten(2)
    return 1 - F.cosine_similarity(here, there, dim=2).mean()


@in_full_precision
def orthogonality(vectors: Tensor) -> Tensor:
    """PDiscoFormer's orthogonality loss: the mean of (V̂ᵀV̂ - 1)², V̂ the unit columns of [B, D, n], background too."""
    units = F.normalize(vectors, dim=1)
    return (units.mT @ units - torch.eye(units.shape[2], device=units.device)).square().mean()


@in_full_precision
def presence(shares: Tensor) -> Tensor:
    """PDiscoFormer's presence loss: 1 - mean_k max A_k, over 3×3 means in the batch (that of all processes)."""
    return 1 - _over_processes(_smooth(shares[:, :-1]).amax(dim=(0, 2, 3))).mean()


@in_full_precision
def background(shares: Tensor) -> Tensor:
    """PDiscoFormer's background loss: the mean of -log max M·A_bg (3×3 means); M is 0 in the centre, 1 in corners."""
    smooth = _smooth(shares[:, -1])
    v, u = (torch.linspace(-1, 1, side, device=smooth.device, dtype=smooth.dtype) for side in smooth.shape[1:])
    outward = v[:, None].square() + u.square()
    strongest = (outward / outward.max() * smooth).amax(dim=(1, 2))
    tiny = torch.finfo(strongest.dtype).tiny
    return torch.where(strongest > tiny, -strongest.clamp_min(tiny).log(), ABSENT).mean()


@in_full_precision
def concentration(shares: Tensor, unit: tuple[int, int] | None = None) -> Tensor:
    """PDiscoNet's concentration loss: the mean of A_k × squared offset from the part's centre.

    Offsets are in units of H and W (`unit`; published code has them the wrong way round). A part that is nowhere adds
    nothing.
    """
    foreground = shares[:, :-1]
    mass = foreground.sum(dim=(2, 3), keepdim=True).clamp_min(1e-8)
    offsets = torch.zeros_like(foreground)
    for axis, side in zip((2, 3), unit or foreground.shape[2:], strict=True):
        place = torch.arange(foreground.shape[axis], device=shares.device, dtype=shares.dtype)
        place = place[:, None] if axis == 2 else place
        centre = ((foreground * place).sum(dim=(2, 3), keepdim=True) / mass).detach()  # where its gradient vanishes
        offsets = offsets + ((centre - place) / side).square()
    return (foreground * offsets).mean()


def _smooth(shares: Tensor) -> Tensor:
    return F.avg_pool2d(shares, 3, stride=1)


def _over_processes(highest: Tensor) -> Tensor:
    """The maximum over all processes. Only those that hold it get its gradient.

    It is scaled up by the number of processes: once they average their gradients, it is as if there were only one.
    """
    if processes() == 1:
        return highest
    mine = highest.detach()
    overall = mine.clone()
    dist.all_reduce(overall, dist.ReduceOp.MAX)
    holds = (mine == overall).to(mine.dtype)
    holders = holds.clone()
    dist.all_reduce(holders)
    return overall + (highest - mine) * holds * dist.get_world_size() / holders
