"""Compute cost of a prediction: floating-point operations for the fraction of the image that is really seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..console.terminal import counted
from ..data.images import Preprocess, decode
from ..sight import Method
from ..vit.linear import counted_operations
from .inference import sample_evenly, sight_for_prediction

if TYPE_CHECKING:
    from ..data.rows import Rows
    from ..vit.model import Input

IMAGES = 16


@dataclass(frozen=True)
class Cost:
    """Means over n images, one at a time, so that no sequence is padded to another's length."""

    gflops: float  # a multiply-add counts as two operations; matrix products and attention are counted
    coverage: float  # the visible fraction of the image
    n: int

    @property
    def sentence(self) -> str:
        visible = f"{100 * self.coverage:.0f} % of it visible"
        return f"{self.gflops:.3g} GFLOPs per image, {visible} (mean of {counted(self.n, 'image')})."


@torch.no_grad()
def measure_cost(method: Method, images: Tensor, masks: Tensor | None = None) -> Cost:
    """The cost of `look`, where the prediction depends on it, and of `judge`. Given `masks` cost nothing."""
    operations, coverage = 0, 0.0
    for i in range(len(images)):
        image = images[i : i + 1]
        # The math kernel consists of matrix products, which the counter knows on every device; fused kernels do not.
        with (
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False, custom_mapping=counted_operations()) as counter,
        ):
            sight = sight_for_prediction(method, image, None if masks is None else masks[i : i + 1])
            method.judge(image, sight)
        operations += counter.get_total_flops()
        # A method that is not blind (late or soft masks) sees the whole image, whatever its sight.
        coverage += float(sight.coverage(tuple(image.shape[2:]))) if method.blind else 1.0
    return Cost(operations / len(images) / 1e9, coverage / len(images), len(images))


def measure_cost_on_rows(
    method: Method, rows: Rows, indices: np.ndarray, expects: Input, device: torch.device, most: int = IMAGES
) -> Cost:
    """The mean cost of at most `most` of these rows, evenly spaced."""
    rows, needs_masks = method.with_masks(rows), method.needs_masks
    chosen = sample_evenly(indices, most)
    samples = [decode(rows, int(i), Preprocess.of(expects), mask=needs_masks) for i in chosen]
    images = torch.stack([sample.image for sample in samples]).to(device).float() / 255
    masks = [sample.mask for sample in samples if sample.mask is not None]
    return measure_cost(method, images, torch.stack(masks).to(device) if needs_masks else None)
