"""Interventions on discovered parts (iFAM, sec. 3.4): part removal, forced parts, and token removal, which hides
patches that lie farther from their part's prototype than nearly all patches of the training data.

The published code thresholds inner products instead of distances and may reassign a removed token to another part; here
removed tokens become background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import Parts, foreground_probability, hard_keep, kept_parts


@dataclass(frozen=True)
class PartAssignment:
    """The part of each patch and its distance: all that a `Correction` needs, small enough to cache for every image."""

    scores: Tensor  # [B, K+1, H, W]: they decide
    distances: Tensor  # [B, H, W]: to the prototype of the patch's best part, as if there were no background

    @classmethod
    def of(cls, parts: Parts, scores: Tensor) -> PartAssignment:
        best = scores[:, :-1].argmax(dim=1, keepdim=True)
        return cls(scores, (-parts.logits).gather(1, best)[:, 0].clamp_min(0).sqrt())

    def to(self, device: torch.device | str) -> PartAssignment:
        return PartAssignment(self.scores.to(device), self.distances.to(device))

    @property
    def part(self) -> Tensor:
        """int [B, H, W]: the best part of each patch, background aside."""
        return self.scores[:, :-1].argmax(dim=1)

    @property
    def probabilities(self) -> Tensor:
        """[B, K+1, H, W]: the part maps."""
        return self.scores.softmax(dim=1)


@dataclass(frozen=True)
class Correction:
    """An intervention on parts (iFAM, sec. 3.4). Patches of a dropped part, and those beyond their part's distance
    limit, become background, never another part's. Patches of a forced part are kept whatever the background scores,
    unless they are beyond the limit."""

    drop: tuple[int, ...] = ()
    force: tuple[int, ...] = ()
    max_distances: tuple[float, ...] | None = None  # one per part; NaN removes nothing

    def keep_parts(self, assignment: PartAssignment) -> Tensor:
        """bool [B, K]: False for dropped parts, like the part dropout of training."""
        kept = assignment.scores.new_ones(len(assignment.scores), assignment.scores.shape[1] - 1, dtype=torch.bool)
        kept[:, list(self.drop)] = False
        return kept

    def forced(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: patches of a forced part."""
        return _among(assignment.part, self.force)

    def dropped(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: patches of a dropped part."""
        return _among(assignment.part, self.drop)

    def too_far(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: patches beyond the distance limit of their part."""
        if self.max_distances is None:
            return torch.zeros_like(assignment.distances, dtype=torch.bool)
        limits = assignment.distances.new_tensor(self.max_distances, dtype=torch.float64)
        return assignment.distances > limits[assignment.part]

    def removed(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: patches that would be foreground and become background."""
        gone = self.dropped(assignment) | self.too_far(assignment)
        return gone & (hard_keep(assignment.scores) | self.forced(assignment))

    def without_pixels(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: those patches, and others of which pixels would be visible, because all parts together are
        likelier than the background, though no single one is."""
        gone = self.dropped(assignment) | self.too_far(assignment)
        return self.removed(assignment) | (gone & (foreground_probability(assignment.scores) >= 0.5))

    def keep(self, assignment: PartAssignment) -> Tensor:
        """bool [B, H, W]: the patches that may be seen."""
        kept = hard_keep(assignment.scores, self.keep_parts(assignment))
        return (kept | self.forced(assignment)) & ~self.removed(assignment)

    def foreground_probability(self, assignment: PartAssignment) -> Tensor:
        """[B, H, W] in [0, 1], 1 for forced and 0 for removed patches."""
        probability = foreground_probability(assignment.scores, self.keep_parts(assignment))
        return probability.masked_fill(self.forced(assignment), 1.0).masked_fill(self.without_pixels(assignment), 0.0)

    def probabilities(self, assignment: PartAssignment) -> Tensor:
        """[B, K+1, H, W]: the part maps; what is taken from parts is added to the background."""
        if self == Correction():
            return assignment.probabilities
        forced, one_hot = self.forced(assignment), F.one_hot(assignment.part, assignment.scores.shape[1] - 1)
        parts = kept_parts(assignment.probabilities, self.keep_parts(assignment), 0.0)
        parts = torch.where(forced[:, None], one_hot.movedim(-1, 1).to(parts), parts)
        parts = parts.masked_fill(self.without_pixels(assignment)[:, None], 0.0)
        return torch.cat([parts, 1 - parts.sum(dim=1, keepdim=True)], dim=1)


def _among(values: Tensor, chosen: Sequence[int]) -> Tensor:
    return torch.isin(values, values.new_tensor(chosen, dtype=values.dtype))
