"""What is proved about a model, for its report; or, where nothing can be, how what it should not see gets in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import Canvas, decode
from ..metrics.inference import sight_for
from ..sight import Sight
from ..verify.leaks import Leak, find_leak
from ..verify.verify import Certificate, verify
from ..vit.model import ViT
from .case import Case, few, hides

PICTURES, QUICKLY = 16, 4
DRAWS = 3
SHARE = 0.25  # of the patches that chance hides nothing of, where there are no masks to go by


@dataclass(frozen=True)
class Proof:
    """A certificate; or for a model that sees everything, a leak."""

    certificate: Certificate | None = None
    leak: Leak | None = None
    hidden: str = ""  # what was redrawn to find the leak

    @property
    def verdict(self) -> str:
        if self.certificate is not None:
            return self.certificate.verdict
        return "leaks" if self.leak and self.leak.leaks else "refused"

    @property
    def plainly(self) -> str:
        if self.verdict == "blind":
            return "Proved: nothing outside what it shows reaches the answer."
        if self.certificate is None:
            return "Nothing is proved: this method sees the whole picture."
        if self.verdict == "leaks":
            return "Not blind: what it does not show reaches the answer all the same."
        return "Nothing is proved."


def prove(case: Case) -> Proof:
    chosen = few(case.indices, QUICKLY if case.command.quick else PICTURES)
    images, masks = case.pictures(chosen)
    with torch.no_grad():
        sight = sight_for(case.method, images, masks)
    if hides(sight):
        given = sight if masks is not None else None
        return Proof(verify(case.method, images, given, draws=DRAWS, seed=case.command.seed))
    outside, hidden = supposed_sight(case, chosen, images)
    leak = find_leak(
        cast(nn.Module, case.method), images, outside, call=lambda some: case.method.judge(some, sight).logits, draws=1,
        seed=case.command.seed,
    )  # fmt: skip
    return Proof(leak=leak, hidden=hidden)


def supposed_sight(case: Case, chosen: np.ndarray, images: Tensor) -> tuple[Sight, str]:
    """What a model that sees everything might be supposed to look at, and what is then redrawn, in words."""
    modules = cast(nn.Module, case.method).modules()
    grid = next(module.grid(images) for module in modules if isinstance(module, ViT))
    if case.rows.masks is not None and all(case.rows.masks[i] for i in chosen):
        samples = [decode(case.rows, int(i), Canvas.of(case.model.expects)).mask for i in chosen]
        masks = torch.stack([mask for mask in samples if mask is not None]).to(images.device)
        return Sight.of_pixels(masks, grid), f"what lies outside the masks {case.masks_from}".strip()
    generator = torch.Generator().manual_seed(case.command.seed)
    keep = torch.rand(len(images), *grid, generator=generator) < SHARE
    return Sight(keep=keep.to(images.device)), "three quarters of the patches, chosen by chance"
