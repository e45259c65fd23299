"""Any *where* with any *what*."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from ..sight import Prediction, Sight


class Where(Protocol):
    def look(self, images: Tensor) -> Sight: ...
    def maps(self, images: Tensor) -> dict[str, Tensor]: ...


class What(Protocol):
    def judge(self, images: Tensor, sight: Sight) -> Prediction: ...


class Pair(nn.Module):
    """A method out of its two halves, which share nothing but the `Sight`."""

    def __init__(self, where: Where, what: What):
        super().__init__()
        self.where, self.what = where, what

    def look(self, images: Tensor) -> Sight:
        return self.where.look(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)
