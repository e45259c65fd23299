"""Early masking: a ViT that never receives what is hidden (stage 2 of iFAM)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.methods import Fill
from ..sight import Prediction, Sight, cell_share, cells_to_pixels
from ..vit.masking import blank
from ..vit.model import Hide, Input, ViT
from .zoom import Zoom, fill_hidden, straight_through_from, zoom_in, zoom_windows


@dataclass(frozen=True)
class MaskedInput:
    """The input of the ViT: images, and which of their patches and pixels it may see. In training the masks may be
    floats with a straight-through gradient."""

    images: Tensor  # [B, 3, h, w]
    keep: Tensor  # [B, H, W]
    keep_pixels: Tensor | None  # [B, h, w]; None: nothing is hidden inside kept patches
    windows: Tensor | None = None  # int [B, 4]: the window of the image that this is, if zoomed


class MaskedViT(nn.Module):
    """Patches are hidden before the first block, so nothing of them can reach the prediction.

    With `zoom` the window around what is visible is enlarged to the size of the image. `fill` is the colour of hidden
    pixels inside kept patches. `hide="weighted"` keeps the content of hidden patches at a weight of 1e-10, as training
    does; `verify` rejects it.
    """

    @property
    def blind(self) -> bool:
        return self.hide != "weighted"

    colour: Tensor

    def __init__(self, vit: ViT, hide: Hide = "removal", *, zoom: Zoom | None = None, fill: Fill = "mean"):
        super().__init__()
        if vit.head is None:
            raise ValueError("a predictor needs a head; build the ViT with classes > 0")
        self.vit, self.hide, self.zoom, self.fill = vit, hide, zoom, fill
        self.register_buffer("colour", fill_colour(fill, vit.config.input), persistent=False)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        size = images.shape[-2:]
        seen = self.masked_input(images, *sight.on_grid(self.vit.grid(images), size))
        if seen.windows is not None:
            pixels = sight.keep_pixels if sight.boxes is None else sight.visible(size)
            sight = replace(sight, keep_pixels=pixels, boxes=seen.windows[:, None])
        keep = seen.keep.to(images.dtype) if self.hide == "weighted" else seen.keep
        out = self.vit(seen.images, keep, seen.keep_pixels, hide=self.hide)
        tokens = out.tokens  # hidden ones are zero already, except under weighted hiding
        if self.hide == "weighted":
            tokens = blank(tokens, F.pad(keep.flatten(1) > 0, (self.vit.prefix, 0), value=True)[..., None])
        return Prediction(out.logits, sight, tokens)

    def masked_input(self, images: Tensor, keep: Tensor, keep_pixels: Tensor | None = None) -> MaskedInput:
        """The ViT's input for these images with the masks `keep` [B, H, W] and `keep_pixels` [B, h, w]. In training
        either may be floats of 0 and 1 with a gradient, and stays so."""
        size, windows = (images.shape[2], images.shape[3]), None
        fill = self.colour if self.fill != "noise" else tile_image(self.colour, size)
        if self.zoom is not None:
            visible = cells_to_pixels(keep, size) if keep_pixels is None else cells_to_pixels(keep, size) * keep_pixels
            windows = zoom_windows(visible > 0, margin=self.zoom.margin, smallest=self.zoom.smallest)
            images, keep_pixels = zoom_in(images, visible, windows, size, fill)
            share = cell_share(keep_pixels, self.vit.grid(images))
            keep = share > 0 if keep.dtype == torch.bool else straight_through_from(share > 0, share)
        if self.fill != "mean" and keep_pixels is not None:  # the ViT itself fills in the mean colour
            images, keep_pixels = fill_hidden(images, keep_pixels, fill), None
        return MaskedInput(images, keep, keep_pixels, windows)

    def extra_repr(self) -> str:
        other = [f"zoom={self.zoom}"] * (self.zoom is not None) + [f"fill={self.fill}"] * (self.fill != "mean")
        return ", ".join([f"hide={self.hide}", *other])


def fill_colour(fill: Fill, expects: Input) -> Tensor:
    """The colour [3, 1, 1] of hidden pixels, or an image of noise, the same for every model."""
    if fill == "noise":
        return torch.rand(3, *expects.size, generator=torch.Generator().manual_seed(0))
    level = {"black": 0.0, "grey": 0.5, "white": 1.0}
    return torch.tensor(expects.mean if fill == "mean" else [level[fill]] * 3).view(3, 1, 1)


def tile_image(image: Tensor, size: tuple[int, int]) -> Tensor:
    """[3, h, w]: the image repeated to this size."""
    rows, columns = image.shape[1:]
    y, x = (torch.arange(side, device=image.device) for side in size)
    return image[:, (y % rows)[:, None], x % columns]


class SoftMaskedViT(nn.Module):
    """iFAM's ablation: patches are weighted by the probability of their likeliest part and never hidden; not blind."""

    blind = False

    def __init__(self, vit: ViT):
        super().__init__()
        assert vit.head is not None, "a predictor needs a head"
        self.vit = vit

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        assert sight.parts is not None, "the weights are part probabilities"
        out = self.vit(images, sight.parts[:, :-1].amax(dim=1).float())
        return Prediction(out.logits, sight, out.tokens)
