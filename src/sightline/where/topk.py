"""The k best of several scores, chosen so that a gradient can say which scores should have been higher.

A choice has no gradient. Its mean under noise does: P(s) = E[top-k of s + σZ], which is smooth in the scores s.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 [..., k]: where the k highest of [..., d] are, in order of place; the first of equals is taken."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(dim=-1).values


def perturbed_top_k(
    scores: Tensor, k: int, *, sigma: float, draws: int, generator: torch.Generator, control: bool = True
) -> Tensor:
    """[B, k, d] from [B, d]: how often each score is the first, ..., the k-th by place among the k best under noise.

    Forward and gradient as in differentiable patch selection (Cordonnier et al. 2021), with the outer product of choice
    and noise, which their code replaces by an elementwise one. `control` centres the choices, which takes noise out of
    the gradient and adds no bias. `generator` must live where the scores do.
    """
    if draws < 1 + control:
        raise ValueError(f"{draws} draws are too few: a gradient needs {1 + control}")
    noise = torch.randn(
        len(scores), draws, scores.shape[1], generator=generator, device=scores.device, dtype=scores.dtype
    )
    return _Perturbed.apply(scores, noise, k, sigma, control)


class _Perturbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, noise: Tensor, k: int, sigma: float, control: bool) -> Tensor:
        noisy = torch.add(scores[:, None], noise, alpha=sigma)
        chosen = noisy.topk(k, dim=2, sorted=False).indices.sort(dim=2).values.mT  # [B, k, draws]
        ctx.save_for_backward(noise, chosen)
        ctx.sigma, ctx.control = sigma, control
        counts = scores.new_zeros(len(scores), k, scores.shape[1])
        return counts.scatter_add_(2, chosen, torch.ones_like(chosen, dtype=scores.dtype)) / noise.shape[1]

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        noise, chosen = ctx.saved_tensors
        worth = gradients[0].gather(2, chosen).sum(dim=1)  # [B, draws]: of each draw's whole choice
        draws = noise.shape[1]
        if ctx.control:  # a sample covariance: their own mean takes one draw's worth of freedom
            worth, draws = worth - worth.mean(dim=1, keepdim=True), draws - 1
        return torch.einsum("bn,bnd->bd", worth, noise) / (ctx.sigma * draws), None, None, None, None
