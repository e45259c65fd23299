"""Logistic regression on frozen features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of C, the inverse of the penalty


@dataclass(frozen=True)
class Linear:
    """Class scores = weight · x + bias, for raw features, whatever was done to them while fitting."""

    weight: np.ndarray  # float64 [C, D]
    bias: np.ndarray  # float64 [C]
    c: float
    standardized: bool

    def logits(self, features: np.ndarray) -> np.ndarray:
        return (features @ self.weight.T + self.bias).astype(np.float32)


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, *, c: float = 1.0, standardize: bool
) -> Linear:
    """Multinomial, L2, to convergence: scikit-learn's usual 100 steps stop short on raw features."""
    from sklearn.linear_model import LogisticRegression

    features = features.astype(np.float64)
    mean, std = np.zeros(features.shape[1]), np.ones(features.shape[1])
    if standardize:
        mean, std = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-12)
    model = LogisticRegression(C=c, max_iter=10_000).fit((features - mean) / std, labels)
    weight, bias = np.zeros((classes, features.shape[1])), np.full(classes, -np.inf)
    if len(model.classes_) == 2:  # one row of coefficients: the log odds of the second class
        weight[model.classes_[1]], bias[model.classes_[0]] = model.coef_[0], 0.0
        bias[model.classes_[1]] = model.intercept_[0]
    else:
        weight[model.classes_], bias[model.classes_] = model.coef_, model.intercept_
    bias[np.isinf(bias)] = bias[np.isfinite(bias)].min() - 1e4  # classes without an example are never the answer
    return Linear(weight / std, bias - (weight / std) @ mean, c, standardize)


def tune_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, score: Callable[[Linear], float]
) -> tuple[Linear, dict[float, float]]:
    """Standardised, with the C that scores best on validation data (the stronger penalty where they tie)."""
    fitted = {c: fit_logistic(features, labels, classes, c=c, standardize=True) for c in STRENGTHS}
    scores = {c: score(linear) for c, linear in fitted.items()}
    best = max(scores, key=lambda c: (scores[c], -c))
    return fitted[best], scores
