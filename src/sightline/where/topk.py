"""Differentiable top-k: the expected choice under noise, P(s) = E[top-k of s + σZ], which is smooth in the scores s."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 [..., k]: the indices of the k highest of [..., d], in ascending order; ties go to the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(dim=-1).values


def perturbed_top_k(
    scores: Tensor, k: int, *, sigma: float, draws: int, generator: torch.Generator, control: bool = True
) -> Tensor:
    """[B, k, d] from [B, d]: how often each index is the first, ..., the k-th of the sorted top-k under noise.

    Forward and gradient as in differentiable patch selection (Cordonnier et al. 2021), with the outer product of choice
    and noise, which their code replaces by an elementwise one. `control` centres the choices (a control variate: less
    variance, no bias). `generator` must be on the device of the scores.
    """
    if draws < 1 + control:
        raise ValueError(f"{draws} draws are too few; a gradient needs {1 + control}")
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
        values = gradients[0].gather(2, chosen).sum(dim=1)  # [B, draws]: of each draw's choice
        draws = noise.shape[1]
        if ctx.control:  # a sample covariance, hence one degree of freedom less
            values, draws = values - values.mean(dim=1, keepdim=True), draws - 1
        return torch.einsum("bn,bnd->bd", values, noise) / (ctx.sigma * draws), None, None, None, None
