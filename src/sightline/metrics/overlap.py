"""Per image, what a method saw beside what is really there: what the figures of `localize` are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import Batch
from ..sight import Sight, cell_share
from .keypoints import Places, contingency, dense_parts, parts_at

PATCH = 16  # the side of a patch, for what looks at pixels alone
Columns = dict[str, np.ndarray]  # per figure [n, c]: what is added up over images to get it


def per_image(sight: Sight, maps: Mapping[str, Tensor], truth: Batch, *, published: bool = False) -> Columns:
    """What the figures are made of, [b, c] each: mostly a value and whether it counts, to be summed and divided."""
    assert truth.masks is not None, "there is no truth without masks"
    masks, size = truth.masks, (truth.masks.shape[1], truth.masks.shape[2])
    grid = patch_grid(sight, maps, size)
    visible, inside = sight.visible(size), cell_share(masks, grid) >= 0.5
    columns = {
        "grid_iou": _overlap(cell_share(visible, grid) >= 0.5, inside),
        "pixel_iou": _overlap(visible, masks),
        "coverage": _mean(visible.float().mean(dim=(1, 2))),
    }
    foreground = visible
    if sight.parts is not None:
        background = sight.parts.shape[1] - 1
        columns["parts_grid_iou"] = _overlap(sight.parts.argmax(dim=1) < background, inside)
        foreground = dense_parts(sight.parts, size, align_corners=True) < background
    columns["pooled_iou"] = torch.stack(_both_and_either(foreground, masks), dim=1)
    for name, each in maps.items():
        columns |= {f"{figure} {name}": column for figure, column in map_columns(each, masks).items()}
    found = {name: column.double().cpu().numpy() for name, column in columns.items()}
    if sight.parts is not None and truth.keypoints is not None:
        found |= _keypoint_columns(sight.parts.float(), truth, size, published)
    return found


def patch_grid(sight: Sight, maps: Mapping[str, Tensor], size: tuple[int, int]) -> tuple[int, int]:
    """That of the parts, of the kept patches or of a map, whichever has one that divides the picture; else of 16 pixels
    or, where those do not divide it, a little more."""
    for each in (sight.parts, sight.keep, *maps.values()):
        if each is not None:
            H, W = each.shape[-2:]
            if 1 < H < size[0] and 1 < W < size[1] and not (size[0] % H or size[1] % W):
                return H, W
    return _cells(size[0]), _cells(size[1])


def _cells(side: int) -> int:
    """Of at least 16 pixels each, as many as divide the side."""
    return next(cells for cells in range(max(side // PATCH, 1), 0, -1) if side % cells == 0)


def map_columns(maps: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Of maps [B, H, W], at the pixels: mass and hit (A², sec. 4), and the entropy as a share of the largest one."""
    size, counts = (masks.shape[1], masks.shape[2]), masks.any(dim=(1, 2))
    pixels = F.interpolate(maps[:, None].float(), size, mode="bilinear")[:, 0].clamp(min=0).flatten(1)
    shares = pixels / pixels.sum(dim=1, keepdim=True).clamp(min=1e-12)
    hit = masks.flatten(1).gather(1, shares.argmax(dim=1, keepdim=True))[:, 0]
    return {
        "mass": _mean((shares * masks.flatten(1)).sum(dim=1), counts),
        "hit": _mean(hit.float(), counts),
        "entropy": _mean(torch.special.entr(shares).sum(dim=1) / math.log(shares.shape[1])),
    }


def pooled_iou(parts: Tensor, masks: Tensor) -> tuple[float, float]:
    """Of foreground and background, over all pixels of all images at once (the iFAM code's figure)."""
    foreground = dense_parts(parts, (masks.shape[1], masks.shape[2]), align_corners=True) < parts.shape[1] - 1
    values = [_both_and_either(*pair) for pair in ((foreground, masks), (~foreground, ~masks))]
    return values[0][0].sum().item() / values[0][1].sum().item(), values[1][0].sum().item() / values[1][1].sum().item()


def mean_iou(found: Tensor, true: Tensor) -> float:
    """Mean over images of bool masks [B, ...]; images where nothing is true do not count."""
    total = _overlap(found, true).sum(dim=0)
    return (total[0] / total[1]).item()


def _overlap(found: Tensor, true: Tensor) -> Tensor:
    both, either = _both_and_either(found, true)
    return _mean(both / either.clamp(min=1), true.flatten(1).any(dim=1))


def _both_and_either(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    one, other = one.flatten(1), other.flatten(1)
    return (one & other).sum(dim=1), (one | other).sum(dim=1)


def _mean(values: Tensor, counts: Tensor | None = None) -> Tensor:
    counts = torch.ones_like(values) if counts is None else counts.to(values.dtype)
    return torch.stack([values * counts, counts], dim=1)


def _keypoint_columns(parts: Tensor, truth: Batch, size: tuple[int, int], published: bool) -> Columns:
    assert truth.keypoints is not None
    places = Places.of(parts, truth.keypoints, _boxes(truth), size, published)
    labels = parts_at(parts, truth.keypoints, size, published=published).cpu().numpy()
    true = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    counts = contingency(labels, true, places.visible, (labels.shape[1], parts.shape[1]))
    return {"places " + name: value for name, value in vars(places).items()} | {"contingency": counts}


def _boxes(truth: Batch) -> Tensor:
    """[b, 4]: each image's first box, or else that of its mask, or else the picture's."""
    masks = truth.masks
    assert masks is not None
    h, w = masks.shape[1:]
    of_mask = []
    for mask in masks:
        y, x = mask.nonzero(as_tuple=True)
        of_mask.append([x.min(), y.min(), x.max() + 1, y.max() + 1] if len(x) else [0, 0, w, h])
    boxes = torch.tensor(of_mask, dtype=torch.float32, device=masks.device)
    if truth.boxes is None or not truth.boxes.shape[1]:
        return boxes
    first = truth.boxes[:, 0]
    return torch.where(first.isfinite().all(dim=1, keepdim=True), first, boxes)
