"""Early masking: a ViT that never receives what is hidden (iFAM's second stage)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.methods import Fill
from ..sight import Prediction, Sight, cell_share, spread
from ..vit.masking import blank
from ..vit.model import Hide, Input, ViT
from .zoom import Zoom, paint, passing, zoom_boxes, zoom_in


@dataclass(frozen=True)
class Seen:
    """What reaches the ViT: pictures, and which of their patches and pixels; floats in training, with a gradient."""

    images: Tensor  # [B, 3, h, w]
    keep: Tensor  # [B, H, W]
    keep_pixels: Tensor | None  # [B, h, w]; None: nothing is left to hide inside kept patches
    windows: Tensor | None = None  # int [B, 4]: where in the picture this is, if zoomed


class MaskedViT(nn.Module):
    """Patches are hidden before the first block, so nothing of them can reach the answer.

    With `zoom` it looks at the window around what is visible, as large as the picture. `fill` is what hidden pixels
    look like inside kept patches. `hide="weighted"` keeps the content of hidden patches at a weight of 1e-10, as
    training does: `verify` refuses it.
    """

    @property
    def blind(self) -> bool:
        return self.hide != "weighted"

    colour: Tensor

    def __init__(self, vit: ViT, hide: Hide = "removal", *, zoom: Zoom | None = None, fill: Fill = "mean"):
        super().__init__()
        if vit.head is None:
            raise ValueError("a predictor needs a head: build the ViT with classes > 0")
        self.vit, self.hide, self.zoom, self.fill = vit, hide, zoom, fill
        self.register_buffer("colour", colour_of(fill, vit.config.input), persistent=False)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        size = images.shape[-2:]
        seen = self.seen(images, *sight.on_grid(self.vit.grid(images), size))
        if seen.windows is not None:
            pixels = sight.keep_pixels if sight.boxes is None else sight.visible(size)
            sight = replace(sight, keep_pixels=pixels, boxes=seen.windows[:, None])
        keep = seen.keep.to(images.dtype) if self.hide == "weighted" else seen.keep
        out = self.vit(seen.images, keep, seen.keep_pixels, hide=self.hide)
        shown = F.pad(keep.flatten(1) > 0, (self.vit.prefix, 0), value=True)
        return Prediction(out.logits, sight, blank(out.tokens, shown[..., None]))

    def seen(self, images: Tensor, keep: Tensor, keep_pixels: Tensor | None = None) -> Seen:
        """What the ViT is to be given of these images, of which `keep` [B, H, W] and `keep_pixels` [B, h, w] may be
        seen. In training either may be floats of 0 and 1 with a gradient, and stays so."""
        size, windows = (images.shape[2], images.shape[3]), None
        fill = self.colour if self.fill != "noise" else tiled(self.colour, size)
        if self.zoom is not None:
            visible = spread(keep, size) if keep_pixels is None else spread(keep, size) * keep_pixels
            windows = zoom_boxes(visible > 0, margin=self.zoom.margin, smallest=self.zoom.smallest)
            images, keep_pixels = zoom_in(images, visible, windows, size, fill)
            share = cell_share(keep_pixels, self.vit.grid(images))
            keep = share > 0 if keep.dtype == torch.bool else passing(share > 0, share)
        if self.fill != "mean" and keep_pixels is not None:  # the mean colour is what the ViT itself fills in
            images, keep_pixels = paint(images, keep_pixels, fill), None
        return Seen(images, keep, keep_pixels, windows)

    def extra_repr(self) -> str:
        other = [f"zoom={self.zoom}"] * (self.zoom is not None) + [f"fill={self.fill}"] * (self.fill != "mean")
        return ", ".join([f"hide={self.hide}", *other])


def colour_of(fill: Fill, expects: Input) -> Tensor:
    """What hidden pixels look like: a colour [3, 1, 1], or the one picture of noise, the same in every model."""
    if fill == "noise":
        return torch.rand(3, *expects.size, generator=torch.Generator().manual_seed(0))
    level = {"black": 0.0, "grey": 0.5, "white": 1.0}
    return torch.tensor(expects.mean if fill == "mean" else [level[fill]] * 3).view(3, 1, 1)


def tiled(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """[3, h, w]: repeated as often as a picture of this size needs."""
    (rows, columns), device = picture.shape[1:], picture.device
    y, x = (torch.arange(side, device=device) for side in size)
    return picture[:, (y % rows)[:, None], x % columns]


class SoftlyMaskedViT(nn.Module):
    """iFAM's ablation: patches are weighed by the share of their likeliest part, never quite hidden, so not blind."""

    blind = False

    def __init__(self, vit: ViT):
        super().__init__()
        assert vit.head is not None, "a predictor needs a head"
        self.vit = vit

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert sight.parts is not None, "weights come from parts"
        out = self.vit(images, sight.parts[:, :-1].amax(dim=1).float())
        return Prediction(out.logits, sight, out.tokens)
