"""A ViT's own attention as the answer to where to look (A²)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..sight import Sight
from ..vit.model import ViT

Heads = Literal["mean", "entropy", "lowest", "max"] | int  # how heads become one map; or one head, counted from 0
AGGREGATES = ("mean", "entropy", "lowest", "max")


def cls_attention_map(
    vit: ViT, images: Tensor, layer: int = -1, heads: Heads = "mean", *, lowest: int | None = None, each: bool = False
) -> Tensor:
    """[B, H, W], each summing to 1: A² (sec. 3). Softmax over all tokens, heads joined, patches renormalised.

    `each` renormalises every head before they are joined, which weighs them alike however little of the attention is
    on patches. `lowest` is the number of heads that the aggregate of that name keeps.
    """
    out = vit(images, cls_attention=[layer])
    per_head = out.cls_attention[:, 0, :, vit.prefix :]
    return renormalised(joined(renormalised(per_head) if each else per_head, heads, lowest)).unflatten(1, out.grid)


def joined(per_head: Tensor, heads: Heads = "mean", lowest: int | None = None) -> Tensor:
    """[B, heads, N] -> [B, N]: A² (App., head aggregators), not yet summing to 1.

    `entropy` weighs a head by 1 - H / ln N, `lowest` averages those of lowest entropy H in each image (a quarter of
    them, as in the paper, unless told), `max` takes the strongest at every patch.
    """
    if isinstance(heads, int):
        if not 0 <= heads < per_head.shape[1]:
            raise ValueError(f"there are {per_head.shape[1]} heads, so no head {heads}")
        return per_head[:, heads]
    if heads == "mean":
        return per_head.mean(dim=1)
    if heads == "max":
        return per_head.amax(dim=1)
    entropy = torch.special.entr(renormalised(per_head)).sum(dim=2) / math.log(max(2, per_head.shape[2]))  # [B, heads]
    if heads == "entropy":
        weights = (1 - entropy).clamp(min=1e-6)  # heads that are all uniform count alike
        return (per_head * renormalised(weights)[..., None]).sum(dim=1)
    if heads == "lowest":
        count = lowest or max(1, per_head.shape[1] // 4)
        chosen = entropy.argsort(dim=1, stable=True)[:, :count, None].expand(-1, -1, per_head.shape[2])
        return per_head.gather(1, chosen).mean(dim=1)
    raise ValueError(f"no way of joining heads is called {heads!r}: choose {', '.join(AGGREGATES)}, or a head's number")


def renormalised(x: Tensor) -> Tensor:
    return x / x.sum(dim=-1, keepdim=True)


def cls_attention_shares(vit: ViT, images: Tensor) -> Tensor:
    """[B, blocks, 3]: how much of CLS's attention goes to patches, to registers and to CLS itself (A², sec. 5)."""
    return _shares(vit, vit(images, cls_attention=range(vit.config.depth)).cls_attention)


def maps_and_shares(vit: ViT, images: Tensor, layers: Sequence[int], heads: Sequence[Heads]) -> tuple[Tensor, Tensor]:
    """From one pass, [B, layers, heads, H, W] as `cls_attention_map` has them, and `cls_attention_shares`."""
    out = vit(images, cls_attention=range(vit.config.depth))
    patches = out.cls_attention[..., vit.prefix :]
    maps = [torch.stack([joined(patches[:, layer], each) for each in heads], dim=1) for layer in layers]
    return renormalised(torch.stack(maps, dim=1)).unflatten(3, out.grid), _shares(vit, out.cls_attention)


def _shares(vit: ViT, cls_attention: Tensor) -> Tensor:
    attention = cls_attention.mean(dim=2)
    itself, registers, patches = attention.split([1, vit.prefix - 1, attention.shape[2] - vit.prefix], dim=2)
    return torch.stack([patches.sum(dim=2), registers.sum(dim=2), itself[:, :, 0]], dim=2)


class AttentionSight(nn.Module):
    """Keeps the `share` of patches that CLS attends to most."""

    def __init__(self, vit: ViT, share: float = 0.25, layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.share, self.layer, self.heads = vit, share, layer, heads

    def look(self, images: Tensor) -> Sight:
        attention = cls_attention_map(self.vit, images, self.layer, self.heads)
        flat = attention.flatten(1)
        best = flat.topk(max(1, round(self.share * flat.shape[1])), dim=1).indices
        keep = torch.zeros_like(flat, dtype=torch.bool).scatter(1, best, True)
        return Sight(keep=keep.view_as(attention))

    def extra_repr(self) -> str:
        return f"share={self.share}, layer={self.layer}, heads={self.heads}"

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images, self.layer, self.heads)}
