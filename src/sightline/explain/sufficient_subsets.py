"""Sufficient input subsets: pixels that alone make a model confident of a label. They exist for almost any label.

Batched gradient SIS (Carter et al. 2021): pixels are removed step by step, first those whose removal raises the
probability of the label most; the smallest set on the way with sufficient confidence is the subset. Because subsets
exist for random labels too, finding one explains nothing (RobustViT, appendix on SIS).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import sight_for_prediction
from ..sight import Method
from .estimates import bootstrap_mean

NOISE = 1e-12  # breaks ties


@dataclass(frozen=True, eq=False)
class FoundSubsets:
    """For B images, each with one target label."""

    reached: Tensor  # bool [B]: whether there is a sufficient subset
    share: Tensor  # [B]: of the pixels; 0 if there is none
    visible: Tensor  # bool [B, h, w]: the subset; empty if there is none


def find_sufficient_subsets(
    method: Method,
    images: Tensor,
    masks: Tensor | None,
    targets: Tensor,
    mean: Sequence[float],
    *,
    confidence: float = 0.9,
    steps: int = 100,
    seed: int = 0,
) -> FoundSubsets:
    """Removed pixels take the mean colour, which is 0 after normalisation.

    Pixels are ranked by the gradient of the log probability: the same order as by the gradient of the probability,
    but it does not vanish while the label is very unlikely.
    """
    (B, _, h, w), device = images.shape, images.device
    generator = torch.Generator(device).manual_seed(seed)
    mean_colour = images.new_tensor(mean).view(3, 1, 1)
    per_step = math.ceil(h * w / steps)
    taken = math.ceil(h * w / per_step)
    visible, probabilities = torch.ones(B, h * w, device=device), []
    removed_at = torch.full((B, h * w), taken, device=device)
    for step in range(taken):
        weights = visible.clone().requires_grad_()
        with torch.enable_grad():
            seen = mean_colour + (images - mean_colour) * weights.view(B, 1, h, w)
            with torch.no_grad():
                sight = sight_for_prediction(method, seen, masks)
            logits = method.judge(seen, sight).logits.float()
            log_probability = logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
            if not log_probability.requires_grad:
                name = type(method).__name__
                raise UserError(f"{name}: its prediction has no gradient, which the search for subsets needs")
            (gradient,) = torch.autograd.grad(log_probability.sum(), weights)
        probabilities.append(log_probability.detach().exp())
        gain = -gradient + NOISE * torch.randn(gradient.shape, generator=generator, device=device)
        count = min(per_step, h * w - step * per_step)
        removed = gain.masked_fill(visible == 0, -torch.inf).topk(count, dim=1).indices
        visible.scatter_(1, removed, 0.0)
        removed_at.scatter_(1, removed, step)
    confident = torch.stack(probabilities) >= confidence  # [steps, B]
    last = taken - 1 - confident.flip(0).int().argmax(dim=0)
    reached = confident.any(dim=0)
    subset = (removed_at >= last[:, None]) & reached[:, None]
    return FoundSubsets(reached, subset.float().mean(dim=1), subset.view(B, h, w))


def random_other_labels(index: int, own: int, classes: int, count: int, seed: int) -> np.ndarray:
    """Random labels other than the image's own prediction."""
    others = np.delete(np.arange(classes), own)
    return np.random.default_rng([seed, 7, index]).permutation(others)[:count]


@dataclass(frozen=True)
class Subsets:
    """How often a sufficient subset exists, and its size: for random labels, and for the model's own prediction."""

    n: int  # images
    labels: int  # random labels per image
    confidence: float
    steps: int
    reached: Estimate
    size: Estimate | None  # of the subsets found, as a share of the pixels
    own_reached: Estimate
    own_size: Estimate | None

    @property
    def explains_nothing(self) -> bool:
        return self.reached.low > 0.5

    @property
    def sentence(self) -> str:
        confident = f"{100 * self.confidence:.0f} % confident of a random label"
        if self.size is None:
            return f"No pixel subset makes the model {confident} (n = {self.n} images)."
        if self.explains_nothing:
            verdict = "finding a sufficient subset explains nothing"
        elif self.reached.high < 0.5:
            verdict = "fewer than half of the cases"
        else:
            verdict = "too few images to say whether in more than half of the cases"
        return (
            f"A pixel subset ({self.size.value_text} of the pixels on average) makes the model {confident} in "
            f"{self.reached.value_text} {self.reached.interval} of cases ({self.n} images × {self.labels} labels): "
            f"{verdict}. For its own predictions: {self.own_reached.value_text} {self.own_reached.interval}."
        )


def summarize(reached: np.ndarray, share: np.ndarray, confidence: float, steps: int) -> Subsets:
    """From columns [n, 1 + labels]: the model's own prediction first, then the random labels."""

    def size(flags: np.ndarray, shares: np.ndarray) -> Estimate | None:
        counts = flags.sum(axis=1)
        mean = (shares * flags).sum(axis=1)[counts > 0] / counts[counts > 0]
        return bootstrap_mean(mean) if len(mean) else None

    return Subsets(
        len(reached), reached.shape[1] - 1, confidence, steps,
        bootstrap_mean(reached[:, 1:].mean(axis=1)), size(reached[:, 1:], share[:, 1:]),
        bootstrap_mean(reached[:, 0].astype(np.float64)), size(reached[:, :1], share[:, :1]),
    )  # fmt: skip
