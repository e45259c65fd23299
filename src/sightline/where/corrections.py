"""What a user overrules in the parts that were found (iFAM, sec. 3.4): parts dropped or forced, doubtful patches
removed. Doubtful is what lies farther from its part's prototype than nearly all of the training data's did.

The published code thresholds inner products instead, lets them take the place of distances, and may hand a doubtful
patch to another part: `published_scores`, which interventions do not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import Parts, foreground, hard_keep, surviving


@dataclass(frozen=True)
class PartAssignment:
    """To which part each patch would go: so little that it can be kept for every picture."""

    scores: Tensor  # [B, K+1, H, W]: they decide
    distances: Tensor  # [B, H, W]: to the prototype of the part that claims the patch, as if there were no background

    @classmethod
    def of(cls, parts: Parts, scores: Tensor) -> PartAssignment:
        claimant = scores[:, :-1].argmax(dim=1, keepdim=True)
        return cls(scores, (-parts.logits).gather(1, claimant)[:, 0].clamp_min(0).sqrt())

    @property
    def part(self) -> Tensor:
        """int [B, H, W]: the part that claims each patch."""
        return self.scores[:, :-1].argmax(dim=1)

    @property
    def shares(self) -> Tensor:
        return self.scores.softmax(dim=1)


@dataclass(frozen=True)
class Correction:
    """Patches of a dropped part, and those too far from their part, become background and no other part's; what a
    forced part claims is kept whatever the background says, unless it is too far (iFAM, sec. 3.4)."""

    drop: tuple[int, ...] = ()
    force: tuple[int, ...] = ()
    farthest: tuple[float, ...] | None = None  # distance from each part's prototype; beyond NaN there is nothing

    def keep_parts(self, claims: PartAssignment) -> Tensor:
        """bool [B, K], as in training."""
        kept = claims.scores.new_ones(len(claims.scores), claims.scores.shape[1] - 1, dtype=torch.bool)
        kept[:, list(self.drop)] = False
        return kept

    def forced(self, claims: PartAssignment) -> Tensor:
        """bool [B, H, W]"""
        return _among(claims.part, self.force)

    def removed(self, claims: PartAssignment) -> Tensor:
        """bool [B, H, W]: what would be of a part, and becomes background."""
        gone = self.dropped(claims) | self.too_far(claims)
        return gone & (hard_keep(claims.scores) | self.forced(claims))

    def dropped(self, claims: PartAssignment) -> Tensor:
        """bool [B, H, W]"""
        return _among(claims.part, self.drop)

    def too_far(self, claims: PartAssignment) -> Tensor:
        """bool [B, H, W]"""
        if self.farthest is None:
            return torch.zeros_like(claims.distances, dtype=torch.bool)
        return claims.distances > claims.distances.new_tensor(self.farthest, dtype=torch.float64)[claims.part]

    def keep(self, claims: PartAssignment) -> Tensor:
        """bool [B, H, W]: the patches that may be seen."""
        kept = hard_keep(claims.scores, self.keep_parts(claims))
        return (kept | self.forced(claims)) & ~self.removed(claims)

    def foreground(self, claims: PartAssignment) -> Tensor:
        """[B, H, W] in [0, 1]: the share of what may be seen."""
        share = foreground(claims.scores, self.keep_parts(claims))
        return share.masked_fill(self.forced(claims), 1.0).masked_fill(self.removed(claims), 0.0)

    def shares(self, claims: PartAssignment) -> Tensor:
        """[B, K+1, H, W]: the part maps; what is taken from the parts is given to the background."""
        if self == Correction():
            return claims.shares
        forced, sure = self.forced(claims), F.one_hot(claims.part, claims.scores.shape[1] - 1).movedim(-1, 1)
        parts = surviving(claims.shares, self.keep_parts(claims), 0.0)
        parts = torch.where(forced[:, None], sure.to(parts), parts).masked_fill(self.removed(claims)[:, None], 0.0)
        return torch.cat([parts, 1 - parts.sum(dim=1, keepdim=True)], dim=1)


def _among(numbers: Tensor, some: Sequence[int]) -> Tensor:
    return torch.isin(numbers, numbers.new_tensor(some, dtype=numbers.dtype))


def published_scores(parts: Parts, inner_products: Tensor, lowest: Tensor) -> Parts:
    """The parts as the published code has them after token removal: a patch may belong to a part only where its inner
    product is at least `lowest` [K], and inner products [B, K+1, H, W] decide among those that are left."""
    foreground, background = inner_products[:, :-1], inner_products[:, -1:]
    passed = foreground.double() >= lowest.to(foreground.device)[:, None, None]
    scores = torch.cat([foreground.masked_fill(~passed, -torch.inf), background], dim=1)
    return replace(parts, logits=scores, scores=scores, shares=scores.softmax(dim=1))
