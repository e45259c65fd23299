"""Any *where* with any *what*."""

from __future__ import annotations

from torch import Tensor, nn

from ..sight import Judge, Look, Prediction, Sight


class Pair(nn.Module):
    """A method out of its two halves, which share nothing but the `Sight`."""

    def __init__(self, where: Look, what: Judge):
        super().__init__()
        self.where, self.what = where, what

    def look(self, images: Tensor) -> Sight:
        return self.where.look(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)
