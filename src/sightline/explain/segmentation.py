"""Relevance maps as segmentations: how well a map, thresholded at its mean, matches the object mask (Chefer et al.
2021, sec. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..metrics.attention import attention_columns
from ..metrics.estimates import Estimate
from ..metrics.groups import RESAMPLES
from ..metrics.intervals import MOST_DRAWN, percentile_tail
from .estimates import bootstrap_mean
from .perturbation import upsample_map

PER_IMAGE = ("accuracy", "precision", "mass", "hit")
COUNTS = ("both", "either", "neither", "not both")  # pixels in map and mask; in map or mask; in neither; not in both
FIGURES = {
    "accuracy": "pixel accuracy",
    "miou": "mIoU",
    "precision": "mAP",
    "mass": "mass inside the mask",
    "hit": "peak inside the mask",
}


def segmentation_columns(maps: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Per-image quantities [B] of maps [B, H, W] against bool masks [B, h, w]."""
    pixels = upsample_map(maps, (masks.shape[1], masks.shape[2]))
    foreground = (pixels > pixels.mean(dim=(1, 2), keepdim=True)).flatten(1)
    true = masks.flatten(1)
    both, either = (foreground & true).sum(dim=1), (foreground | true).sum(dim=1)
    counts = (both, either, true.shape[1] - either, true.shape[1] - both)
    overlap = attention_columns(maps, masks)
    return {
        "accuracy": (foreground == true).float().mean(dim=1),
        "precision": average_precision(pixels.flatten(1), true),
        "mass": overlap["mass"][:, 0],
        "hit": overlap["hit"][:, 0],
        **dict(zip(COUNTS, counts, strict=True)),
    }


def average_precision(scores: Tensor, true: Tensor) -> Tensor:
    """[B]: average precision over both classes of every pixel, as published: foreground scored by the map scaled to
    [0, 1], background by 1 minus that."""
    low, high = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
    scores = ((scores - low) / (high - low).clamp(min=1e-12)).double()
    both = torch.cat([1 - scores, scores], dim=1)
    both, order = both.sort(dim=1, descending=True)
    correct = torch.cat([~true, true], dim=1).gather(1, order).double()
    rank = torch.arange(1, both.shape[1] + 1, device=both.device).expand_as(both)
    precision = correct.cumsum(dim=1) / rank
    ends = torch.ones_like(correct, dtype=torch.bool)  # of tied scores, the precision of the last one counts
    ends[:, :-1] = both[:, :-1] != both[:, 1:]
    last = torch.where(ends, rank - 1, both.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return (correct * precision.gather(1, last)).sum(dim=1) / correct.sum(dim=1)


def segmentation_figures(columns: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """From columns [n]; mIoU pools all pixels of all images and averages foreground and background."""
    found = {name: bootstrap_mean(columns[name].astype(np.float64)) for name in PER_IMAGE}
    found["miou"] = pooled_miou(np.stack([columns[name] for name in COUNTS], axis=1).astype(np.float64))
    return {name: found[name] for name in FIGURES}


def pooled_miou(counts: np.ndarray) -> Estimate:
    def miou(sums: np.ndarray) -> np.ndarray:
        both, either, neither, not_both = np.moveaxis(sums, -1, 0)
        return (both / np.maximum(either, 1) + neither / np.maximum(not_both, 1)) / 2

    generator, n = np.random.default_rng(0), len(counts)
    step = max(1, MOST_DRAWN // n)
    sizes = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    draws = [miou(generator.multinomial(n, np.full(n, 1 / n), size=size) @ counts) for size in sizes]
    tail = percentile_tail(n)
    low, high = np.quantile(np.concatenate(draws), [tail, 1 - tail])
    return Estimate(float(miou(counts.sum(axis=0))), low, high, n, "bootstrap over images")
