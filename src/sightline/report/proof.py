"""The proof of blindness for the report; or, for a model that sees everything, how hidden content gets in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import Preprocess, decode
from ..metrics.inference import sample_evenly, sight_for
from ..sight import Sight
from ..verify.leaks import Leak, find_leak
from ..verify.verify import Certificate, verify
from ..vit.model import ViT
from .case import ReportContext, hides_something

IMAGES, QUICK_IMAGES = 16, 4
DRAWS = 3
VISIBLE_FRACTION = 0.25  # of the patches, chosen at random if there are no masks


@dataclass(frozen=True)
class Proof:
    """A certificate; or a leak, for a model that sees everything."""

    certificate: Certificate | None = None
    leak: Leak | None = None
    redrawn: str = ""  # the content that was redrawn to find the leak

    @property
    def verdict(self) -> str:
        if self.certificate is not None:
            return self.certificate.verdict
        return "leaks" if self.leak and self.leak.leaks else "refused"

    @property
    def sentence(self) -> str:
        if self.verdict == "blind":
            return "Proved: no content outside its sight reaches the prediction."
        if self.certificate is None:
            return "Not blind: this method sees the whole image."
        if self.verdict == "leaks":
            return "Not blind: content outside its sight reaches the prediction."
        return "Not proved."


def prove(context: ReportContext) -> Proof:
    chosen = sample_evenly(context.indices, QUICK_IMAGES if context.command.quick else IMAGES)
    images, masks = context.load_images(chosen)
    with torch.no_grad():
        sight = sight_for(context.method, images, masks)
    if hides_something(sight):
        given = sight if masks is not None else None
        return Proof(verify(context.method, images, given, draws=DRAWS, seed=context.command.seed))
    outside, redrawn = hypothetical_sight(context, chosen, images)
    leak = find_leak(
        cast(nn.Module, context.method), images, outside, call=lambda some: context.method.judge(some, sight).logits,
        draws=1, seed=context.command.seed,
    )  # fmt: skip
    return Proof(leak=leak, redrawn=redrawn)


def hypothetical_sight(context: ReportContext, chosen: np.ndarray, images: Tensor) -> tuple[Sight, str]:
    """A sight for a model that sees everything, and the content outside of it in words."""
    modules = cast(nn.Module, context.method).modules()
    grid = next(module.grid(images) for module in modules if isinstance(module, ViT))
    if context.rows.masks is not None and all(context.rows.masks[i] for i in chosen):
        samples = [decode(context.rows, int(i), Preprocess.of(context.model.expects)).mask for i in chosen]
        masks = torch.stack([mask for mask in samples if mask is not None]).to(images.device)
        return Sight.of_pixels(masks, grid), f"the background, outside the masks {context.masks_from}".strip()
    generator = torch.Generator().manual_seed(context.command.seed)
    keep = torch.rand(len(images), *grid, generator=generator) < VISIBLE_FRACTION
    return Sight(keep=keep.to(images.device)), "a random three quarters of the patches"
