"""Relevance as segmentation: how well a map, cut at its own mean, outlines the thing (Chefer et al. 2021, sec. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..metrics.estimates import Estimate
from ..metrics.groups import RESAMPLES
from ..metrics.intervals import MOST_DRAWN, TAIL
from ..metrics.overlap import map_columns
from .perturbation import at_pixels, mean_over

PER_PICTURE = ("accuracy", "precision", "mass", "hit")
COUNTS = ("both", "either", "neither", "not both")  # pixels in map and mask; in one of them; in none; not in both
FIGURES = {
    "accuracy": "pixel accuracy",
    "miou": "mIoU",
    "precision": "mAP",
    "mass": "share inside the mask",
    "hit": "maximum inside the mask",
}


def outlined(maps: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """[B] each: what the figures are made of, of maps [B, H, W] and bool masks [B, h, w]."""
    pixels = at_pixels(maps, (masks.shape[1], masks.shape[2]))
    found = (pixels > pixels.mean(dim=(1, 2), keepdim=True)).flatten(1)
    true = masks.flatten(1)
    both, either = (found & true).sum(dim=1), (found | true).sum(dim=1)
    counts = (both, either, true.shape[1] - either, true.shape[1] - both)
    known = map_columns(maps, masks)
    return {
        "accuracy": (found == true).float().mean(dim=1),
        "precision": average_precision(pixels.flatten(1), true),
        "mass": known["mass"][:, 0],
        "hit": known["hit"][:, 0],
        **dict(zip(COUNTS, counts, strict=True)),
    }


def average_precision(scores: Tensor, true: Tensor) -> Tensor:
    """[B]: of both answers to every pixel, as published: that it is of the thing, by its score from 0 to 1, and that it
    is not, by what is left of 1."""
    low, high = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
    scores = ((scores - low) / (high - low).clamp(min=1e-12)).double()
    both = torch.cat([1 - scores, scores], dim=1)
    both, order = both.sort(dim=1, descending=True)
    right = torch.cat([~true, true], dim=1).gather(1, order).double()
    place = torch.arange(1, both.shape[1] + 1, device=both.device).expand_as(both)
    precision = right.cumsum(dim=1) / place
    ends = torch.ones_like(right, dtype=torch.bool)  # of equals, only the last one's precision counts
    ends[:, :-1] = both[:, :-1] != both[:, 1:]
    last = torch.where(ends, place - 1, both.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return (right * precision.gather(1, last)).sum(dim=1) / right.sum(dim=1)


def figures_of(columns: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Of columns [n]; mIoU is pooled over all pixels of all pictures, and the mean of thing and background."""
    found = {name: mean_over(columns[name].astype(np.float64)) for name in PER_PICTURE}
    found["miou"] = pooled(np.stack([columns[name] for name in COUNTS], axis=1).astype(np.float64))
    return {name: found[name] for name in FIGURES}


def pooled(counts: np.ndarray) -> Estimate:
    def miou(sums: np.ndarray) -> np.ndarray:
        both, either, neither, not_both = np.moveaxis(sums, -1, 0)
        return (both / np.maximum(either, 1) + neither / np.maximum(not_both, 1)) / 2

    generator, n = np.random.default_rng(0), len(counts)
    step = max(1, MOST_DRAWN // n)
    sizes = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    draws = [miou(generator.multinomial(n, np.full(n, 1 / n), size=size) @ counts) for size in sizes]
    low, high = np.quantile(np.concatenate(draws), [TAIL, 1 - TAIL])
    return Estimate(float(miou(counts.sum(axis=0))), low, high, n, "bootstrap over images")
