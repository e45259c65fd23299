"""DFR: the last layer fitted again, to groups of equal size, so that nothing is gained by telling groups apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .probe import Linear, standardised

STRENGTHS = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)  # of C, the inverse of the penalty
WEIGHTS = (2.0, 3.0, 10.0, 100.0, 300.0, 1000.0)  # of one of two classes, the other's being 1


@dataclass(frozen=True)
class Choice:
    """What the fit depends on besides the data."""

    c: float
    weights: tuple[float, ...] | None = None  # of the classes; None: alike

    def __str__(self) -> str:
        return f"C {self.c:g}" + (f", classes {':'.join(f'{w:g}' for w in self.weights)}" if self.weights else "")


def choices(classes: int, weigh: bool = True) -> list[Choice]:
    """Every C; with two classes also every weight of either (Kirichenko et al. 2023, app. B.1)."""
    weights: list[tuple[float, ...] | None] = [None]
    if weigh and classes == 2:
        weights += [pair for w in WEIGHTS for pair in ((w, 1.0), (1.0, w))]
    return [Choice(c, pair) for pair in weights for c in STRENGTHS]


def balanced_subset(groups: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Places, in order: of every group that is there as many as the smallest has, drawn without replacement."""
    present, sizes = np.unique(groups, return_counts=True)
    drawn = [generator.choice(np.flatnonzero(groups == group), sizes.min(), replace=False) for group in present]
    return np.sort(np.concatenate(drawn))


def set_aside(groups: np.ndarray, one_in: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Places to keep, and `one_in` so many to set aside: at random, but of every group that has two at least one."""
    aside = []
    for group in np.unique(groups):
        members = generator.permutation(np.flatnonzero(groups == group))
        aside.append(members[: max(len(members) // one_in, int(len(members) > 1))])
    chosen = np.sort(np.concatenate(aside))
    return np.setdiff1d(np.arange(len(groups)), chosen), chosen


def fit_l1(x: np.ndarray, labels: np.ndarray, classes: int, choice: Choice, seed: int) -> Linear:
    """Logistic regression with the sum of absolute weights as its penalty; several classes are fitted one against the
    rest. As scikit-learn's liblinear does it, which penalises the bias too."""
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


def average(fits: Sequence[Linear]) -> Linear:
    """The mean of their weights and biases."""
    weight, bias = (np.mean([getattr(fit, name) for fit in fits], axis=0) for name in ("weight", "bias"))
    return replace(fits[0], weight=weight, bias=bias)


def refit(
    features: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    classes: int,
    choice: Choice,
    generator: np.random.Generator,
    refits: int = 20,
) -> Linear:
    """Fits to as many balanced subsets, averaged (Kirichenko et al. 2023, sec. 4)."""
    x, mean, std = standardised(features)
    subsets = [balanced_subset(groups, generator) for _ in range(refits)]
    seeds = generator.integers(2**31, size=refits).tolist()
    fits = [fit_l1(x[at], labels[at], classes, choice, seed) for at, seed in zip(subsets, seeds, strict=True)]
    return average(fits).on_raw(mean, std)


def tune(
    features: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    classes: int,
    options: Sequence[Choice],
    score: Callable[[Linear], float],
    generator: np.random.Generator,
) -> tuple[Choice, dict[Choice, float]]:
    """The choice that scores best on other data when fitted to one balanced subset of these, and the first of equals:
    where every one fails some group, the strongest penalty would be no answer at all."""
    x, mean, std = standardised(features)
    at, seed = balanced_subset(groups, generator), int(generator.integers(2**31))
    scores = {choice: score(fit_l1(x[at], labels[at], classes, choice, seed).on_raw(mean, std)) for choice in options}
    return max(scores, key=scores.__getitem__), scores
