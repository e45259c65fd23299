"""Learned queries that pool the patch tokens of a ViT (AIM, EP): all of them, so that nothing is hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..training.distributed import over_processes

MOMENTUM = 0.1


class Standardised(nn.Module):
    """Tokens of mean 0 and variance 1 in every channel: of the whole batch, whoever shares it, while learning."""

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
            sums = over_processes(sums)
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
        self.norm = Standardised(width)
        self.query = nn.Parameter(torch.empty(width))
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.trunc_normal_(self.query, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, D], and what each head attends to: [B, heads, N]."""
        tokens = self.norm(tokens)
        keys, values = (f(tokens).unflatten(2, (self.heads, -1)) for f in (self.key, self.value))
        query = self.query.view(self.heads, -1) * keys.shape[-1] ** -0.5
        attention = torch.einsum("bnhd,hd->bhn", keys, query).softmax(dim=2)
        return torch.einsum("bhn,bnhd->bhd", attention, values).flatten(1), attention


class EpPool(nn.Module):
    """Learned queries attend to the tokens themselves; each pools channels of its own (EP)."""

    def __init__(self, width: int, queries: int = 32):
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.value, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        nn.init.trunc_normal_(self.query, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, D], and what each query attends to: [B, queries, N]."""
        scores = torch.einsum("bnd,qd->bqn", tokens, self.query) * tokens.shape[2] ** -0.5
        attention = scores.softmax(dim=2)
        values = self.value(tokens).unflatten(2, (len(self.query), -1))
        return self.norm(torch.einsum("bqn,bnqd->bqd", attention, values).flatten(1)), attention
