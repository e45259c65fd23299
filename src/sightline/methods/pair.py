"""Any selector with any predictor."""

from __future__ import annotations

from torch import Tensor

from ..sight import Judge, Look, Method, Prediction, Sight


class Pair(Method):
    """A method made of its two halves, which share nothing but the `Sight`; it is as blind as its *what*."""

    export_obstacle = "it looks at random positions drawn from a hash of each image"

    def __init__(self, where: Look, what: Judge, *, export_graph: str = ""):
        super().__init__()
        self.where, self.what, self.export_graph = where, what, export_graph

    @property
    def blind(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.what.blind

    def look(self, images: Tensor) -> Sight:
        return self.where.look(images)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)
