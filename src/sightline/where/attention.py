"""The attention of a ViT's CLS token as the selector (A²)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..sight import Sight
from ..vit.model import ViT

Heads = Literal["mean", "entropy", "lowest", "max"] | int  # how heads are aggregated; or the number of a single head
AGGREGATES = ("mean", "entropy", "lowest", "max")


def cls_attention_map(vit: ViT, images: Tensor, layer: int = -1, heads: Heads = "mean") -> Tensor:
    """[B, H, W], each summing to 1: CLS attention (A², sec. 3), softmax over all tokens, then heads aggregated, then
    renormalised over patches."""
    out = vit(images, cls_attention=[layer])
    per_head = out.cls_attention[:, 0, :, vit.prefix :]
    return normalize_sum(aggregate_heads(per_head, heads)).unflatten(1, out.grid)


def aggregate_heads(per_head: Tensor, heads: Heads = "mean") -> Tensor:
    """[B, heads, N] -> [B, N]: A² (App., head aggregators), not yet summing to 1.

    `entropy` weights a head by 1 - H / ln N, `lowest` averages the quarter of the heads with the lowest entropy H in
    each image, `max` takes the maximum over heads at every patch.
    """
    if isinstance(heads, int):
        if not 0 <= heads < per_head.shape[1]:
            raise ValueError(f"there are {per_head.shape[1]} heads, so no head {heads}")
        return per_head[:, heads]
    if heads == "mean":
        return per_head.mean(dim=1)
    if heads == "max":
        return per_head.amax(dim=1)
    entropy = torch.special.entr(normalize_sum(per_head)).sum(dim=2) / math.log(max(2, per_head.shape[2]))  # [B, heads]
    if heads == "entropy":
        weights = (1 - entropy).clamp(min=1e-6)  # equal weights if all heads are uniform
        return (per_head * normalize_sum(weights)[..., None]).sum(dim=1)
    if heads == "lowest":
        count = max(1, per_head.shape[1] // 4)
        chosen = entropy.argsort(dim=1, stable=True)[:, :count, None].expand(-1, -1, per_head.shape[2])
        return per_head.gather(1, chosen).mean(dim=1)
    raise ValueError(f"unknown head aggregation {heads!r}: choose {', '.join(AGGREGATES)} or the number of a head")


def normalize_sum(x: Tensor) -> Tensor:
    """Divided by its sum over the last dimension."""
    return x / x.sum(dim=-1, keepdim=True)


def min_max_scale(x: Tensor, dim: tuple[int, ...], eps: float | None = None) -> Tensor:
    """Scaled to [0, 1] over the dimensions `dim`, with the gradient of both ends; zeros where all values are equal."""
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    return (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny ** 0.5 if eps is None else eps)


def attention_maps_and_shares(
    vit: ViT, images: Tensor, layers: Sequence[int], heads: Sequence[Heads]
) -> tuple[Tensor, Tensor]:
    """In one forward pass: maps [B, layers, heads, H, W], as `cls_attention_map` computes them; and [B, blocks, 3], the
    shares of the CLS attention on patches, on registers and on CLS itself (A², sec. 5)."""
    out = vit(images, cls_attention=range(vit.config.depth))
    patches = out.cls_attention[..., vit.prefix :]
    maps = [torch.stack([aggregate_heads(patches[:, layer], each) for each in heads], dim=1) for layer in layers]
    mean = out.cls_attention.mean(dim=2)
    itself, registers, rest = mean.split([1, vit.prefix - 1, mean.shape[2] - vit.prefix], dim=2)
    shares = torch.stack([rest.sum(dim=2), registers.sum(dim=2), itself[:, :, 0]], dim=2)
    return normalize_sum(torch.stack(maps, dim=1)).unflatten(3, out.grid), shares


class AttentionSight(nn.Module):
    """Keeps the `share` of patches with the highest CLS attention."""

    def __init__(self, vit: ViT, share: float = 0.25, layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.share, self.layer, self.heads = vit, share, layer, heads

    def look(self, images: Tensor) -> Sight:
        return Sight(keep=keep_highest(self.maps(images)["attention"], self.share))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images, self.layer, self.heads)}

    def extra_repr(self) -> str:
        return f"share={self.share}, layer={self.layer}, heads={self.heads}"


def keep_highest(maps: Tensor, share: float) -> Tensor:
    """bool [B, H, W]: the patches with the highest values, a `share` of all and at least one."""
    flat = maps.flatten(1)
    best = flat.topk(max(1, round(share * flat.shape[1])), dim=1).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter(1, best, True).view_as(maps)
