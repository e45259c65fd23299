"""Hiding patches and pixels exactly: blanking, attention bias and removal of patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def blank(x: Tensor, keep: Tensor) -> Tensor:
    """Zero (for normalised pixels: the mean colour) where not kept. A boolean selects, because 0 × NaN is NaN."""
    return torch.where(keep, x, x.new_zeros(())) if keep.dtype == torch.bool else x * keep.to(x.dtype)


def attention_bias(keep: Tensor) -> Tensor:
    """[B, N], added to the attention scores: -inf hides exactly; log(keep + 1e-10) hides by weight, differentiably."""
    if keep.dtype == torch.bool:
        return torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -torch.inf)
    weights = keep if keep.dtype == torch.float64 else keep.float()
    return torch.log(weights.clamp_min(0) + 1e-10)


@dataclass(frozen=True)
class VisiblePatches:
    """The patches left after removal: each image's visible ones in raster order, padded to the largest number."""

    index: Tensor  # int64 [B, n], positions in the full grid; hidden patches as padding
    present: Tensor  # bool [B, n], False in the padding
    counts: Tensor  # int64 [B]: visible patches of each image,
    total: int  # of all images
    padded: bool
    patches: int  # N

    @classmethod
    def from_keep(cls, keep: Tensor) -> VisiblePatches:
        counts = keep.sum(dim=1)
        fewest, most, total = torch.stack([counts.min(), counts.max(), counts.sum()]).tolist()  # the only wait
        index = torch.argsort(~keep, dim=1, stable=True)[:, :most]
        present = torch.arange(most, device=keep.device) < counts[:, None]
        return cls(index, present, counts, total, fewest < most, keep.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """[B or 1, N, c] -> [B, n, c]"""
        return x.expand(len(self.index), -1, -1).gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))

    def restore(self, x: Tensor) -> Tensor:
        """[B, n, c] -> [B, N, c], zeros where hidden."""
        full = x.new_zeros(len(x), self.patches, x.shape[-1])
        return full.scatter(1, self.index[..., None].expand_as(x), x)


def check_not_float16(*tensors: Tensor) -> None:
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if torch.float16 in {autocast, *(t.dtype for t in tensors)}:
        raise ValueError("weighted hiding does not work in float16, where 1e-10 underflows; use bfloat16 or float32")
