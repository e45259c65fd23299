"""What an answer costs: floating-point operations at the share of the picture that is really seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .sight import Method, Sight, Told


@dataclass(frozen=True)
class Cost:
    """Means over n pictures, each alone, so that none is padded to another's length."""

    gflops: float  # two for every multiplication with addition, as everybody counts matrix products and attention
    coverage: float  # the share of the picture that was seen
    n: int

    @property
    def sentence(self) -> str:
        return f"{self.gflops:.2f} GFLOPs per picture, {self.coverage:.0%} of which is seen (mean of {self.n})."


@torch.no_grad()
def cost(method: Method, images: Tensor, masks: Tensor | None = None) -> Cost:
    """Of looking and judging; with `masks`, for a method that is told where to look."""
    operations, seen = 0, 0.0
    for i in range(len(images)):
        image = images[i : i + 1]
        # The plain kernel is made of matrix products, which are counted everywhere; others are not.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            sight = sight_for(method, image, None if masks is None else masks[i : i + 1])
            method.judge(image, sight)
        operations += counter.get_total_flops()
        seen += float(sight.coverage(tuple(image.shape[2:])))
    return Cost(operations / len(images) / 1e9, seen / len(images), len(images))


def sight_for(method: Method, images: Tensor, masks: Tensor | None) -> Sight:
    """Where it looks, or is told to."""
    return method.look_at(images, masks) if masks is not None and isinstance(method, Told) else method.look(images)
