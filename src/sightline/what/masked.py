"""Early masking: a ViT that never receives what is hidden (iFAM's second stage)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..hiding import blank
from ..sight import Prediction, Sight
from ..vit import Hide, ViT


class MaskedViT(nn.Module):
    """Patches are hidden before the first block, so nothing of them can reach the answer.

    `hide="weighted"` keeps their content at a weight of 1e-10, as training does: `verify` refuses it.
    """

    def __init__(self, vit: ViT, hide: Hide = "removal"):
        super().__init__()
        if vit.head is None:
            raise ValueError("a predictor needs a head: build the ViT with classes > 0")
        self.vit, self.hide = vit, hide

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        keep, keep_pixels = sight.on_grid(self.vit.grid(images), images.shape[-2:])
        if self.hide == "weighted":
            keep = keep.to(images.dtype)
        out = self.vit(images, keep, keep_pixels, hide=self.hide)
        shown = F.pad(keep.flatten(1) > 0, (self.vit.prefix, 0), value=True)
        return Prediction(out.logits, sight, blank(out.tokens, shown[..., None]))

    def extra_repr(self) -> str:
        return f"hide={self.hide}"


class SoftlyMaskedViT(nn.Module):
    """iFAM's ablation: patches are weighed by the share of their likeliest part, never quite hidden, so not blind."""

    def __init__(self, vit: ViT):
        super().__init__()
        assert vit.head is not None, "a predictor needs a head"
        self.vit = vit

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert sight.parts is not None, "weights come from parts"
        out = self.vit(images, sight.parts[:, :-1].amax(dim=1).float())
        return Prediction(out.logits, sight, out.tokens)
