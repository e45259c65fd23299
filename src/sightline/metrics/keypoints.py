"""Consistency of parts across images: key point regression error, NMI and ARI (PDiscoFormer, sec. 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVE = 0.5  # a part is active in an image where its probability exceeds this


@dataclass(frozen=True, eq=False)
class PartLocations:
    """Locations of the parts and key points of n images, as fractions of the object's box."""

    centres: np.ndarray  # [n, K, 2]: x, y
    active: np.ndarray  # bool [n, K]
    landmarks: np.ndarray  # [n, L, 2]
    visible: np.ndarray  # bool [n, L]

    @classmethod
    def of(
        cls, parts: Tensor, keypoints: Tensor, boxes: Tensor, size: tuple[int, int], published: bool
    ) -> PartLocations:
        """From part probabilities [n, K+1, H, W], key points [n, L, 3] (x, y, visible) and boxes [n, 4] (left, top,
        right, bottom).

        A key point is a pixel, whose centre is half a pixel away from the edges that boxes are given by. The published
        geometry omits this half pixel, and the half cell of the grid.
        """
        corner, extent = boxes[:, None, :2], (boxes[:, None, 2:] - boxes[:, None, :2]).clamp(min=1e-6)
        half = 0.0 if published else 0.5
        centres = (part_centres(parts, size, half_cell=not published) - corner) / extent
        landmarks = (keypoints[..., :2] + half - corner) / extent
        active = parts[:, :-1].amax(dim=(2, 3)) > ACTIVE
        return cls(*(tensor.cpu().numpy() for tensor in (centres, active, landmarks, keypoints[..., 2] > 0)))


def part_centres(parts: Tensor, size: tuple[int, int], *, half_cell: bool = True) -> Tensor:
    """[B, K, 2]: x and y of each foreground part's centre of mass, in pixels from the image's edge."""
    H, W = parts.shape[-2:]
    half = 0.5 if half_cell else 0.0
    y = (torch.arange(H, device=parts.device) + half) * (size[0] / H)
    x = (torch.arange(W, device=parts.device) + half) * (size[1] / W)
    weights = parts[:, :-1] / parts[:, :-1].sum(dim=(2, 3), keepdim=True).clamp(min=1e-12)
    return torch.stack([weights.sum(dim=2) @ x, weights.sum(dim=3) @ y], dim=-1)


def keypoint_errors(fit: PartLocations, test: PartLocations) -> np.ndarray:
    """[n, L]: errors of key points predicted linearly from part centres; NaN for key points that are not visible.

    Kp of PDiscoFormer (Aniraj et al. 2024, sec. 4.2): one regression per key point on standardised coordinates, without
    intercept; inactive parts are set to the mean.
    """
    errors = np.full(test.visible.shape, np.nan)
    for k in range(test.visible.shape[1]):
        known, tested = fit.visible[:, k], test.visible[:, k]
        if not known.any() or not tested.any():
            continue
        centre, spread = _standard(fit.centres[known])
        middle, width = _standard(fit.landmarks[known, k])
        inputs = ((fit.centres[known] - centre) / spread * fit.active[known, :, None]).reshape(known.sum(), -1)
        weights = np.linalg.lstsq(inputs, (fit.landmarks[known, k] - middle) / width, rcond=None)[0]
        inputs = ((test.centres[tested] - centre) / spread * test.active[tested, :, None]).reshape(tested.sum(), -1)
        errors[tested, k] = np.linalg.norm(inputs @ weights * width + middle - test.landmarks[tested, k], axis=1)
    return errors


def _standard(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over images; 1 instead of 0 for what never changes."""
    spread = values.std(axis=0)
    return values.mean(axis=0), np.where(spread > 0, spread, 1.0)


# ---- parts as clusters -----------------------------------------------------------------------------------------------


def parts_at_keypoints(parts: Tensor, keypoints: Tensor, size: tuple[int, int], *, published: bool = False) -> Tensor:
    """int64 [B, L]: the part, or background (the last number), at each key point, of bilinearly upsampled maps.

    A key point between pixels takes the nearest pixel; in the published geometry, the one to the upper left.
    """
    labels, half = dense_parts(parts, size), 0.0 if published else 0.5
    x, y = ((keypoints[..., i] + half).floor().long().clamp(0, size[1 - i] - 1) for i in (0, 1))
    return labels[torch.arange(len(labels), device=labels.device)[:, None], y, x]


def dense_parts(parts: Tensor, size: tuple[int, int], *, align_corners: bool = False) -> Tensor:
    """int64 [B, h, w]: the most probable part of every pixel."""
    return F.interpolate(parts.float(), size, mode="bilinear", align_corners=align_corners).argmax(dim=1)


def contingency(found: np.ndarray, true: np.ndarray, counted: np.ndarray, sizes: tuple[int, int]) -> np.ndarray:
    """int64 [n, true, found]: how often each pair of labels [n, ...] occurs in every image, where `counted`."""
    n, (true_labels, found_labels) = len(found), sizes
    image = np.broadcast_to(np.arange(n).reshape(-1, *[1] * (found.ndim - 1)), found.shape)
    codes = (image * true_labels + true) * found_labels + found
    return np.bincount(codes[counted], minlength=n * true_labels * found_labels).reshape(n, true_labels, found_labels)


def normalised_mutual_information(counts: np.ndarray) -> np.ndarray:
    """[...] of tables [..., true, found]: mutual information over the mean of both entropies."""
    shares = counts / np.maximum(counts.sum(axis=(-2, -1), keepdims=True), 1)
    rows, columns = _entropy(shares.sum(axis=-1)), _entropy(shares.sum(axis=-2))
    mutual = rows + columns - _entropy(shares.reshape(*shares.shape[:-2], -1))
    agreement = np.where(rows + columns > 0, mutual / np.maximum((rows + columns) / 2, 1e-300), 1.0)
    return np.where(counts.any(axis=(-2, -1)), agreement, np.nan)


def adjusted_rand_index(counts: np.ndarray) -> np.ndarray:
    """[...] of tables [..., true, found]: agreement on pairs, 0 by chance and 1 at best (Hubert and Arabie 1985)."""
    both = _pairs(counts).sum(axis=(-2, -1))
    rows, columns = _pairs(counts.sum(axis=-1)).sum(axis=-1), _pairs(counts.sum(axis=-2)).sum(axis=-1)
    chance = rows * columns / np.maximum(_pairs(counts.sum(axis=(-2, -1))), 1)
    best = (rows + columns) / 2
    agreement = np.where(best > chance, (both - chance) / np.where(best > chance, best - chance, 1), 1.0)
    return np.where(counts.any(axis=(-2, -1)), agreement, np.nan)


def _entropy(shares: np.ndarray) -> np.ndarray:
    return -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=-1)


def _pairs(counts: np.ndarray) -> np.ndarray:
    counts = np.asarray(counts, dtype=np.float64)
    return counts * (counts - 1) / 2
