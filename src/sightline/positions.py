"""Where a patch is: learned positions, resized as each family's authors do it, and rotary ones."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Positions = Literal["bicubic", "bicubic_antialias", "bicubic_offset", "rotary"]
Rotary = tuple[Tensor, Tensor]  # cosines and sines of the angles, [1 or B, tokens, D/heads]


def resize_learned(positions: Tensor, stored: tuple[int, int], grid: tuple[int, int], how: Positions) -> Tensor:
    """Learned positions [1, N, D] for another grid.

    `bicubic_offset` is DINO's, iBOT's and DINOv2's: the scale factor of a grid 0.1 larger, which shifts the samples
    slightly. `bicubic_antialias` is that of DINOv2 with registers, timm and OpenCLIP; `bicubic` that of transformers.
    """
    if grid == stored:
        return positions
    image = positions.float().unflatten(1, stored).permute(0, 3, 1, 2)
    if how == "bicubic_offset":
        scale = [(new + 0.1) / old for new, old in zip(grid, stored, strict=True)]
        image = F.interpolate(image, scale_factor=scale, mode="bicubic")
    else:
        image = F.interpolate(image, size=grid, mode="bicubic", antialias=how == "bicubic_antialias")
    return image.flatten(2).transpose(1, 2).to(positions.dtype)


def rotary_table(grid: tuple[int, int], width: int, base: float, device: torch.device) -> Rotary:
    """DINOv3's rotary angles [1, N, width]: patch centres in [-1, 1] on both axes, width/4 frequencies each."""
    axes = [(torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n * 2 - 1 for n in grid]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    frequencies = base ** -torch.arange(0, 1, 4 / width, device=device, dtype=torch.float32)
    angles = (2 * math.pi * centres[:, :, None] * frequencies).flatten(1).tile(2)
    return angles.cos()[None], angles.sin()[None]


def with_unrotated_prefix(rotary: Rotary, prefix: int) -> Rotary:
    """CLS and registers have no place in the image: an angle of zero."""
    cos, sin = rotary
    return F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0), value=0.0)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn queries or keys [B, heads, tokens, D/heads]; the first half of the channels pairs with the second."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
