"""The parts of a Vision Transformer: patch embedding, blocks and attention.

A block works on padded tokens [B, T, D], with a bias of the attention scores where some are hidden, or on packed ones
[n, D], the tokens of all images one after the other (see `packing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear, linear
from .packing import Packing
from .positions import Rotary, rotate

if TYPE_CHECKING:
    from .config import ViTConfig

Captured = dict[str, Tensor]  # the requested values of one block's attention


class PatchEmbed(nn.Module):
    """A linear map of each patch's pixels, stored as the convolution of published files."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        p = config.patch
        self.proj = nn.Conv2d(3, config.width, p, p, bias=config.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        return linear(pixels.to(self.proj.weight.dtype), self.proj.weight.flatten(1), self.proj.bias)


class Block(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        D, scale = config.width, config.layer_scale
        self.norm1 = nn.LayerNorm(D, config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = LayerScale(D, scale) if scale is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(D, config.norm_eps)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.ls2 = LayerScale(D, scale) if scale is not None else nn.Identity()

    def forward(
        self, x: Tensor, bias: Tensor | None, rotary: Rotary | None, requested: set[str], packing: Packing | None = None
    ) -> tuple[Tensor, Captured]:
        attended, captured = self.attn(self.norm1(x), bias, rotary, requested, packing)
        x = x + self.ls1(attended)
        return x + self.ls2(self.mlp(self.norm2(x))), captured


class Attention(nn.Module):
    bias_mask: Tensor | None

    def __init__(self, config: ViTConfig):
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.scale = (D // config.heads) ** -0.5
        self.qkv = Linear(D, 3 * D, bias=config.qkv_bias != "none")
        self.proj = Linear(D, D)
        # With rotary embeddings a key bias has an effect, so where DINOv3 has none it must stay zero in training.
        mask = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(D) if config.qkv_bias == "no_key" else None
        self.register_buffer("bias_mask", mask, persistent=False)

    def forward(
        self, x: Tensor, bias: Tensor | None, rotary: Rotary | None, requested: set[str], packing: Packing | None = None
    ) -> tuple[Tensor, Captured]:
        qkv_bias = self.qkv.bias if self.bias_mask is None else self.qkv.bias * self.bias_mask
        qkv = linear(x, self.qkv.weight, qkv_bias)
        if packing is not None:
            q, k, v = qkv.unflatten(1, (3, self.heads, -1)).unbind(dim=1)
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
            return self.proj(packing.attend(q, k, v).flatten(1)), {}
        q, k, v = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        bias = None if bias is None else bias.to(q.dtype)
        captured = {}
        if "keys" in requested:
            captured["keys"] = k
        if "cls_attention" in requested:
            captured["cls_attention"] = self._weights(q[:, :, :1], k, bias)
        if "attention" in requested:
            captured["attention"] = self._weights(q, k, bias)
            x = captured["attention"].to(v.dtype) @ v
        elif bias is not None and bias.requires_grad and x.is_cuda:
            x = F.scaled_dot_product_attention(*with_key_bias(q, k, bias, self.scale), v, scale=self.scale)
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        return self.proj(x.transpose(1, 2).flatten(2)), captured

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        return (scores if bias is None else scores + bias).softmax(dim=-1)


def with_key_bias(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys whose scaled products include the bias [B, 1, 1, T] of the keys, as one more channel (eight, for
    the alignment of kernels): as a mask, its gradient would have the size of all scores, [B, heads, T, T]."""
    channel = F.pad(bias.transpose(2, 3).to(k.dtype), (0, 7)).expand(-1, k.shape[1], -1, -1)
    one = F.pad(q.new_full((*q.shape[:3], 1), 1 / scale), (0, 7))
    return torch.cat([q, one], dim=3), torch.cat([k, channel], dim=3)


class MLP(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.quick = config.mlp == "quick_gelu"
        self.fc1 = Linear(config.width, hidden)
        self.fc2 = Linear(hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x) if self.quick else F.gelu(x))


class SwiGLU(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.fc1 = Linear(config.width, 2 * hidden)  # the gate, then the value
        self.fc2 = Linear(hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


class LayerScale(nn.Module):
    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
