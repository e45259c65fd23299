"""Redraws of hidden pixels, which must not change the output of a model that is blind outside its sight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

NOISE_SCALES = (0.01, 0.1, 1.0, 100.0)  # relative to the pixel range [0, 1]: from invisible to extreme
NOT_NUMBERS = {"NaN": torch.nan, "+infinity": torch.inf, "-infinity": -torch.inf}


def redraws(images: Tensor, hidden: Tensor, draws: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """(kind, images with other content where `hidden` [B, h, w]): noise, NaN and infinities, other images."""
    for scale in NOISE_SCALES:
        for _ in range(draws):
            yield f"noise of scale {scale:g}", fill(images, hidden, images + scale * noise_like(images, generator))
    for kind, value in NOT_NUMBERS.items():
        yield kind, fill(images, hidden, torch.full_like(images, value))
    for shift in range(1, 1 + min(draws, 3 if len(images) == 1 else len(images) - 1)):
        yield other_image(images, hidden, shift)


def plausible_redraws(images: Tensor, hidden: Tensor, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """As `redraws`, but with values that a camera could produce, one of each kind."""
    yield "uniform noise", fill(images, hidden, noise_like(images, generator, torch.rand))
    yield "grey", fill(images, hidden, torch.full_like(images, 0.5))
    yield other_image(images, hidden, 1)


def other_image(images: Tensor, hidden: Tensor, shift: int) -> tuple[str, Tensor]:
    """The pixels of another image of the batch; for a single image its own, flipped."""
    if len(images) == 1:
        axes = ([3], [2], [2, 3])[shift - 1]
        return "mirrored pixels", fill(images, hidden, images.flip(axes))
    return "another image's pixels", fill(images, hidden, images.roll(shift, dims=0))


def images_changed(images: Tensor, redrawn: Tensor) -> Tensor:
    """bool [B], on the CPU: the images that the redraw really changed."""
    return (images != redrawn).flatten(1).any(dim=1).cpu()


def fill(images: Tensor, hidden: Tensor, content: Tensor) -> Tensor:
    return torch.where(hidden[:, None], content, images)


def noise_like(images: Tensor, generator: torch.Generator, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """Drawn on the CPU, so that a seed gives the same noise on every device."""
    return draw(images.shape, generator=generator).to(images)
