"""From patches to pixels: where exactly a part ends.

    share = fine_share(shares, images, Fine())      # [B, h, w] in [0, 1], with a gradient

A patch of 16 pixels holds the border of a thing and what lies behind it. Shares of the foreground are spread over the
pixels, and then follow the edges of the picture itself (guided filter).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import in_full_precision


@dataclass(frozen=True)
class Fine:
    """How pixels are chosen."""

    sure: float = 0.5  # a pixel is kept when its share of the foreground is at least that
    at_least: float = 0.1  # a patch is kept when so much of it is
    guide: int = 16  # how far the picture's edges pull, in pixels; 0: not at all
    smooth: float = 1e-4  # variance of colours (in [0, 1]) that is no edge


@in_full_precision
def fine_share(shares: Tensor, images: Tensor, how: Fine) -> Tensor:
    """[B, h, w]: shares [B, H, W] of the foreground, spread over the pixels of images [B, 3, h, w]."""
    if how.guide:
        return guided(shares, images, how.guide, how.smooth).clamp(0, 1)
    return F.interpolate(shares[:, None], images.shape[2:], mode="bilinear")[:, 0]


@in_full_precision
def guided(shares: Tensor, images: Tensor, radius: int, smooth: float) -> Tensor:
    """[B, h, w]: the fast guided filter (He and Sun, 2015), with a picture in colour as the guide.

    In every window the shares are told from the colours by ridge regression, solved at a quarter of the resolution and
    applied at the full one. Written here because it is one formula; the libraries that have it bring much else along.
    """
    step = 4 if min(images.shape[2:]) >= 64 else 2
    small = F.adaptive_avg_pool2d(images, (images.shape[2] // step, images.shape[3] // step))
    coarse = F.interpolate(shares[:, None], small.shape[2:], mode="bilinear")
    window = 2 * max(1, round(radius / step)) + 1

    def mean(x: Tensor) -> Tensor:
        for size in ((window, 1), (1, window)):  # a square's mean is the mean of its rows' means
            x = F.avg_pool2d(x, size, 1, (size[0] // 2, size[1] // 2), count_include_pad=False)
        return x

    products = torch.einsum("bchw,bdhw->bcdhw", small, small).flatten(1, 2)
    means = mean(torch.cat([small, coarse, small * coarse, products], dim=1))
    colour, share, both, products = means.split([3, 1, 3, 9], dim=1)
    variance = products.unflatten(1, (3, 3)) - torch.einsum("bchw,bdhw->bcdhw", colour, colour)
    ridge = smooth * torch.eye(3, device=images.device, dtype=images.dtype)
    slope = solve3(variance.permute(0, 3, 4, 1, 2) + ridge, (both - colour * share).permute(0, 2, 3, 1))
    slope = slope.permute(0, 3, 1, 2)
    offset = share - (slope * colour).sum(dim=1, keepdim=True)
    line = F.interpolate(mean(torch.cat([slope, offset], dim=1)), images.shape[2:], mode="bilinear")
    return (line[:, :3] * images).sum(dim=1) + line[:, 3]


def solve3(matrices: Tensor, vectors: Tensor) -> Tensor:
    """[..., 3, 3], symmetric and positive, and [..., 3] -> [..., 3]: by LDLᵀ, written out, which is quicker for a
    million small systems than a solver, and exact where colours are all grey, unlike Cramer's rule."""
    (a, b, c), (_, d, e), (_, _, f) = (row.unbind(dim=-1) for row in matrices.unbind(dim=-2))
    x, y, z = vectors.unbind(dim=-1)
    ba, ca = b / a, c / a
    d, e = d - b * ba, e - b * ca
    ed = e / d
    f = f - c * ca - e * ed
    y = y - ba * x
    z = (z - ca * x - ed * y) / f
    y = y / d - ed * z
    return torch.stack([x / a - ba * y - ca * z, y, z], dim=-1)
