"""A ViT's own attention as the answer to where to look (A²)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..sight import Sight
from ..vit import ViT


def cls_attention_map(vit: ViT, images: Tensor, layer: int = -1) -> Tensor:
    """[B, H, W], each summing to 1: A² (sec. 3). Softmax over all tokens, heads averaged, patches renormalised."""
    out = vit(images, cls_attention=[layer])
    patches = out.cls_attention[:, 0].mean(dim=1)[:, vit.prefix :]
    return (patches / patches.sum(dim=1, keepdim=True)).unflatten(1, out.grid)


class AttentionSight(nn.Module):
    """Keeps the `share` of patches that CLS attends to most."""

    def __init__(self, vit: ViT, share: float = 0.25, layer: int = -1):
        super().__init__()
        self.vit, self.share, self.layer = vit, share, layer

    def look(self, images: Tensor) -> Sight:
        attention = cls_attention_map(self.vit, images, self.layer)
        flat = attention.flatten(1)
        best = flat.topk(max(1, round(self.share * flat.shape[1])), dim=1).indices
        keep = torch.zeros_like(flat, dtype=torch.bool).scatter(1, best, True)
        return Sight(keep=keep.view_as(attention))

    def extra_repr(self) -> str:
        return f"share={self.share}, layer={self.layer}"

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": cls_attention_map(self.vit, images, self.layer)}
