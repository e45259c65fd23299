"""An adapter of a few parameters that corrects attention on the wrong object (A², App. G).

    sight = AdaptedSight(FrozenAttention(vit), CandidateBoxes([(1 / 7, None)]), Adapter("tokens", 384, 256))

Crops are chosen among candidates that are the same for every image, so that the choice can be learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Sight
from ..vit.model import ViT
from .attention import Heads, aggregate_heads, min_max_scale, normalize_sum
from .crops import resize, side_in_pixels, vit_input_size
from .topk import top_k

PARAMETERS = 3000  # approximate size of an adapter, whatever its input


class Adapter(nn.Module):
    """A residual that is added to the attention map; zero before training.

    `tokens` computes it from every patch token with a shared MLP (A², sec. 4.3); `map` from the whole map, whose size
    is then fixed (A², App. G).
    """

    def __init__(self, kind: Literal["tokens", "map"], width: int, patches: int):
        super().__init__()
        self.kind = kind
        if kind == "tokens":
            sizes = width, max(1, round((PARAMETERS - 1) / (width + 2))), 1
        else:
            sizes = patches, max(1, round((PARAMETERS - patches) / (2 * patches + 1))), patches
        self.hidden, self.out = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def initialize(self, generator: torch.Generator) -> Adapter:
        """Draw the hidden weights, which must differ for training; the output stays 0."""
        nn.init.normal_(self.hidden.weight, std=self.hidden.in_features**-0.5, generator=generator)
        return self

    def forward(self, attention: Tensor, tokens: Tensor) -> Tensor:
        """The adapted map [B, H, W], from attention [B, H, W], divided by its maximum, and patch tokens [B, N, D]."""
        attention = attention / attention.amax(dim=(1, 2), keepdim=True)
        inputs = F.layer_norm(tokens, tokens.shape[-1:]) if self.kind == "tokens" else attention.flatten(1)
        return attention + self.out(F.gelu(self.hidden(inputs))).view_as(attention)

    def extra_repr(self) -> str:
        return self.kind


class FrozenAttention(nn.Module):
    """A frozen ViT's attention map and patch tokens in one pass, of images no larger than it was trained on."""

    def __init__(self, vit: ViT, layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.layer, self.heads = vit, layer, heads

    def input_size(self, size: tuple[int, ...]) -> tuple[int, int]:
        """The size to which images of `size` are resized for the ViT."""
        return vit_input_size(self.vit, size)

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Attention [B, H, W], each map summing to 1, and patch tokens [B, N, D]."""
        out = self.vit(resize(images, self.input_size(images.shape[-2:])), cls_attention=[self.layer])
        attention = normalize_sum(aggregate_heads(out.cls_attention[:, 0, :, self.vit.prefix :].float(), self.heads))
        return attention.unflatten(1, out.grid), out.patches.float()

    def extra_repr(self) -> str:
        return f"layer={self.layer}, heads={self.heads}"


class CandidateBoxes(nn.Module):
    """Candidate crops: squares on even grids. Each of `grids` has the side (a fraction of the image's shorter side, or
    pixels) and the number per row and column; None: as many as fit without overlap (seven of 1/7, at any size)."""

    def __init__(self, grids: Sequence[tuple[float, int | None]]):
        super().__init__()
        self.grids = tuple(grids)

    def boxes(self, size: tuple[int, ...]) -> Tensor:
        """int64 [J, 4], grid by grid, in reading order."""
        boxes = []
        for share, count in self.grids:
            side, counts = (
                side_in_pixels(share, size),
                [count or count_that_fit(share, length, size) for length in size],
            )
            if count is None:  # the side may have been rounded up
                side = min(side, *(length // many for length, many in zip(size, counts, strict=True)))
            tops, lefts = (even_positions(length - side, many) for length, many in zip(size, counts, strict=True))
            boxes += [(left, top, left + side, top + side) for top in tops for left in lefts]
        return torch.tensor(boxes)

    def look(self, images: Tensor) -> Sight:
        """All candidates."""
        boxes = self.boxes(images.shape[-2:]).to(images.device)
        return Sight(boxes=boxes.expand(len(images), -1, -1))

    def extra_repr(self) -> str:
        return f"grids={self.grids}"


def count_that_fit(side: float, length: int, size: tuple[int, ...]) -> int:
    """How often a side (a fraction of the shorter side of an image of `size`, or pixels) fits into a length."""
    exact = side * min(size) if side <= 1 else int(side)
    return min(length, int(length / exact + 1e-9))


def even_positions(last: int, count: int) -> list[int]:
    """`count` integers evenly spaced from 0 to `last`; a single one is in the middle."""
    return [last // 2] if count == 1 else [round(i * last / (count - 1)) for i in range(count)]


def box_means(maps: Tensor, boxes: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, J]: the mean of each map [B, H, W], upsampled to `size` pixels (bilinear), in each of the boxes [J, 4]."""

    def cell_weights(length: int, cells: int, start: Tensor, end: Tensor) -> Tensor:
        upsampled = F.interpolate(torch.eye(cells, dtype=maps.dtype)[None], length, mode="linear")[0]  # [cells, length]
        sums = F.pad(upsampled.cumsum(dim=1), (1, 0))
        return ((sums[:, end] - sums[:, start]) / (end - start)).T.to(maps.device)  # [J, cells]

    left, top, right, bottom = boxes.cpu().unbind(dim=1)
    rows = cell_weights(size[0], maps.shape[1], top, bottom)
    columns = cell_weights(size[1], maps.shape[2], left, right)
    return torch.einsum("jh,bhw,jw->bj", rows, maps, columns)


class AdaptedSight(nn.Module):
    """Looks at the `count` candidates with the highest mean of the adapted map; they may overlap."""

    def __init__(self, glance: FrozenAttention, candidates: CandidateBoxes, adapter: Adapter, count: int = 1):
        super().__init__()
        self.glance, self.candidates, self.adapter, self.count = glance, candidates, adapter, count

    def scores(self, attention: Tensor, tokens: Tensor, size: tuple[int, ...]) -> Tensor:
        """[B, J] in [0, 1]: the score of every candidate in images of `size` pixels."""
        means = box_means(self.adapter(attention, tokens), self.candidates.boxes(size), size)
        return min_max_scale(means, (1,), eps=1e-12)

    def look(self, images: Tensor) -> Sight:
        size = images.shape[-2:]
        attention, tokens = self.glance(images)
        with torch.autocast(images.device.type, enabled=False):
            best = top_k(self.scores(attention, tokens, size), self.count)
        return Sight(boxes=self.candidates.boxes(size).to(images.device)[best])

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        attention, tokens = self.glance(images)
        with torch.autocast(images.device.type, enabled=False):
            adapted = min_max_scale(self.adapter(attention, tokens).flatten(1), (1,), eps=1e-12) + 1e-12
        return {"attention": attention, "adapted": normalize_sum(adapted).view_as(attention)}

    def extra_repr(self) -> str:
        return f"count={self.count}"
