"""Zoom: the window around what is visible, enlarged to the full size, with hidden pixels filled first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.multicrop import resize_matrix


@dataclass(frozen=True)
class Zoom:
    """Settings of the zoom window."""

    margin: float = 0.1  # around what is visible, on every side, as a fraction of its longer side
    smallest: float = 0.25  # side of the window at least, as a fraction of the image's: limits the magnification

    def __post_init__(self):
        if self.margin < 0 or not 0 < self.smallest <= 1:
            raise ValueError(f"{self}: margin must not be negative, and smallest must be above 0 and at most 1")


def zoom_windows(visible: Tensor, *, margin: float, smallest: float) -> Tensor:
    """int64 [B, 4]: the smallest window with the image's aspect ratio around what is visible (bool [B, h, w]) and its
    margin, inside the image; the whole image where nothing is visible. Left, top, right, bottom (exclusive)."""
    h, w = visible.shape[1:]
    left, right = _extent(visible.any(dim=1))
    top, bottom = _extent(visible.any(dim=2))
    scale = torch.maximum((right - left) / w, (bottom - top) / h)
    scale = torch.where(right > left, scale * (1 + 2 * margin), 1.0).clamp(smallest, 1.0)
    left, right = _around(left, right, (scale * w).round().long(), w)
    top, bottom = _around(top, bottom, (scale * h).round().long(), h)
    return torch.stack([left, top, right, bottom], dim=1)


def zoom_in(
    images: Tensor, visible: Tensor, boxes: Tensor, size: tuple[int, int], fill: Tensor
) -> tuple[Tensor, Tensor]:
    """The windows `boxes` of images [B, 3, h, w] and of their masks `visible` [B, h, w], resampled to `size`.

    Hidden pixels are replaced by `fill` first, so that resampling mixes nothing of them into their neighbours. A new
    pixel is visible if at least half of its sources are. A float `visible`, for training, stays 0 or 1 with a
    straight-through gradient: that of the resampled mask, and that of the fill.
    """
    precise = torch.promote_types(images.dtype, torch.float32)
    (h, w), (left, top, right, bottom) = visible.shape[1:], boxes.to(precise).unbind(dim=1)
    with torch.autocast(images.device.type, enabled=False):
        filled = fill_hidden(images.to(precise), visible, fill.to(precise))
        layers = torch.cat([filled, visible[:, None].to(precise)], dim=1)
        # Matrix products, unlike grid sampling, have a deterministic gradient on a GPU.
        layers = torch.einsum("byh,bchw->bcyw", resize_matrix(top, bottom - top, h, size[0]), layers)
        layers = torch.einsum("bcyw,bxw->bcyx", layers, resize_matrix(left, right - left, w, size[1]))
    zoomed, share = layers[:, :3].to(images.dtype), layers[:, 3]
    return zoomed, share >= 0.5 if visible.dtype == torch.bool else straight_through_from(share >= 0.5, share).to(
        visible.dtype
    )


def fill_hidden(images: Tensor, visible: Tensor, fill: Tensor) -> Tensor:
    """The images with `fill` (a colour [3, 1, 1] or an image) where they are hidden."""
    visible = visible[:, None]
    if visible.dtype == torch.bool:
        return torch.where(visible, images, fill.to(images.dtype))
    return visible * images + (1 - visible) * fill


def straight_through_from(hard: Tensor, soft: Tensor) -> Tensor:
    """Exactly `hard`, as 0 and 1, with the gradient of `soft` (straight-through estimator)."""
    return hard.to(soft.dtype) + (soft - soft.detach())


def _extent(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """[B, n] -> [B] and [B]: the first True, and the position after the last; n and 0 where there is none."""
    n = occupied.shape[1]
    positions = torch.arange(n, device=occupied.device)
    return torch.where(occupied, positions, n).amin(dim=1), torch.where(occupied, positions + 1, 0).amax(dim=1)


def _around(start: Tensor, end: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """An interval of this length centred on [start, end), shifted into [0, most) where necessary."""
    first = torch.div(start + end - length, 2, rounding_mode="floor").clamp(min=0).minimum(most - length)
    return first, first + length
