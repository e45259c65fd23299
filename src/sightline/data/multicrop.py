"""Multi-crop: several views of every picture, cut, resized, flipped, blurred and recoloured on the device.

    large, small = MultiCrop(large=112, small=48)(images, seed=0, epoch=3, places=places)

Cutting, resizing, flipping and blurring along one axis is one small matrix per view, so that a view is two matrix
products: rows · picture · columnsᵀ. The matrices are antialiased. Colour is a third matrix, over the channels. What a
view looks like follows from (seed, epoch, the picture's place in the epoch) alone, and nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .augment import RATIOS, uniforms
from .colours import YIQ

DRAWS = ("area", "ratio", "x", "y", "flip", "jitter", "brightness", "contrast", "saturation", "hue")
DRAWS += ("grey", "blur", "sigma", "solarise")
BLUR, SOLARISE = DRAWS.index("blur"), DRAWS.index("solarise")
JITTERED = ("brightness", "contrast", "saturation", "hue")
SHARPEST, SOFTEST = 0.1 / 224, 2.0 / 224  # standard deviations of the blur, in shares of a view's side


@dataclass(frozen=True)
class MultiCrop:
    """DINO's views (Caron et al., 2021): two large ones and several small ones of every picture."""

    large: int = 112
    """Side of the large views in pixels."""
    small: int = 48
    smalls: int = 6
    """How many small ones."""
    large_area: tuple[float, float] = (0.4, 1.0)
    """The share of the picture's area that a large view shows, from, to."""
    small_area: tuple[float, float] = (0.05, 0.4)
    flip: float = 0.5
    jitter: float = 0.8
    """Probability of other brightness, contrast, saturation and hue."""
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey: float = 0.2
    """Probability of no colour at all."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability: of the first large view, of the second, of a small one."""
    solarise: float = 0.2
    """Probability of inverting what is bright, in the second large view."""

    @torch.no_grad()
    def __call__(self, images: Tensor, *, seed: int, epoch: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [b, 3, h, w] -> floats in [0, 1]: large views [b, 2, 3, S, S] and small ones [b, n, 3, s, s]."""
        count, device = 2 + self.smalls, images.device
        draws = uniforms(seed, epoch, places, count * len(DRAWS)).float().unflatten(1, (count, -1))
        draws[..., BLUR] /= torch.tensor([*self.blur[:2], *[self.blur[2]] * self.smalls])  # below 1: is blurred
        draws = (draws.pin_memory() if images.is_cuda else draws).to(device, non_blocking=True)
        with torch.autocast(device.type, enabled=False):
            by_rows = images.transpose(1, 2).flatten(2).float() / 255  # [b, h, 3·w]
            large = self._views(by_rows, draws[:, :2], self.large, self.large_area)
            small = self._views(by_rows, draws[:, 2:], self.small, self.small_area)
            solarised = torch.where(large[:, 1] >= 0.5, 1 - large[:, 1], large[:, 1])
            chosen = (draws[:, 1, SOLARISE] < self.solarise)[:, None, None, None]
            large[:, 1] = torch.where(chosen, solarised, large[:, 1])
        return large, small

    def _views(self, by_rows: Tensor, drawn: Tensor, side: int, area: tuple[float, float]) -> Tensor:
        """[b, n, 3, side, side], of draws [b, n, as many as there are names]."""
        b, n, _ = drawn.shape
        draws = dict(zip(DRAWS, drawn.unbind(2), strict=True))
        left, top, width, height = boxes(draws, area)
        flipped = draws["flip"] < self.flip
        sigma = SHARPEST + (SOFTEST - SHARPEST) * draws["sigma"]
        softening = blur(torch.where(draws["blur"] < 1, sigma * side, 0.0), side)
        h, w = by_rows.shape[1], by_rows.shape[2] // 3
        rows = softening @ resizing(top * h, height * h, h, side)
        columns = softening @ resizing(torch.where(flipped, left + width, left) * w, width * w, w, side, flipped)
        views = torch.bmm(rows.flatten(1, 2), by_rows)  # [b, n·side, 3·w]
        views = torch.bmm(views.view(b * n, side * 3, w), columns.flatten(0, 1).mT)
        return self._recoloured(views.view(b, n, side, 3, side).transpose(2, 3), draws)

    def _recoloured(self, views: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """[b, n, 3, s, s]: contrast is about the view's mean grey, which saturation and hue leave as it is."""
        changed = draws["jitter"] < self.jitter
        amounts = {name: torch.where(changed, getattr(self, name) * (2 * draws[name] - 1), 0.0) for name in JITTERED}
        brightness, contrast = 1 + amounts["brightness"], 1 + amounts["contrast"]
        saturation = torch.where(draws["grey"] < self.grey, 0.0, 1 + amounts["saturation"])
        angle = 2 * math.pi * amounts["hue"]
        exact = torch.tensor(YIQ, dtype=torch.float64)
        to_yiq, from_yiq = (m.float().to(views.device, non_blocking=True) for m in (exact, exact.inverse()))
        cos, sin, zero = saturation * angle.cos(), saturation * angle.sin(), torch.zeros_like(angle)
        turned = torch.stack([zero + 1, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))
        matrix = (brightness * contrast)[..., None, None] * (from_yiq @ turned @ to_yiq)
        grey = views.mean((3, 4)) @ to_yiq[0]
        offset = brightness * (1 - contrast) * grey
        mixed = matrix @ views.flatten(3) + offset[..., None, None]
        return mixed.clamp_(0, 1).view_as(views)


def boxes(draws: dict[str, Tensor], area: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left, top, width, height of random windows, in shares of the picture; sides between 3:4 and 4:3, all inside."""
    share = area[0] + (area[1] - area[0]) * draws["area"]
    low, high = (math.log(ratio) for ratio in RATIOS)
    half = (0.5 * (low + (high - low) * draws["ratio"])).exp()
    width, height = (share.sqrt() * half).clamp(max=1), (share.sqrt() / half).clamp(max=1)
    return draws["x"] * (1 - width), draws["y"] * (1 - height), width, height


def resizing(start: Tensor, length: Tensor, source: int, target: int, backwards: Tensor | None = None) -> Tensor:
    """[..., target, source]: each new pixel's weights over the old ones, for a window of `length` pixels from `start`.

    A triangle that widens as the window shrinks: bilinear and antialiased, like Pillow's. `backwards` mirrors.
    """
    scale = (length / target)[..., None, None]
    step = scale if backwards is None else torch.where(backwards[..., None, None], -scale, scale)
    new = torch.arange(target, device=start.device)[:, None] + 0.5
    old = torch.arange(source, device=start.device) + 0.5
    weights = (1 - (start[..., None, None] + new * step - old).abs() / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def blur(sigma: Tensor, side: int) -> Tensor:
    """[..., side, side]: a Gaussian's weights; with a sigma of 0 the identity."""
    places = torch.arange(side, device=sigma.device)
    apart = (places[:, None] - places).square()
    weights = torch.exp(-apart / (2 * sigma.clamp(min=1e-3).square())[..., None, None])
    return weights / weights.sum(-1, keepdim=True)
