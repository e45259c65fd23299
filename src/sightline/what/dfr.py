"""DFR (deep feature reweighting): the last layer is refitted on group-balanced data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .probe import Linear, standardize_features

C_GRID = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)  # inverse regularisation strengths to choose from
WEIGHTS = (2.0, 3.0, 10.0, 100.0, 300.0, 1000.0)  # weight of one of two classes; the other has 1


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of the fit, selected on held-out data."""

    c: float
    weights: tuple[float, ...] | None = None  # class weights; None: equal

    def __str__(self) -> str:
        return f"C {self.c:g}" + (f", classes {':'.join(f'{w:g}' for w in self.weights)}" if self.weights else "")


def hyperparameter_grid(classes: int, weigh: bool = True) -> list[Hyperparameters]:
    """Every C; with two classes also every weight of either (Kirichenko et al. 2023, app. B.1)."""
    weights: list[tuple[float, ...] | None] = [None]
    if weigh and classes == 2:
        weights += [pair for w in WEIGHTS for pair in ((w, 1.0), (1.0, w))]
    return [Hyperparameters(c, pair) for pair in weights for c in C_GRID]


def balanced_subset(groups: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Sorted indices: from every group as many as the smallest has, drawn without replacement."""
    present, sizes = np.unique(groups, return_counts=True)
    drawn = [generator.choice(np.flatnonzero(groups == group), sizes.min(), replace=False) for group in present]
    return np.sort(np.concatenate(drawn))


def split_off(groups: np.ndarray, one_in: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Indices to keep and to hold out: one in `one_in` of every group at random, at least one of groups with two."""
    held_out = []
    for group in np.unique(groups):
        members = generator.permutation(np.flatnonzero(groups == group))
        held_out.append(members[: max(len(members) // one_in, int(len(members) > 1))])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(groups)), chosen), chosen


def fit_l1(x: np.ndarray, labels: np.ndarray, classes: int, choice: Hyperparameters, seed: int) -> Linear:
    """L1 logistic regression, one-vs-rest for more than two classes; liblinear penalises the bias too."""
    from sklearn.linear_model import LogisticRegression

    present, coef, intercept = np.unique(labels), [], []
    for positive in present[1:] if len(present) == 2 else present:
        model = LogisticRegression(C=choice.c, solver="liblinear", max_iter=1000, random_state=seed)
        before_1_8 = getattr(model, "penalty", "") == "l2"
        model.set_params(**{"penalty": "l1"} if before_1_8 else {"l1_ratio": 1.0})
        if choice.weights:
            model.set_params(class_weight={False: choice.weights[0], True: choice.weights[1]})
        model.fit(x, labels == positive)
        coef.append(model.coef_[0])
        intercept.append(model.intercept_[0])
    return Linear.of(present, np.stack(coef), np.array(intercept), classes, choice.c)


def average_heads(fits: Sequence[Linear]) -> Linear:
    """The mean of their weights and biases."""
    weight, bias = (np.mean([getattr(fit, name) for fit in fits], axis=0) for name in ("weight", "bias"))
    return replace(fits[0], weight=weight, bias=bias)


def fit_balanced(
    features: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    classes: int,
    choice: Hyperparameters,
    generator: np.random.Generator,
    refits: int = 20,
) -> Linear:
    """The average of `refits` fits to balanced subsets (Kirichenko et al. 2023, sec. 4)."""
    x, mean, std = standardize_features(features)
    subsets = [balanced_subset(groups, generator) for _ in range(refits)]
    seeds = generator.integers(2**31, size=refits).tolist()
    fits = [fit_l1(x[at], labels[at], classes, choice, seed) for at, seed in zip(subsets, seeds, strict=True)]
    return average_heads(fits).on_raw(mean, std)


def select_hyperparameters(
    features: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    classes: int,
    options: Sequence[Hyperparameters],
    score: Callable[[Linear], float],
    generator: np.random.Generator,
) -> tuple[Hyperparameters, dict[Hyperparameters, float]]:
    """The hyperparameters that score best on held-out data after a fit to one balanced subset of these; ties go to the
    first, because if all fail on some group, the strongest penalty would predict nothing at all."""
    x, mean, std = standardize_features(features)
    at, seed = balanced_subset(groups, generator), int(generator.integers(2**31))
    scores = {choice: score(fit_l1(x[at], labels[at], classes, choice, seed).on_raw(mean, std)) for choice in options}
    return max(scores, key=scores.__getitem__), scores
