"""What methods are told that let some pictures count more than others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .methods import Erm


@dataclass(frozen=True)
class Groupdro(Erm):
    """Fine-tune on whole pictures; groups that are answered badly count more and more (GroupDRO). It uses group
    labels."""

    step_size: float = 0.01
    """How fast what groups count follows their losses."""
    adjust: float = 0.0
    """Added to a group's loss, divided by the root of its size, so that small groups count more; published: 0 to 5."""
    balance: Literal["none", "classes", "groups", "loss"] = "groups"
    """Draw every class, or every group, equally often; or, `loss`: as they come, but let the loss allow for how common
    each class is."""
    select: Literal["worst-group", "worst-class", "balanced", "accuracy", "auc"] = "worst-group"
    """What the validation data choose by."""

    method: ClassVar[str] = "groupdro"
    needs_groups: ClassVar[bool] = True
    weighs_batches: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (GroupDRO: trained with group labels)"


@dataclass(frozen=True)
class Cvar(Erm):
    """Fine-tune on whole pictures; only the worst answered ones of each batch count (CVaR-DRO)."""

    worst: float = 0.2
    """Their share."""

    method: ClassVar[str] = "cvar"
    weighs_batches: ClassVar[bool] = True


@dataclass(frozen=True)
class Lff(Erm):
    """Fine-tune on whole pictures, most on those that a second backbone, which learns what is easy, fails at (LfF)."""

    easy: float = 0.7
    """How much the second one prefers what it is sure of; near 0 it learns like any other."""
    memory: float = 0.7
    """How much of a picture's loss is what it was before."""

    method: ClassVar[str] = "lff"
    weighs_batches: ClassVar[bool] = True


@dataclass(frozen=True)
class Jtt(Erm):
    """Fine-tune twice: the second time, pictures that the first failed at come more often (JTT). The first is in
    RUN/first."""

    first: int = 1
    """Epochs of the first training: few, so that it learns what is easy."""
    more: int = 50
    """How many times more often. Published: 100 for Waterbirds, 50 for CelebA; like --first, chosen by validation
    groups."""

    method: ClassVar[str] = "jtt"
