"""Stage 2 without padding: the visible tokens of all images one after the other, [n, D] instead of [B, T, D].

Images of a batch rarely show equally many patches. Padded to the longest, most of the work may go into padding, and the
mask that hides it excludes the fastest attention kernels. Packed, every layer but attention works on the visible
tokens alone, and attention runs within each image: on a GPU by the variable-length flash kernel, on a CPU image by
image. The padded form is the reference; both give the same result up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .masking import VisiblePatches

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn = None

HALF = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Packing:
    """Where the tokens of B padded sequences [B, T, D] go when they are packed."""

    index: Tensor  # int64 [n]: positions in the flattened padded sequences
    starts: Tensor  # int32 [B + 1]: the first packed token of each image, and n
    longest: int  # at least the length of the longest sequence
    lengths: tuple[int, ...]  # of the sequences; empty where a kernel reads `starts` instead

    @classmethod
    def of(cls, visible: VisiblePatches, prefix: int) -> Packing:
        """For `prefix` tokens and the visible patches of every image; nothing here waits for the device."""
        present = visible.present
        tokens = F.pad(present, (prefix, 0), value=True)
        n = visible.total + prefix * len(present)
        places = torch.arange(1, n + 1, device=present.device)
        index = torch.searchsorted(tokens.flatten().cumsum(dim=0), places)
        lengths = visible.counts + prefix
        starts = F.pad(lengths.cumsum(dim=0), (1, 0)).int()
        # The longest possible, so that it is the same for every batch: compiled code and the kernel depend on it.
        return cls(index, starts, prefix + visible.patches, () if present.is_cuda else tuple(lengths.tolist()))

    @property
    def kernel(self) -> str:
        return "image by image" if self.lengths else "variable-length flash attention"

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, c] -> [n, c]"""
        return x.flatten(0, 1).index_select(0, self.index)

    def unpack(self, x: Tensor, shape: torch.Size) -> Tensor:
        """[n, D] -> `shape` [B, T, D], zeros in the padding."""
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self.index, x).view(shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of packed [n, heads, D/heads] within each image."""
        if not self.lengths:
            assert varlen_attn is not None
            attended = varlen_attn(q, k, v, self.starts, self.starts, self.longest, self.longest)
            return cast(Tensor, attended)  # a tuple only where the sums are asked for
        batches = (x.transpose(0, 1)[None] for x in (q, k, v))  # of one image: without a batch there is no fused kernel
        images = zip(*(x.split(self.lengths, dim=2) for x in batches), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*each) for each in images], dim=2)[0].transpose(0, 1)


def can_pack(x: Tensor, dtype: torch.dtype, head: int) -> bool:
    """Whether packed attention is available and faster, for tokens on this device, in this dtype, with heads of this
    width. On a CPU in training the padded form stays, so that results do not depend on the version."""
    if x.is_cuda:
        return varlen_attn is not None and dtype in HALF and head % 8 == 0 and head <= 256
    return x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
