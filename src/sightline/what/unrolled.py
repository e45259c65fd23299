"""Unrolled logistic regression: a few steps of gradient descent that are differentiable with respect to the
features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LinearHead:
    """Class logits = weight · x + bias, inside the autograd graph."""

    weight: Tensor  # [C, D]
    bias: Tensor  # [C]

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.weight.T + self.bias


def fit_unrolled(
    features: Tensor, labels: Tensor, classes: int, *, steps: int, lr: float | Tensor, ridge: float = 0.0
) -> LinearHead:
    """`steps` of gradient descent from zero on the mean cross-entropy of features [n, D] (A², App. G), plus `ridge` / 2
    · |weight|². With ridge = 1 / (C·n) the minimum is scikit-learn's; for two classes, where that has one row of
    weights, with 2 / (C·n).
    """
    truth = F.one_hot(labels, classes).to(features.dtype)
    weight, bias = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    for _ in range(steps):
        error = ((features @ weight.T + bias).softmax(dim=1) - truth) / len(features)
        weight = weight - lr * (error.T @ features + ridge * weight)
        bias = bias - lr * error.sum(dim=0)
    return LinearHead(weight, bias)


@torch.no_grad()
def safe_learning_rate(features: Tensor, ridge: float = 0.0) -> Tensor:
    """1 / L, the largest step that never overshoots: L bounds the curvature (half the largest second moment)."""
    with_bias = F.pad(features, (0, 1), value=1.0)
    return 1 / (torch.linalg.matrix_norm(with_bias, ord=2).square() / (2 * len(features)) + ridge)


def standardize_by(features: Tensor, by: Tensor) -> Tensor:
    """Standardised with the mean and standard deviation of `by` in every dimension."""
    std = by.var(dim=0, unbiased=False).clamp(min=1e-8).sqrt()
    return (features - by.mean(dim=0)) / std
