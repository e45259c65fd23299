"""Position embeddings: learned ones, resized as in each family's own code, and rotary ones (RoPE)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Positions = Literal["bicubic", "bicubic_antialias", "bicubic_offset", "rotary"]
Rotary = tuple[Tensor, Tensor]  # cosines and sines of the angles, [1 or B, tokens, D/heads]


def resize_position_embeddings(
    positions: Tensor, stored: tuple[int, int], grid: tuple[int, int], mode: Positions
) -> Tensor:
    """Learned position embeddings [1, N, D] for another grid.

    `bicubic_offset` is DINO's, iBOT's and DINOv2's: the scale factor of a grid 0.1 larger, which shifts the samples
    slightly. `bicubic_antialias` is that of DINOv2 with registers, timm and OpenCLIP; `bicubic` that of transformers.
    """
    if grid == stored:
        return positions
    rows, columns = (
        resize_matrix(*sides, mode).to(positions.device, non_blocking=True) for sides in zip(stored, grid, strict=True)
    )
    with torch.autocast(positions.device.type, enabled=False):
        resized = torch.einsum("hH,wW,bHWd->bhwd", rows, columns, positions.float().unflatten(1, stored))
    return resized.flatten(1, 2).to(positions.dtype)


@lru_cache(maxsize=64)
def resize_matrix(old: int, new: int, mode: Positions) -> Tensor:
    """[new, old]: the weights of each new position over the old ones, along one axis.

    As a matrix, because torch's own bicubic interpolation has no deterministic gradient on a GPU.
    """
    eye = torch.eye(old)[None, None]
    if mode == "bicubic_offset":
        return F.interpolate(eye, scale_factor=((new + 0.1) / old, 1.0), mode="bicubic")[0, 0]
    return F.interpolate(eye, size=(new, old), mode="bicubic", antialias=mode == "bicubic_antialias")[0, 0]


def rotary_table(grid: tuple[int, int], width: int, base: float, device: torch.device) -> Rotary:
    """DINOv3's rotary angles [1, N, width]: patch centres in [-1, 1] on both axes, width/4 frequencies each."""
    axes = [(torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n * 2 - 1 for n in grid]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    frequencies = base ** -torch.arange(0, 1, 4 / width, device=device, dtype=torch.float32)
    angles = (2 * math.pi * centres[:, :, None] * frequencies).flatten(1).tile(2)
    return angles.cos()[None], angles.sin()[None]


def with_unrotated_prefix(rotary: Rotary, prefix: int) -> Rotary:
    """CLS and registers have no position in the image: an angle of zero."""
    cos, sin = rotary
    return F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0), value=0.0)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate queries or keys [B, heads, tokens, D/heads]; the first half of the channels pairs with the second."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
