"""Attention that looks at the wrong thing, corrected by a few parameters (A², App. G).

    sight = AdaptedSight(Glance(vit), Candidates([(1 / 7, None), (2 / 7, None)]), Adapter("tokens", 384, 256))

Crops are chosen among candidates that are the same for every picture, so that a choice among them can be learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Sight
from ..vit.model import ViT
from .attention import Heads, joined, renormalised
from .crops import in_pixels, resized
from .topk import top_k

PARAMETERS = 3000  # about as many as an adapter has, whatever it works on


class Adapter(nn.Module):
    """What is added to an attention map: nothing, before it learns.

    `tokens` reads it off every patch's token, with the same few neurons; `map` off the map itself, whose size is then
    fixed. The paper says the one (sec. 4.3) and the other (App. G).
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

    def begin(self, generator: torch.Generator) -> Adapter:
        """Draw what has to differ for learning to begin; the output stays 0."""
        nn.init.normal_(self.hidden.weight, std=self.hidden.in_features**-0.5, generator=generator)
        return self

    def forward(self, attention: Tensor, tokens: Tensor) -> Tensor:
        """The adapted map [B, H, W], of attention [B, H, W] in units of its highest, and tokens [B, N, D]."""
        attention = attention / attention.amax(dim=(1, 2), keepdim=True)
        seen = F.layer_norm(tokens, tokens.shape[-1:]) if self.kind == "tokens" else attention.flatten(1)
        return attention + self.out(F.gelu(self.hidden(seen))).view_as(attention)

    def extra_repr(self) -> str:
        return self.kind


class Glance(nn.Module):
    """A frozen ViT's attention map and the tokens of its patches, in one pass, no larger than it was made for."""

    def __init__(self, vit: ViT, layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.layer, self.heads = vit, layer, heads

    def size(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Of the picture that it sees, for one of this size."""
        patch, made_for = self.vit.config.patch, self.vit.config.input.size
        h, w = (max(patch, min(pair) // patch * patch) for pair in zip(size, made_for, strict=True))
        return h, w

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, W], each summing to 1, and [B, N, D]."""
        out = self.vit(resized(images, self.size(images.shape[-2:])), cls_attention=[self.layer])
        attention = renormalised(joined(out.cls_attention[:, 0, :, self.vit.prefix :].float(), self.heads))
        return attention.unflatten(1, out.grid), out.patches.float()

    def extra_repr(self) -> str:
        return f"layer={self.layer}, heads={self.heads}"


class Candidates(nn.Module):
    """Squares in even rows and columns. For each of `grids`: their side (a share of the picture's, or pixels), and how
    many stand side by side; None: as many as do without overlap, at every size seven sevenths."""

    def __init__(self, grids: Sequence[tuple[float, int | None]]):
        super().__init__()
        self.grids = tuple(grids)

    def boxes(self, size: tuple[int, ...]) -> Tensor:
        """int64 [J, 4], grid by grid, in reading order."""
        found = []
        for share, count in self.grids:
            side, counts = in_pixels(share, size), [count or as_many(share, length, size) for length in size]
            if count is None:  # a seventh may have been rounded up
                side = min(side, *(length // many for length, many in zip(size, counts, strict=True)))
            tops, lefts = (evenly(length - side, many) for length, many in zip(size, counts, strict=True))
            found += [(left, top, left + side, top + side) for top in tops for left in lefts]
        return torch.tensor(found)

    def look(self, images: Tensor) -> Sight:
        """All of them."""
        boxes = self.boxes(images.shape[-2:]).to(images.device)
        return Sight(boxes=boxes.expand(len(images), -1, -1))

    def extra_repr(self) -> str:
        return f"grids={self.grids}"


def as_many(side: float, length: int, size: tuple[int, ...]) -> int:
    """How often a side, a share of that of a picture of `size`, or pixels, fits into a length."""
    exact = side * min(size) if side <= 1 else int(side)
    return min(length, int(length / exact + 1e-9))


def evenly(last: int, count: int) -> list[int]:
    """`count` whole numbers from 0 to `last`; one alone stands in the middle."""
    return [last // 2] if count == 1 else [round(i * last / (count - 1)) for i in range(count)]


def box_means(maps: Tensor, boxes: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, J]: the mean of each map [B, H, W], spread over `size` pixels (bilinear), in each of the boxes [J, 4]."""

    def share(length: int, cells: int, start: Tensor, end: Tensor) -> Tensor:
        spread = F.interpolate(torch.eye(cells, dtype=maps.dtype)[None], length, mode="linear")[0]  # [cells, length]
        sums = F.pad(spread.cumsum(dim=1), (1, 0))
        return ((sums[:, end] - sums[:, start]) / (end - start)).T.to(maps.device)  # [J, cells]

    left, top, right, bottom = boxes.cpu().unbind(dim=1)
    rows, columns = share(size[0], maps.shape[1], top, bottom), share(size[1], maps.shape[2], left, right)
    return torch.einsum("jh,bhw,jw->bj", rows, maps, columns)


def stretched(scores: Tensor) -> Tensor:
    """Each row from 0 to 1; zeros where all are alike."""
    low, high = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
    return (scores - low) / (high - low).clamp(min=1e-12)


class AdaptedSight(nn.Module):
    """The `count` candidates in which the adapted map is highest on average. They may overlap."""

    def __init__(self, glance: Glance, candidates: Candidates, adapter: Adapter, count: int = 1):
        super().__init__()
        self.glance, self.candidates, self.adapter, self.count = glance, candidates, adapter, count

    def scores(self, attention: Tensor, tokens: Tensor, size: tuple[int, ...]) -> Tensor:
        """[B, J] from 0 to 1, of every candidate in pictures of `size` pixels."""
        return stretched(box_means(self.adapter(attention, tokens), self.candidates.boxes(size), size))

    def look(self, images: Tensor) -> Sight:
        size = images.shape[-2:]
        glanced = self.glance(images)
        with torch.autocast(images.device.type, enabled=False):
            best = top_k(self.scores(*glanced, size), self.count)
        return Sight(boxes=self.candidates.boxes(size).to(images.device)[best])

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        attention, tokens = self.glance(images)
        with torch.autocast(images.device.type, enabled=False):
            adapted = stretched(self.adapter(attention, tokens).flatten(1)) + 1e-12
        return {"attention": attention, "adapted": renormalised(adapted).view_as(attention)}

    def extra_repr(self) -> str:
        return f"count={self.count}"
