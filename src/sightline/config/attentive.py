"""What attentive probes are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .training import Loop


@dataclass(frozen=True)
class Aim(Loop):
    """A learned query attends to the backbone's frozen, standardised patch tokens, and a head answers (AIM's attentive
    probe)."""

    heads: int | None = None
    """Of the attention; they divide the backbone's width. Default: as many as the backbone has."""
    lr: float = 1e-4
    """At a batch of 128; times --head-lr, since all that learns is new."""

    method: ClassVar[str] = "aim"


@dataclass(frozen=True)
class Ep(Loop):
    """Learned queries attend to the backbone's frozen patch tokens, each pools channels of its own, and a head answers
    (efficient probing)."""

    queries: int = 32
    """They divide the backbone's width."""
    lr: float = 1e-4
    """At a batch of 128; times --head-lr, since all that learns is new."""

    method: ClassVar[str] = "ep"
