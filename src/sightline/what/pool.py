"""Late masking: the usual way to "use only the foreground", which is not blind to the background."""

from __future__ import annotations

from torch import Tensor, nn

from ..sight import Prediction, Sight
from ..vit.masking import blank
from ..vit.model import ViT


class LateMaskedViT(nn.Module):
    """The ViT sees everything; hidden patches are excluded only from the average of its final tokens.

    By then every kept token has attended to every hidden one. The sum is divided by all N patches, as published.
    """

    blind = False

    def __init__(self, vit: ViT, classes: int):
        super().__init__()
        self.vit = vit
        self.head = nn.Linear(vit.config.width, classes)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        keep, _ = sight.on_grid(self.vit.grid(images), images.shape[-2:])
        patches = blank(self.vit(images).patches, keep.flatten(1)[..., None])
        return Prediction(self.head(patches.mean(dim=1)), sight, patches)
