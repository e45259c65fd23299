"""Taking hidden content out of the way, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def blank(x: Tensor, keep: Tensor) -> Tensor:
    """Zero (for normalised pixels: the mean colour) where not kept. Booleans select, because 0 × NaN is NaN."""
    return torch.where(keep, x, x.new_zeros(())) if keep.dtype == torch.bool else x * keep.to(x.dtype)


def scores_of(keep: Tensor) -> Tensor:
    """[B, N], to be added to attention scores: -inf hides exactly; log(keep + 1e-10) hides by weight."""
    if keep.dtype == torch.bool:
        return torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -torch.inf)
    weights = keep if keep.dtype == torch.float64 else keep.float()
    return torch.log(weights.clamp_min(0) + 1e-10)


@dataclass(frozen=True)
class Visible:
    """The patches left after removal: each image's visible ones in raster order, padded to the longest row."""

    index: Tensor  # int64 [B, n], positions in the full grid; in the padding, of hidden patches
    present: Tensor  # bool [B, n], False in the padding
    padded: bool
    patches: int  # N

    @classmethod
    def among(cls, keep: Tensor) -> Visible:
        counts = keep.sum(dim=1)
        fewest, most = torch.stack([counts.min(), counts.max()]).tolist()
        index = torch.argsort(~keep, dim=1, stable=True)[:, :most]
        present = torch.arange(most, device=keep.device) < counts[:, None]
        return cls(index, present, fewest < most, keep.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """[B or 1, N, c] -> [B, n, c]"""
        return x.expand(len(self.index), -1, -1).gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))

    def restore(self, x: Tensor) -> Tensor:
        """[B, n, c] -> [B, N, c], zeros where hidden."""
        full = x.new_zeros(len(x), self.patches, x.shape[-1])
        return full.scatter(1, self.index[..., None].expand_as(x), x)


def check_half_precision(*tensors: Tensor) -> None:
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if torch.float16 in {autocast, *(t.dtype for t in tensors)}:
        raise ValueError("weighted hiding does not work in float16 (1e-10 underflows there): use bfloat16 or float32")
