"""Relevance maps: which patches a ViT's prediction relies on, for any class and for many images at once.

    maps = MAPS["gae"](model.method, images)             # [B, H, W], of each image's predicted class
    maps = MAPS["rollout"](vit, images, classes)

A map is not a sight: it explains a prediction and hides nothing. GAE needs the full attention of all blocks and its
gradients: for a ViT-B at 224 pixels autograd keeps 187 MB per image, of which 118 MB are as in any training (322 MB in
second order; `benchmarks/results/relevance_cost_vit_b_cpu.json`). `relevance_map` works in chunks that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..sight import Method, Sight, cell_share
from ..vit.model import ReadLogits, ViT, ViTOutput, vit_logits
from .attention import keep_highest

Kind = Literal["gae", "rollout", "attention", "gradient"]
MAX_BYTES = 1 << 30  # of attention and its gradients per chunk; autograd keeps about twice that in total


@dataclass(frozen=True)
class Relevance:
    """Relevance maps and the logits they explain, from one forward pass and in one graph."""

    maps: Tensor  # [B, H, W], non-negative, of arbitrary scale
    logits: Tensor  # [B, C]


# ---- in the graph, for training --------------------------------------------------------------------------------------


def gae(
    vit: ViT,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    read: ReadLogits = vit_logits,
    second_order: bool = False,
) -> Relevance:
    """Generic attention explainability (Chefer et al. 2021, eqs. 5 and 6; RobustViT, suppl. eqs. 3 and 4).

    One backward pass serves the batch, since no image's logits depend on another image. As published, the gradients are
    constants, so training differentiates the attention alone; with `second_order` it differentiates both.
    """
    out = vit(_in_graph(images), attention=range(vit.config.depth))
    logits = read(out)
    gradients = torch.autograd.grad(
        _target_logits(logits, classes).sum(), out.attention, create_graph=second_order, retain_graph=True
    )
    row = accumulate_relevance([positive_contribution(a, g) for a, g in zip(out.attention, gradients, strict=True)])
    return Relevance(_patches(row, out), logits)


def rollout(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: ReadLogits = vit_logits) -> Relevance:  # noqa: ARG001 (the same for every class)
    """Attention rollout: attention through all blocks, averaged with the identity (Abnar & Zuidema 2020, sec. 3)."""
    out = vit(images, attention=range(vit.config.depth))
    return Relevance(_patches(rollout_row([each.mean(dim=1) for each in out.attention]), out), read(out))


def attention(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: ReadLogits = vit_logits) -> Relevance:  # noqa: ARG001 (the same for every class)
    """CLS attention of the last block, averaged over heads."""
    out = vit(images, cls_attention=[-1])
    assert out.cls_attention is not None
    return Relevance(_patches(out.cls_attention[:, 0].mean(dim=1), out), read(out))


def gradient(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: ReadLogits = vit_logits) -> Relevance:
    """Gradient × input, summed over colours; its absolute value, averaged over each patch (Shrikumar et al. 2016)."""
    images = _in_graph(images)
    out = vit(images)
    logits = read(out)
    (gradients,) = torch.autograd.grad(_target_logits(logits, classes).sum(), images, retain_graph=True)
    pixels = (gradients * (images.detach() - vit.mean)).sum(dim=1).abs()  # the ViT's input is (images - mean) / std
    return Relevance(cell_share(pixels, out.grid), logits)


KINDS: dict[Kind, Callable[..., Relevance]] = {
    "gae": gae,
    "rollout": rollout,
    "attention": attention,
    "gradient": gradient,
}


# ---- from attention matrices to the row of CLS -----------------------------------------------------------------------


def positive_contribution(attention: Tensor, gradients: Tensor) -> Tensor:
    """[B, T, T] from [B, heads, T, T]: the mean over heads of (∇A ⊙ A)⁺ (RobustViT, suppl. eq. 3)."""
    return (gradients * attention).clamp(min=0).mean(dim=1)


def accumulate_relevance(blocks: Sequence[Tensor]) -> Tensor:
    """[B, T]: the row of CLS after R ← R + Ā·R from the first block to the last (RobustViT, suppl. eq. 4).

    Only this row of the product (I + Ā_L)…(I + Ā_1) is needed, so it is computed from the left: T² per block, not T³.
    """
    return _cls_row_of_product(blocks, lambda block, row: row + _times(row, block))


def rollout_row(blocks: Sequence[Tensor]) -> Tensor:
    """[B, T]: the row of CLS in the product of (A + I) / 2 over the blocks."""
    return _cls_row_of_product(blocks, lambda block, row: (row + _times(row, block)) / 2)


def _cls_row_of_product(blocks: Sequence[Tensor], step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    last = blocks[-1]
    row = F.one_hot(torch.zeros(len(last), dtype=torch.int64, device=last.device), last.shape[-1]).to(last.dtype)
    with torch.autocast(last.device.type, enabled=False):
        for block in reversed(blocks):
            row = step(block, row)
    return row


def _times(row: Tensor, block: Tensor) -> Tensor:
    return (row[:, None] @ block)[:, 0]


def _patches(row: Tensor, out: ViTOutput) -> Tensor:
    """[B, H, W] of [B, T]."""
    return row[:, -out.patches.shape[1] :].unflatten(1, out.grid)


def _target_logits(logits: Tensor, classes: Tensor | None) -> Tensor:
    """[B]: each image's logit of the given class, or of the predicted one."""
    classes = logits.argmax(dim=1) if classes is None else classes
    return logits.gather(1, classes[:, None])[:, 0]


