"""Doubtful patches: those that lie farther from their part's prototype than nearly all of the training data's did.

iFAM (sec. 3.4): a threshold per part is the q-quantile of the distances of the training patches that belong to it; a
patch beyond it becomes background. The published code thresholds inner products instead, lets them take the place of
distances, and may hand a doubtful patch to another part: `published_scores`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .parts import Parts


def distances(parts: Parts) -> Tensor:
    """[B, K+1, H, W]: of each patch to each prototype."""
    return (-parts.logits).clamp_min(0).sqrt()


def thresholds(values: Tensor, assigned: Tensor, quantile: float) -> Tensor:
    """float64 [K]: of each part, the quantile of `values` [n, K+1, H, W] over the patches `assigned` [n, H, W] to it.

    A part that has no patch gets NaN, which is a threshold that nothing is beyond.
    """
    found = []
    for part in range(values.shape[1] - 1):
        own = values[:, part][assigned == part].double().cpu().numpy()
        found.append(float(np.quantile(own, quantile)) if len(own) else float("nan"))
    return torch.tensor(found, dtype=torch.float64)


def without_doubtful(parts: Parts, farthest: Tensor) -> Tensor:
    """bool [B, H, W]: the patches of a part that are no farther from it than its threshold in `farthest` [K]."""
    assigned = parts.scores.argmax(dim=1)
    background = parts.scores.shape[1] - 1
    own = distances(parts).gather(1, assigned[:, None])[:, 0].double()
    limit = torch.cat([farthest.to(own), own.new_tensor([torch.inf])])[assigned]
    return (assigned != background) & ~(own > limit)


def published_scores(parts: Parts, inner_products: Tensor, lowest: Tensor) -> Parts:
    """The parts as the published code has them after token removal: a patch may belong to a part only where its inner
    product is at least `lowest` [K], and inner products [B, K+1, H, W] decide among those that are left."""
    foreground, background = inner_products[:, :-1], inner_products[:, -1:]
    passed = foreground.double() >= lowest.to(foreground.device)[:, None, None]
    scores = torch.cat([foreground.masked_fill(~passed, -torch.inf), background], dim=1)
    return replace(parts, logits=scores, scores=scores, shares=scores.softmax(dim=1))
