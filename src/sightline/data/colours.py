"""Colour augmentation for `augment.py`: colour jitter, Planckian jitter and RandAugment's colour operations."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .augment import Augment

MAX_CHANGE = 0.9  # of brightness, contrast, saturation or sharpness in RandAugment, at magnitude 10
LUMA = (0.299, 0.587, 0.114)
YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
Round = tuple[Tensor, Tensor]  # one operation of RandAugment per image: its index (-1: none) and strength (-1 to 1)


def adjust_colours(images: Tensor, config: Augment, draws: dict[str, Tensor], rounds: list[Round]) -> Tensor:
    """Brightness, contrast, saturation, hue and illuminant as one matrix and one offset per image, clipped once."""
    if not (config.brightness or config.contrast or config.saturation or config.hue or config.planckian or rounds):
        return images
    factors = {name: (1 + getattr(config, name) * (2 * draws[name] - 1)).clamp(min=0) for name in LINEAR}
    for operation, amount in rounds:
        for name in LINEAR:
            factors[name] = factors[name] * (1 + MAX_CHANGE * amount * (operation == OPERATIONS.index(name)))
    brightness, contrast, saturation = (factor[:, None, None] for factor in factors.values())
    yiq, identity = torch.tensor(YIQ, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    grey = yiq[:1].expand(3, 3)
    rotated = _hue_rotations(2 * math.pi * config.hue * (2 * draws["hue"] - 1))
    lights = illuminants()[(draws["illuminant"] * len(illuminants())).long()]
    light = torch.where((draws["planckian"] < config.planckian)[:, None], lights, 1.0)[:, :, None]
    matrix = light * brightness * contrast * (yiq.inverse() @ rotated @ yiq @ (grey + saturation * (identity - grey)))
    changed = _mix_channels(images, matrix, mixes=bool(config.saturation or config.hue or rounds))
    if config.contrast or rounds:  # contrast is about the mean grey, which saturation and hue do not change
        luma = torch.tensor(LUMA, dtype=images.dtype).to(images.device, non_blocking=True)
        means = (images.mean((2, 3)) * luma).sum(1)
        offset = (light * brightness * (1 - contrast)).to(images.dtype).to(images.device, non_blocking=True)
        changed.add_(offset[..., None] * means[:, None, None, None])
    return changed.clamp_(0, 1)


def _hue_rotations(angles: Tensor) -> Tensor:
    """[B, 3, 3]: luma is unchanged, I and Q are rotated."""
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    rows = (zero + 1, zero, zero, zero, cos, -sin, zero, sin, cos)
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def _mix_channels(images: Tensor, matrix: Tensor, *, mixes: bool) -> Tensor:
    factors = matrix.to(images.dtype).to(images.device, non_blocking=True)[..., None, None]
    if not mixes:
        return images * factors.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    mixed = images[:, :1] * factors[:, :, 0]
    return mixed.addcmul_(images[:, 1:2], factors[:, :, 1]).addcmul_(images[:, 2:], factors[:, :, 2])


@cache
def illuminants() -> Tensor:
    """[25, 3]: red and blue of black bodies from 3,000 to 15,000 K in linear sRGB, relative to their green.

    Planck's law under the CIE 1931 colour matching functions, in the Gaussian approximation of Wyman, Sloan and
    Shirley (2013). The gains are applied to gamma-encoded values, as in the published jitter (Zini et al., 2023),
    whose own table differs by up to a quarter, and has almost no blue at 3,000 K.
    """
    kelvin = torch.arange(3000, 15001, 500, dtype=torch.float64)[:, None]
    nm = torch.arange(380, 781, 5, dtype=torch.float64)

    def lobe(height: float, peak: float, below: float, above: float) -> Tensor:
        return height * torch.exp(-0.5 * ((nm - peak) / torch.where(nm < peak, below, above)) ** 2)

    x = lobe(1.056, 599.8, 37.9, 31.0) + lobe(0.362, 442.0, 16.0, 26.7) + lobe(-0.065, 501.1, 20.4, 26.2)
    y = lobe(0.821, 568.8, 46.9, 40.5) + lobe(0.286, 530.9, 16.3, 31.1)
    z = lobe(1.217, 437.0, 11.8, 36.0) + lobe(0.681, 459.0, 26.0, 13.8)
    xyz = (nm**-5 / torch.expm1(1.438777e7 / (nm * kelvin))) @ torch.stack([x, y, z], 1)
    to_rgb = xyz.new_tensor([[3.2406, -1.5372, -0.4986], [-0.9689, 1.8758, 0.0415], [0.0557, -0.2040, 1.0570]])
    rgb = xyz @ to_rgb.T
    return rgb / rgb[:, 1:2]


# RandAugment. Linear operations join the colour matrix and geometric ones the affine map; the others follow here:
# images and a strength from -1 to 1, [b, 1, 1, 1] -> images.


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    """Identical to Pillow's for 8-bit images; others are rounded to 8 bits."""
    levels = (images * 255).round().long().flatten(2)
    all_levels = torch.arange(256, device=images.device)
    # By sorting: counting would make the CPU wait for a GPU.
    ordered, queries = levels.sort(2).values, all_levels.expand(*levels.shape[:2], 256).contiguous()
    below = torch.searchsorted(ordered, queries)
    step = below.gather(2, ordered[..., -1:]) // 255
    table = torch.where(step > 0, ((below + step // 2) // step.clamp(min=1)).clamp(max=255), all_levels)
    return (table.gather(2, levels) / 255).view_as(images)


def _posterize(images: Tensor, amount: Tensor) -> Tensor:
    step = 2 ** (4 * amount.abs()).round()
    return ((images * 255).round() / step).floor() * step / 255


def _solarize(images: Tensor, amount: Tensor) -> Tensor:
    return torch.where(images > 1 - amount.abs(), 1 - images, images)


def _sharpen(images: Tensor, amount: Tensor) -> Tensor:
    smooth, inner = images.clone(), images[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * inner) / 13
    return torch.lerp(smooth, images, 1 + MAX_CHANGE * amount).clamp_(0, 1)


NONLINEAR = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "solarize": _solarize,
    "sharpen": _sharpen,
}
LINEAR = ("brightness", "contrast", "saturation")
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = (*NONLINEAR, *LINEAR, *GEOMETRIC)


def apply_nonlinear_operations(images: Tensor, rounds: list[Round]) -> Tensor:
    """In place: with any round, the images are a fresh result of the colour matrix."""
    for chosen, amount in rounds:
        for name, operation in NONLINEAR.items():
            index = (chosen == OPERATIONS.index(name)).nonzero()[:, 0]
            if len(index):
                strength = amount[index, None, None, None].to(images.dtype).to(images.device, non_blocking=True)
                index = index.to(images.device, non_blocking=True)
                images[index] = operation(images[index], strength)
    return images
