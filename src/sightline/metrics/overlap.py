"""Overlap of sight, parts and maps with the ground truth, image by image: the columns of the localisation metrics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..data.batches import Batch
from ..sight import Sight, cell_share
from .attention import attention_columns, value_and_count
from .keypoints import PartLocations, contingency, dense_parts, parts_at_keypoints

PATCH = 16  # side of a grid cell in pixels, for methods without a patch grid
Columns = dict[str, np.ndarray]  # by metric [n, c]: what is summed over images to compute it


def localization_columns(sight: Sight, maps: Mapping[str, Tensor], truth: Batch, *, published: bool = False) -> Columns:
    """The columns of every metric, [b, c] each: mostly a value and whether it counts, to be summed and divided."""
    assert truth.masks is not None, "ground truth needs masks"
    masks, size = truth.masks, (truth.masks.shape[1], truth.masks.shape[2])
    grid = patch_grid(sight, maps, size)
    visible, inside = sight.visible(size), cell_share(masks, grid) >= 0.5
    columns = {
        "grid_iou": _overlap(cell_share(visible, grid) >= 0.5, inside),
        "pixel_iou": _overlap(visible, masks),
        "coverage": value_and_count(visible.float().mean(dim=(1, 2))),
    }
    foreground = visible
    if sight.parts is not None:
        background = sight.parts.shape[1] - 1
        in_parts = cell_share(masks, sight.parts.shape[2:]) >= 0.5
        columns["parts_grid_iou"] = _overlap(sight.parts.argmax(dim=1) < background, in_parts)
        foreground = dense_parts(sight.parts, size, align_corners=True) < background
    # The iFAM code's IoU: intersection and union are summed over all images before dividing.
    columns["pooled_iou"] = torch.stack(_both_and_either(foreground, masks), dim=1)
    for name, values in maps.items():
        columns |= {f"{metric} {name}": column for metric, column in attention_columns(values, masks).items()}
    arrays = {name: column.double().cpu().numpy() for name, column in columns.items()}
    if sight.parts is not None and truth.keypoints is not None:
        arrays |= _keypoint_columns(sight.parts.float(), truth, size, published)
    return arrays


def patch_grid(sight: Sight, maps: Mapping[str, Tensor], size: tuple[int, int]) -> tuple[int, int]:
    """The grid of the parts, of the kept patches or of a map, the first that divides the image evenly; otherwise cells
    of 16 pixels or, where those do not divide the image, slightly larger ones."""
    for tensor in (sight.parts, sight.keep, *maps.values()):
        if tensor is not None:
            H, W = tensor.shape[-2:]
            if 1 < H < size[0] and 1 < W < size[1] and not (size[0] % H or size[1] % W):
                return H, W
    return _cells(size[0]), _cells(size[1])


def _cells(side: int) -> int:
    """The largest number of equal cells of at least 16 pixels."""
    return next(cells for cells in range(max(side // PATCH, 1), 0, -1) if side % cells == 0)


def _overlap(found: Tensor, true: Tensor) -> Tensor:
    """The IoU of every image; images with an empty true mask do not count."""
    both, either = _both_and_either(found, true)
    return value_and_count(both / either.clamp(min=1), true.flatten(1).any(dim=1))


def _both_and_either(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection and union, in pixels."""
    first, second = first.flatten(1), second.flatten(1)
    return (first & second).sum(dim=1), (first | second).sum(dim=1)


def _keypoint_columns(parts: Tensor, truth: Batch, size: tuple[int, int], published: bool) -> Columns:
    assert truth.keypoints is not None
    locations = PartLocations.of(parts, truth.keypoints, _boxes(truth), size, published)
    labels = parts_at_keypoints(parts, truth.keypoints, size, published=published).cpu().numpy()
    true = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    counts = contingency(labels, true, locations.visible, (labels.shape[1], parts.shape[1]))
    return {"places " + name: value for name, value in vars(locations).items()} | {"contingency": counts}


def _boxes(truth: Batch) -> Tensor:
    """[b, 4]: each image's first box, otherwise the bounding box of its mask, otherwise the whole image."""
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
