"""Attentive pooling: learned queries pool all patch tokens of a ViT (AIM, EP)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..training.distributed import sum_over_processes

MOMENTUM = 0.1


class BatchStandardize(nn.Module):
    """Batch norm without affine parameters: zero mean and unit variance per channel, over the batch of all processes in
    training."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            flat = tokens.flatten(0, 1).double()
            sums = torch.stack([flat.sum(dim=0), flat.square().sum(dim=0), torch.full_like(flat[0], len(flat))])
            sums = sum_over_processes(sums)
            mean, square = sums[:2] / sums[2]
            mean, variance = mean.to(tokens.dtype), (square - mean.square()).clamp(min=0).to(tokens.dtype)
            self.mean.lerp_(mean, MOMENTUM)
            self.variance.lerp_(variance, MOMENTUM)
        return (tokens - mean) / (variance + self.eps).sqrt()


class AimPool(nn.Module):
    """Attention of one learned query to standardised tokens (El-Nouby et al. 2024, sec. 4.2)."""

    def __init__(self, width: int, heads: int = 12):
        super().__init__()
        self.heads = heads
        self.norm = BatchStandardize(width)
        self.query = nn.Parameter(torch.empty(width))
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.trunc_normal_(self.query, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled tokens [B, D], and the attention of each head [B, heads, N]."""
        tokens = self.norm(tokens)
        keys, values = (f(tokens).unflatten(2, (self.heads, -1)) for f in (self.key, self.value))
        query = self.query.view(self.heads, -1) * keys.shape[-1] ** -0.5
        attention = torch.einsum("bnhd,hd->bhn", keys, query).softmax(dim=2)
        return torch.einsum("bhn,bnhd->bhd", attention, values).flatten(1), attention


class EpPool(nn.Module):
    """Efficient probing (EP): learned queries attend to the tokens directly, and each pools its own channels."""

    def __init__(self, width: int, queries: int = 32):
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.value, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        nn.init.trunc_normal_(self.query, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled tokens [B, D], and the attention of each query [B, queries, N]."""
        scores = torch.einsum("bnd,qd->bqn", tokens, self.query) * tokens.shape[2] ** -0.5
        attention = scores.softmax(dim=2)
        values = self.value(tokens).unflatten(2, (len(self.query), -1))
        return self.norm(torch.einsum("bqn,bnqd->bqd", attention, values).flatten(1)), attention
