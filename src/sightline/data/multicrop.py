"""Multi-crop augmentation (DINO): several views of every image, cropped, flipped, blurred and jittered on the device.

    large, small = MultiCrop(large=112, small=48)(images, seed=0, epoch=3, positions=positions)

Cropping, resizing, flipping and blurring along one axis is one small matrix per view, so that a view is two matrix
products: rows · image · columnsᵀ. The matrices are antialiased. Colour is a third matrix, over the channels. A view is
a function of (seed, epoch, the image's position in the epoch) only, and nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .augment import ASPECT_RATIOS, uniforms
from .colours import YIQ

DRAWS = ("area", "ratio", "x", "y", "flip", "jitter", "brightness", "contrast", "saturation", "hue")
DRAWS += ("grey", "blur", "sigma", "solarise")
BLUR, SOLARISE = DRAWS.index("blur"), DRAWS.index("solarise")
JITTERED = ("brightness", "contrast", "saturation", "hue")
MIN_SIGMA, MAX_SIGMA = 0.1 / 224, 2.0 / 224  # of the Gaussian blur, as fractions of a view's side


@dataclass(frozen=True)
class MultiCrop:
    """DINO's views (Caron et al., 2021): two global (large) and several local (small) crops of every image."""

    large: int = 112
    """Side of the global crops in pixels."""
    small: int = 48
    small_count: int = 6
    """Number of local crops."""
    large_area: tuple[float, float] = (0.4, 1.0)
    """Range of the fraction of the image's area in a global crop."""
    small_area: tuple[float, float] = (0.05, 0.4)
    flip: float = 0.5
    jitter: float = 0.8
    """Probability of colour jitter: brightness, contrast, saturation and hue."""
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey: float = 0.2
    """Probability of conversion to greyscale."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability of Gaussian blur: first global crop, second global crop, local crops."""
    solarise: float = 0.2
    """Probability of solarisation of the second global crop."""

    @torch.no_grad()
    def __call__(self, images: Tensor, *, seed: int, epoch: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, h, w] -> floats in [0, 1]: global crops [b, 2, 3, S, S] and local crops [b, n, 3, s, s]."""
        count, device = 2 + self.small_count, images.device
        draws = uniforms(seed, epoch, positions, count * len(DRAWS)).float().unflatten(1, (count, -1))
        draws[..., BLUR] /= torch.tensor([*self.blur[:2], *[self.blur[2]] * self.small_count])  # below 1: blurred
        draws = (draws.pin_memory() if images.is_cuda else draws).to(device, non_blocking=True)
        with torch.autocast(device.type, enabled=False):
            by_rows = images.transpose(1, 2).flatten(2).float() / 255  # [b, h, 3·w]
            large = self._views(by_rows, draws[:, :2], self.large, self.large_area)
            small = self._views(by_rows, draws[:, 2:], self.small, self.small_area)
            solarised = torch.where(large[:, 1] >= 0.5, 1 - large[:, 1], large[:, 1])
            chosen = (draws[:, 1, SOLARISE] < self.solarise)[:, None, None, None]
            large[:, 1] = torch.where(chosen, solarised, large[:, 1])
        return large, small

    def _views(self, by_rows: Tensor, draws: Tensor, side: int, area: tuple[float, float]) -> Tensor:
        """[b, n, 3, side, side], from draws [b, n, len(DRAWS)]."""
        b, n, _ = draws.shape
        draw = dict(zip(DRAWS, draws.unbind(2), strict=True))
        left, top, width, height = random_boxes(draw, area)
        flipped = draw["flip"] < self.flip
        sigma = MIN_SIGMA + (MAX_SIGMA - MIN_SIGMA) * draw["sigma"]
        blurring = gaussian_matrix(torch.where(draw["blur"] < 1, sigma * side, 0.0), side)
        h, w = by_rows.shape[1], by_rows.shape[2] // 3
        rows = blurring @ resize_matrix(top * h, height * h, h, side)
        columns = blurring @ resize_matrix(torch.where(flipped, left + width, left) * w, width * w, w, side, flipped)
        views = torch.bmm(rows.flatten(1, 2), by_rows)  # [b, n·side, 3·w]
        views = torch.bmm(views.view(b * n, side * 3, w), columns.flatten(0, 1).mT)
        return self._jitter_colours(views.view(b, n, side, 3, side).transpose(2, 3), draw)

    def _jitter_colours(self, views: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """[b, n, 3, s, s]: contrast is about the view's mean grey, which saturation and hue do not change."""
        jittered = draws["jitter"] < self.jitter
        amounts = {name: torch.where(jittered, getattr(self, name) * (2 * draws[name] - 1), 0.0) for name in JITTERED}
        brightness, contrast = 1 + amounts["brightness"], 1 + amounts["contrast"]
        saturation = torch.where(draws["grey"] < self.grey, 0.0, 1 + amounts["saturation"])
        angle = 2 * math.pi * amounts["hue"]
        exact = torch.tensor(YIQ, dtype=torch.float64)
        to_yiq, from_yiq = (m.float().to(views.device, non_blocking=True) for m in (exact, exact.inverse()))
        cos, sin, zero = saturation * angle.cos(), saturation * angle.sin(), torch.zeros_like(angle)
        rotated = torch.stack([zero + 1, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))
        matrix = (brightness * contrast)[..., None, None] * (from_yiq @ rotated @ to_yiq)
        grey = views.mean((3, 4)) @ to_yiq[0]
        offset = brightness * (1 - contrast) * grey
        mixed = matrix @ views.flatten(3) + offset[..., None, None]
        return mixed.clamp_(0, 1).view_as(views)


def random_boxes(draws: dict[str, Tensor], area: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left, top, width, height of random crops as fractions of the image; aspect ratios from 3:4 to 4:3."""
    fraction = area[0] + (area[1] - area[0]) * draws["area"]
    low, high = (math.log(ratio) for ratio in ASPECT_RATIOS)
    half = (0.5 * (low + (high - low) * draws["ratio"])).exp()
    width, height = (fraction.sqrt() * half).clamp(max=1), (fraction.sqrt() / half).clamp(max=1)
    return draws["x"] * (1 - width), draws["y"] * (1 - height), width, height


def resize_matrix(start: Tensor, length: Tensor, source: int, target: int, flipped: Tensor | None = None) -> Tensor:
    """[..., target, source]: each target pixel's weights over the source pixels of the window at `start` of `length`.

    A triangle filter that widens with the scale: bilinear and antialiased, like Pillow's. `flipped` mirrors.
    """
    scale = (length / target)[..., None, None]
    step = scale if flipped is None else torch.where(flipped[..., None, None], -scale, scale)
    new = torch.arange(target, device=start.device)[:, None] + 0.5
    old = torch.arange(source, device=start.device) + 0.5
    weights = (1 - (start[..., None, None] + new * step - old).abs() / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def gaussian_matrix(sigma: Tensor, side: int) -> Tensor:
    """[..., side, side]: weights of a Gaussian blur; the identity where sigma is 0."""
    pixels = torch.arange(side, device=sigma.device)
    distances = (pixels[:, None] - pixels).square()
    weights = torch.exp(-distances / (2 * sigma.clamp(min=1e-3).square())[..., None, None])
    return weights / weights.sum(-1, keepdim=True)
