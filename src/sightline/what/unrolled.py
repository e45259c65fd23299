"""Logistic regression as a few plain steps that a gradient can go back through, to whatever made the features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """Class scores = weight · x + bias; part of the graph."""

    weight: Tensor  # [C, D]
    bias: Tensor  # [C]

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.weight.T + self.bias


def fit_unrolled(
    features: Tensor, labels: Tensor, classes: int, *, steps: int, rate: float | Tensor, ridge: float = 0.0
) -> Head:
    """From zero, `steps` of gradient descent on the mean cross-entropy of [n, D] features (A², App. G).

    `ridge` / 2 · |weight|² may be added. With 1 / (C·n) the solution is scikit-learn's; for two classes, which it
    gives one row of weights, with 2 / (C·n).
    """
    truth = F.one_hot(labels, classes).to(features.dtype)
    weight, bias = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    for _ in range(steps):
        error = ((features @ weight.T + bias).softmax(dim=1) - truth) / len(features)
        weight = weight - rate * (error.T @ features + ridge * weight)
        bias = bias - rate * error.sum(dim=0)
    return Head(weight, bias)


@torch.no_grad()
def sure_rate(features: Tensor, ridge: float = 0.0) -> Tensor:
    """The longest step that never overshoots: 1 / L, where L bounds the curvature (half the largest second moment)."""
    with_bias = F.pad(features, (0, 1), value=1.0)
    return 1 / (torch.linalg.matrix_norm(with_bias, ord=2).square() / (2 * len(features)) + ridge)


def standardised(features: Tensor, by: Tensor) -> Tensor:
    """With the mean and the spread that `by` has in every dimension."""
    spread = by.var(dim=0, unbiased=False).clamp(min=1e-8).sqrt()
    return (features - by.mean(dim=0)) / spread