def _in_graph(images: Tensor) -> Tensor:
    """With a gradient, so that there is a graph even if no weight is trained."""
    return images if images.requires_grad else images.detach().requires_grad_()


# ---- without a graph, to show ----------------------------------------------------------------------------------------


def relevance_map(method: Method | ViT, images: Tensor, classes: Tensor | None = None, *, kind: Kind = "gae") -> Tensor:
    """[B, H, W], of a ViT with a head, or of a method that predicts from the CLS token of a ViT that sees everything.

    `classes` [B] are the classes to explain; by default the predicted ones.
    """
    vit, read = _vit_and_reader(method)
    if kind in ("gae", "gradient") and torch.is_inference_mode_enabled():
        raise UserError(f"{kind}: needs gradients, which torch.inference_mode() forbids; use torch.no_grad()")
    count = images_per_pass(vit, images)
    chunks = images.split(count)
    targets = [None] * len(chunks) if classes is None else classes.split(count)
    with torch.set_grad_enabled(kind in ("gae", "gradient")):
        pairs = zip(chunks, targets, strict=True)
        return torch.cat([KINDS[kind](vit, chunk, target, read=read).maps.detach().float() for chunk, target in pairs])


MAPS: dict[Kind, Callable[..., Tensor]] = {kind: partial(relevance_map, kind=kind) for kind in KINDS}


def has_relevance_map(method: Method | ViT) -> bool:
    """Whether it predicts from the CLS token of one ViT that sees everything, so that `relevance_map` works."""
    return method.relevance_source() is not None


def _vit_and_reader(method: Method | ViT) -> tuple[ViT, ReadLogits]:
    source = method.relevance_source()
    if source is None:
        raise UserError(
            f"{type(method).__name__}: has no relevance map, because it does not predict from the CLS token of a ViT "
            "that sees everything; erm, groupdro, jtt, cvar, lff, irm, coral, george, probe, dfr, zs, "
            "robustvit, rrr, gradmask and masktune do"
        )
    return source


def images_per_pass(vit: ViT, images: Tensor) -> int:
    """How many images are explained in one pass."""
    H, W = vit.grid(images)
    return max(1, MAX_BYTES // (4 * 4 * vit.config.depth * vit.config.heads * (vit.prefix + H * W) ** 2))


class RelevanceSight(nn.Module):
    """Keeps the most relevant patches: a `share` of them, or all above the mean."""

    def __init__(self, method: Method | ViT, kind: Kind = "gae", share: float | None = None):
        super().__init__()
        _vit_and_reader(method)  # raises an error if it has no relevance map
        self.method, self.kind, self.share = method, kind, share

    def look(self, images: Tensor) -> Sight:
        maps = relevance_map(self.method, images, kind=self.kind)
        if self.share is None:
            return Sight(keep=maps > maps.mean(dim=(1, 2), keepdim=True))
        return Sight(keep=keep_highest(maps, self.share))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {self.kind: relevance_map(self.method, images, kind=self.kind)}

    def extra_repr(self) -> str:
        return f"kind={self.kind}, share={self.share}"
