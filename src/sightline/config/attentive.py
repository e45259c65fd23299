"""Settings of attentive probes: learned pooling of a frozen backbone's patch tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .limits import Count, NotNegative
from .training import Loop


@dataclass(frozen=True)
class Aim(Loop):
    """Attentive probe on frozen, standardised patch tokens: one learned query and a linear head (AIM)."""

    num_heads: Count | None = None
    """Attention heads; must divide the backbone's width. Default: as many as the backbone has."""
    lr: NotNegative = 1e-4
    """Learning rate at batch size 128, times --head-lr-factor because all trained layers are new."""

    method: ClassVar[str] = "aim"


@dataclass(frozen=True)
class Ep(Loop):
    """Efficient probing of frozen patch tokens: learned queries, each pooling its own channels, and a linear head."""

    queries: Count = 32
    """Learned queries; must divide the backbone's width."""
    lr: NotNegative = 1e-4
    """Learning rate at batch size 128, times --head-lr-factor because all trained layers are new."""

    method: ClassVar[str] = "ep"
