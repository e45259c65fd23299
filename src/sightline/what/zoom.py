"""Looking again, closer: the window around what may be seen, at the full size, with nothing of what may not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.multicrop import resizing


@dataclass(frozen=True)
class Zoom:
    """How closely to look."""

    margin: float = 0.1  # around what is visible, on every side, as a share of its longer side
    smallest: float = 0.25  # of the picture's side: a speck is not blown up without end

    def __post_init__(self):
        if self.margin < 0 or not 0 < self.smallest <= 1:
            raise ValueError(f"{self}: margin must not be negative, and smallest must lie above 0 and at most at 1")


def zoom_boxes(visible: Tensor, *, margin: float, smallest: float) -> Tensor:
    """int64 [B, 4]: the smallest window of the picture's own shape around what is visible (bool [B, h, w]), with its
    margin, inside the picture; all of it where nothing is visible. Left, top, right, bottom, the latter excluded."""
    h, w = visible.shape[1:]
    left, right = _extent(visible.any(dim=1))
    top, bottom = _extent(visible.any(dim=2))
    share = torch.maximum((right - left) / w, (bottom - top) / h)
    share = torch.where(right > left, share * (1 + 2 * margin), 1.0).clamp(smallest, 1.0)
    left, right = _around(left, right, (share * w).round().long(), w)
    top, bottom = _around(top, bottom, (share * h).round().long(), h)
    return torch.stack([left, top, right, bottom], dim=1)


def zoom_in(
    images: Tensor, visible: Tensor, boxes: Tensor, size: tuple[int, int], fill: Tensor
) -> tuple[Tensor, Tensor]:
    """The windows `boxes` of images [B, 3, h, w] and of what is visible in them [B, h, w], resampled to `size`.

    What is hidden is painted over with `fill` first, so that nothing of it reaches its neighbours. A new pixel is
    visible when half of what it is made of is. Float `visible`, for training, stays 0 or 1 but passes a gradient on:
    that of the resampled share, and that of the paint.
    """
    precise = torch.promote_types(images.dtype, torch.float32)
    (h, w), (left, top, right, bottom) = visible.shape[1:], boxes.to(precise).unbind(dim=1)
    with torch.autocast(images.device.type, enabled=False):
        painted = paint(images.to(precise), visible, fill.to(precise))
        layers = torch.cat([painted, visible[:, None].to(precise)], dim=1)
        # Matrix products, unlike sampling, have a gradient that is the same every time on a GPU, too.
        layers = torch.einsum("byh,bchw->bcyw", resizing(top, bottom - top, h, size[0]), layers)
        layers = torch.einsum("bcyw,bxw->bcyx", layers, resizing(left, right - left, w, size[1]))
    zoomed, share = layers[:, :3].to(images.dtype), layers[:, 3]
    return zoomed, share >= 0.5 if visible.dtype == torch.bool else passing(share >= 0.5, share).to(visible.dtype)


def paint(images: Tensor, visible: Tensor, fill: Tensor) -> Tensor:
    """The images with `fill` (a colour [3, 1, 1] or a picture) where they are hidden."""
    visible = visible[:, None]
    if visible.dtype == torch.bool:
        return torch.where(visible, images, fill.to(images.dtype))
    return visible * images + (1 - visible) * fill


def passing(hard: Tensor, share: Tensor) -> Tensor:
    """Exactly `hard`, as 0 and 1, with the gradient of `share` (straight through)."""
    return hard.to(share.dtype) + (share - share.detach())


def _extent(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """[B, n] -> [B] and [B]: the first place, and that after the last; n and 0 where there is none."""
    n = occupied.shape[1]
    places = torch.arange(n, device=occupied.device)
    return torch.where(occupied, places, n).amin(dim=1), torch.where(occupied, places + 1, 0).amax(dim=1)


def _around(start: Tensor, end: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """A stretch of this length with [start, end) in its middle, or as near to it as `most` allows."""
    first = torch.div(start + end - length, 2, rounding_mode="floor").clamp(min=0).minimum(most - length)
    return first, first + length
