"""Redrawing hidden pixels: what a blindfolded model must not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

NOISE_SCALES = (0.01, 0.1, 1.0, 100.0)  # of the pixels' range [0, 1]: from invisible to absurd
NOT_NUMBERS = {"NaN": torch.nan, "+infinity": torch.inf, "-infinity": -torch.inf}


def redraws(images: Tensor, hidden: Tensor, draws: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """(kind, images with other content where `hidden` [B, h, w]): noise, values that are no numbers, other images."""
    for scale in NOISE_SCALES:
        for _ in range(draws):
            yield f"noise of scale {scale:g}", fill(images, hidden, images + scale * noise_like(images, generator))
    for kind, value in NOT_NUMBERS.items():
        yield kind, fill(images, hidden, torch.full_like(images, value))
    for shift in range(1, 1 + min(draws, 3 if len(images) == 1 else len(images) - 1)):
        yield other_image(images, hidden, shift)


def plausible_redraws(images: Tensor, hidden: Tensor, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The same with content that a camera could have delivered, one of each kind."""
    yield "uniform noise", fill(images, hidden, noise_like(images, generator, torch.rand))
    yield "grey", fill(images, hidden, torch.full_like(images, 0.5))
    yield other_image(images, hidden, 1)


def other_image(images: Tensor, hidden: Tensor, shift: int) -> tuple[str, Tensor]:
    """The pixels of another image of the batch; a lone image lends its own, mirrored and upside down."""
    if len(images) == 1:
        axes = ([3], [2], [2, 3])[shift - 1]
        return "mirrored pixels", fill(images, hidden, images.flip(axes))
    return "another image's pixels", fill(images, hidden, images.roll(shift, dims=0))


def touched(images: Tensor, redrawn: Tensor) -> Tensor:
    """bool [B], on the CPU: the images that are really other ones now."""
    return (images != redrawn).flatten(1).any(dim=1).cpu()


def fill(images: Tensor, hidden: Tensor, content: Tensor) -> Tensor:
    return torch.where(hidden[:, None], content, images)


def noise_like(images: Tensor, generator: torch.Generator, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """Drawn on the CPU, so that a seed means the same everywhere."""
    return draw(images.shape, generator=generator).to(images)
