"""What an answer costs: floating-point operations at the share of the picture that is really seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..data.images import Canvas, decode
from ..sight import Method
from .inference import sight_for_prediction

if TYPE_CHECKING:
    from ..data.rows import Rows
    from ..vit.model import Input

PICTURES = 16


@dataclass(frozen=True)
class Cost:
    """Means over n pictures, each alone, so that none is padded to another's length."""

    gflops: float  # two for every multiplication with addition, as everybody counts matrix products and attention
    coverage: float  # the share of the picture that was seen
    n: int

    @property
    def sentence(self) -> str:
        seen = f"{100 * self.coverage:.0f} % of which is seen"
        return f"{self.gflops:.3g} GFLOPs per picture, {seen} (mean of {self.n})."


@torch.no_grad()
def cost(method: Method, images: Tensor, masks: Tensor | None = None) -> Cost:
    """Of looking, where the answer depends on it, and of judging; with `masks`, for a method that is told where to
    look. Those cost nothing here."""
    operations, seen = 0, 0.0
    for i in range(len(images)):
        image = images[i : i + 1]
        # The plain kernel is made of matrix products, which are counted everywhere; others are not.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            sight = sight_for_prediction(method, image, None if masks is None else masks[i : i + 1])
            method.judge(image, sight)
        operations += counter.get_total_flops()
        # Late and soft masks choose what counts, not what is seen.
        seen += float(sight.coverage(tuple(image.shape[2:]))) if method.blind else 1.0
    return Cost(operations / len(images) / 1e9, seen / len(images), len(images))


def cost_on(
    method: Method, rows: Rows, indices: np.ndarray, expects: Input, device: torch.device, most: int = PICTURES
) -> Cost:
    """Of at most so many of these rows, evenly spread over them."""
    rows, told = method.with_masks(rows), method.needs_masks
    few = indices[np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int)]
    samples = [decode(rows, int(i), Canvas.of(expects), mask=told) for i in few]
    images = torch.stack([sample.image for sample in samples]).to(device).float() / 255
    masks = torch.stack([sample.mask for sample in samples if sample.mask is not None]).to(device) if told else None
    return cost(method, images, masks)
