"""Sufficient input subsets: pixels that are enough to make a model sure. They can be found for any label.

Pixels go, step by step, those first whose going raises the probability of a label most; the smallest set on the way
that still makes the model sure is called sufficient (Carter et al. 2021, by batched gradients). Since there is one for
labels drawn at random, too, to have found one explains nothing (RobustViT, App. on SIS).
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
from .perturbation import mean_over

NOISE = 1e-12  # breaks ties


@dataclass(frozen=True, eq=False)
class Reached:
    """Of B pictures, each with a label to be sure of."""

    sure: Tensor  # bool [B]: whether there is a sufficient subset
    share: Tensor  # [B], of the pixels; 0 where there is none
    visible: Tensor  # bool [B, h, w]: the subset; nothing where there is none


def sufficient(
    method: Method,
    images: Tensor,
    told: Tensor | None,
    targets: Tensor,
    mean: Sequence[float],
    *,
    confidence: float = 0.9,
    steps: int = 100,
    seed: int = 0,
) -> Reached:
    """Hidden pixels have the mean colour, which is 0 after normalisation.

    Pixels are ranked by the gradient of the log probability, which ranks them as that of the probability does, and
    does not vanish where the label is very unlikely at first.
    """
    (B, _, h, w), device = images.shape, images.device
    generator = torch.Generator(device).manual_seed(seed)
    ground = images.new_tensor(mean).view(3, 1, 1)
    at_once = math.ceil(h * w / steps)
    taken = math.ceil(h * w / at_once)
    visible, gone, sureness = torch.ones(B, h * w, device=device), torch.full((B, h * w), taken, device=device), []
    for step in range(taken):
        shown = visible.clone().requires_grad_()
        with torch.enable_grad():
            seen = ground + (images - ground) * shown.view(B, 1, h, w)
            with torch.no_grad():
                sight = sight_for_prediction(method, seen, told)
            logits = method.judge(seen, sight).logits.float()
            likely = logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
            if not likely.requires_grad:
                raise UserError(f"{type(method).__name__}: its answer has no gradient, so no subset can be sought")
            (gradient,) = torch.autograd.grad(likely.sum(), shown)
        sureness.append(likely.detach().exp())
        worth = -gradient + NOISE * torch.randn(gradient.shape, generator=generator, device=device)
        worst = worth.masked_fill(visible == 0, -torch.inf).topk(min(at_once, h * w - step * at_once), dim=1).indices
        visible.scatter_(1, worst, 0.0)
        gone.scatter_(1, worst, step)
    sure = torch.stack(sureness) >= confidence  # [steps, B]
    last = taken - 1 - sure.flip(0).int().argmax(dim=0)
    reached = sure.any(dim=0)
    kept = (gone >= last[:, None]) & reached[:, None]
    return Reached(reached, kept.float().mean(dim=1), kept.view(B, h, w))


def other_labels(index: int, own: int, classes: int, count: int, seed: int) -> np.ndarray:
    """Labels that this picture is not taken for, drawn at random."""
    others = np.delete(np.arange(classes), own)
    return np.random.default_rng([seed, 7, index]).permutation(others)[:count]


@dataclass(frozen=True)
class Subsets:
    """How often there is a sufficient subset of a label drawn at random, and of the model's own answer; how large."""

    n: int  # pictures
    labels: int  # drawn for each
    confidence: float
    steps: int
    reached: Estimate
    size: Estimate | None  # of those that were reached, as a share of the pixels
    own_reached: Estimate
    own_size: Estimate | None

    @property
    def explains_nothing(self) -> bool:
        return self.reached.low > 0.5

    @property
    def sentence(self) -> str:
        sure = f"{100 * self.confidence:.0f} % sure"
        cases = f"in {self.reached.figure} {self.reached.interval} of cases ({self.n} pictures × {self.labels})"
        own = f"For its own answers it is {self.own_reached.figure} {self.own_reached.interval}"
        if self.size is None:
            return f"No pixels made the model {sure} of a label drawn at random ({self.n} pictures)."
        found = f"Some pixels, {self.size.figure} of them on average, make the model {sure} of a label drawn at random"
        rarely = "less often than not." if self.reached.high < 0.5 else "too few pictures to say how often."
        verdict = "to have found such pixels explains nothing." if self.explains_nothing else rarely
        return f"{found} {cases}: {verdict} {own}."


def summary(sure: np.ndarray, share: np.ndarray, confidence: float, steps: int) -> Subsets:
    """Of [n, 1 + labels], the own answer first."""

    def size(some: np.ndarray, shares: np.ndarray) -> Estimate | None:
        counts = some.sum(axis=1)
        mean = (shares * some).sum(axis=1)[counts > 0] / counts[counts > 0]
        return mean_over(mean) if len(mean) else None

    return Subsets(
        len(sure), sure.shape[1] - 1, confidence, steps,
        mean_over(sure[:, 1:].mean(axis=1)), size(sure[:, 1:], share[:, 1:]),
        mean_over(sure[:, 0].astype(np.float64)), size(sure[:, :1], share[:, :1]),
    )  # fmt: skip
