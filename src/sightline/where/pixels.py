"""From patches to pixels: the boundary of a part, refined to the pixel.

    probability = pixel_foreground_probability(patch_probability, images, PixelSettings())   # [B, h, w] in [0, 1]

A patch of 16 pixels on the object's boundary shows background too. The patches' foreground probabilities are upsampled
to the pixels and aligned with the edges of the image by a guided filter; gradients pass through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import in_full_precision


@dataclass(frozen=True)
class PixelSettings:
    """How iFAM masks pixels, which is finer than the patch masks of the paper."""

    pixel_threshold: float = 0.5  # foreground-probability threshold of the pixel mask
    patch_threshold: float = 0.1  # a patch is kept if at least this fraction of its pixels is
    guide_radius: int | None = None  # of the guided filter, in pixels; None: 1/14 of the side; 0: bilinear upsampling
    edge_variance: float = 1e-4  # regularisation of the guided filter: variance of colours (in [0, 1]) that is no edge
    refine: bool = False  # stage 1 sees the window around its first mask a second time, enlarged
    hide: bool = True  # background pixels inside kept patches, too; False: only whole patches


@in_full_precision
def pixel_foreground_probability(patches: Tensor, images: Tensor, settings: PixelSettings) -> Tensor:
    """[B, h, w]: the foreground probabilities of patches [B, H, W], at the pixels of images [B, 3, h, w]."""
    radius = settings.guide_radius if settings.guide_radius is not None else max(1, round(min(images.shape[2:]) / 14))
    if radius:
        return guided_filter(patches, images, radius, settings.edge_variance).clamp(0, 1)
    return F.interpolate(patches[:, None], images.shape[2:], mode="bilinear")[:, 0]


@in_full_precision
def guided_filter(probabilities: Tensor, images: Tensor, radius: int, smooth: float) -> Tensor:
    """[B, h, w]: the fast guided filter (He and Sun, 2015), guided by a colour image.

    In every window a ridge regression predicts the probabilities from the colours; it is solved at a quarter of the
    resolution and applied at the full one. Written here to avoid a dependency for one formula.
    """
    step = 4 if min(images.shape[2:]) >= 64 else 2
    small = F.adaptive_avg_pool2d(images, (images.shape[2] // step, images.shape[3] // step))
    coarse = F.interpolate(probabilities[:, None], small.shape[2:], mode="bilinear")
    window = 2 * max(1, round(radius / step)) + 1

    def mean(x: Tensor) -> Tensor:
        for size in ((window, 1), (1, window)):  # the mean of a square is the mean of its row means
            x = F.avg_pool2d(x, size, 1, (size[0] // 2, size[1] // 2), count_include_pad=False)
        return x

    products = torch.einsum("bchw,bdhw->bcdhw", small, small).flatten(1, 2)
    means = mean(torch.cat([small, coarse, small * coarse, products], dim=1))
    colour, mean_p, colour_p, products = means.split([3, 1, 3, 9], dim=1)
    variance = products.unflatten(1, (3, 3)) - torch.einsum("bchw,bdhw->bcdhw", colour, colour)
    ridge = smooth * torch.eye(3, device=images.device, dtype=images.dtype)
    slope = solve_3x3(variance.permute(0, 3, 4, 1, 2) + ridge, (colour_p - colour * mean_p).permute(0, 2, 3, 1))
    slope = slope.permute(0, 3, 1, 2)
    offset = mean_p - (slope * colour).sum(dim=1, keepdim=True)
    line = F.interpolate(mean(torch.cat([slope, offset], dim=1)), images.shape[2:], mode="bilinear")
    return (line[:, :3] * images).sum(dim=1) + line[:, 3]


def solve_3x3(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Solve symmetric positive-definite systems [..., 3, 3] x = [..., 3] by LDLᵀ, written out: faster than a general
    solver for a million small systems and, unlike Cramer's rule, exact where all colours are grey."""
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
