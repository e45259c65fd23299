"""What an answer relies on: relevance maps of a ViT, for any class, for many pictures at once.

    maps = MAPS["gae"](model.method, images)                   # [B, H, W], of the class that each picture is taken for
    maps = MAPS["rollout"](vit, images, classes)
    look = open_relevance("relevance:runs/waterbirds-erm")     # where a trained model looks, to pair with any *what*

A map is not a sight: it says where an answer comes from, and hides nothing. GAE needs the full attention of all blocks
and its gradients: for a ViT-B at 224 pixels autograd keeps 187 MB per picture, 118 MB of them as in any training
(322 MB in second order; `benchmarks/results/relevance_cost_vit_b_cpu.json`). Maps to look at are computed in parts that
fit.
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
from ..sight import Sight, cell_share
from ..vit.model import ViT, ViTOutput

Kind = Literal["gae", "rollout", "attention", "gradient"]
Read = Callable[[ViTOutput], Tensor]  # the class scores [B, C] that a ViT's output leads to
MOST_BYTES = 1 << 30  # of attention and its gradients, at once; all that autograd keeps is about twice that


@dataclass(frozen=True)
class Relevance:
    """Maps and the answer they are of, from one pass and in one graph."""

    maps: Tensor  # [B, H, W], 0 and above, on no particular scale
    logits: Tensor  # [B, C]


def own_scores(out: ViTOutput) -> Tensor:
    assert out.logits is not None, "there is nothing to explain without a head"
    return out.logits


# ---- in the graph, for training --------------------------------------------------------------------------------------


def gae(
    vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: Read = own_scores, second_order: bool = False
) -> Relevance:
    """Gradient and attention, through all blocks (Chefer et al. 2021, eqs. 5 and 6; RobustViT, suppl. eqs. 3 and 4).

    One backward serves the batch: no picture's score depends on another picture. As published, the gradients are
    constants, so that training goes through the attention alone; with `second_order` it goes through both.
    """
    out = vit(_in_graph(images), attention=range(vit.config.depth))
    logits = read(out)
    gradients = torch.autograd.grad(
        _chosen(logits, classes).sum(), out.attention, create_graph=second_order, retain_graph=True
    )
    row = accumulated([positive_share(a, g) for a, g in zip(out.attention, gradients, strict=True)])
    return Relevance(_patches(row, out), logits)


def rollout(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: Read = own_scores) -> Relevance:  # noqa: ARG001 (the same for every class)
    """Attention through all blocks, half of it going past each (Abnar & Zuidema 2020, sec. 3)."""
    out = vit(images, attention=range(vit.config.depth))
    return Relevance(_patches(rolled_out([each.mean(dim=1) for each in out.attention]), out), read(out))


def attention(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: Read = own_scores) -> Relevance:  # noqa: ARG001 (the same for every class)
    """What CLS attends to in the last block, the mean over heads."""
    out = vit(images, cls_attention=[-1])
    assert out.cls_attention is not None
    return Relevance(_patches(out.cls_attention[:, 0].mean(dim=1), out), read(out))


def gradient(vit: ViT, images: Tensor, classes: Tensor | None = None, *, read: Read = own_scores) -> Relevance:
    """Gradient × input, summed over colours: its size, averaged over each patch (Shrikumar et al. 2016, sec. 3)."""
    images = _in_graph(images)
    out = vit(images)
    logits = read(out)
    (found,) = torch.autograd.grad(_chosen(logits, classes).sum(), images, retain_graph=True)
    pixels = (found * (images.detach() - vit.mean)).sum(dim=1).abs()  # what is seen is (images - mean) / deviation
    return Relevance(cell_share(pixels, out.grid), logits)


KINDS: dict[Kind, Callable[..., Relevance]] = {
    "gae": gae,
    "rollout": rollout,
    "attention": attention,
    "gradient": gradient,
}


# ---- from matrices to a row ------------------------------------------------------------------------------------------


def positive_share(attention: Tensor, gradients: Tensor) -> Tensor:
    """[B, T, T] from [B, heads, T, T]: the mean over heads of (∇A ⊙ A)⁺ (RobustViT, suppl. eq. 3)."""
    return (gradients * attention).clamp(min=0).mean(dim=1)


def accumulated(blocks: Sequence[Tensor]) -> Tensor:
    """[B, T]: the row of CLS after R ← R + Ā·R from the first block to the last (RobustViT, suppl. eq. 4).

    Only that row of the product (I + Ā_L)…(I + Ā_1) is needed, so it is made from the left: T² per block, not T³.
    """
    return _row_of_product(blocks, lambda block, row: row + _times(row, block))


def rolled_out(blocks: Sequence[Tensor]) -> Tensor:
    """[B, T]: the row of CLS in the product of (A + I) / 2 over the blocks."""
    return _row_of_product(blocks, lambda block, row: (row + _times(row, block)) / 2)


def _row_of_product(blocks: Sequence[Tensor], step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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


def _chosen(logits: Tensor, classes: Tensor | None) -> Tensor:
    """[B]: each picture's score of its own class, or of the one it is taken for."""
    classes = logits.argmax(dim=1) if classes is None else classes
    return logits.gather(1, classes[:, None])[:, 0]


def _in_graph(images: Tensor) -> Tensor:
    """So that there is a graph also where no weight is trained."""
    return images if images.requires_grad else images.detach().requires_grad_()


# ---- to look at ------------------------------------------------------------------------------------------------------


def relevance_map(method: object, images: Tensor, classes: Tensor | None = None, *, kind: Kind = "gae") -> Tensor:
    """[B, H, W], of a ViT with a head, or of a method that answers from the CLS token of one that sees everything.

    `classes` [B] say what is to be explained; without, what each picture is taken for.
    """
    vit, read = _reader(method)
    if kind in ("gae", "gradient") and torch.is_inference_mode_enabled():
        raise UserError(f"{kind} needs gradients, which torch.inference_mode() forbids; torch.no_grad() does not")
    at_once = fit_at_once(vit, images)
    parts = images.split(at_once)
    of_parts = [None] * len(parts) if classes is None else classes.split(at_once)
    with torch.set_grad_enabled(kind in ("gae", "gradient")):
        pairs = zip(parts, of_parts, strict=True)
        return torch.cat([KINDS[kind](vit, some, of, read=read).maps.detach().float() for some, of in pairs])


MAPS: dict[Kind, Callable[..., Tensor]] = {kind: partial(relevance_map, kind=kind) for kind in KINDS}


def can_be_explained(method: object) -> bool:
    """Whether it answers from everything, through the CLS token of one ViT: then there are maps of its relevance."""
    vit = _vit_of(method)
    return vit is not None and vit.head is not None


def _vit_of(method: object) -> ViT | None:
    vit = method if isinstance(method, ViT) else getattr(method, "vit", None)
    return vit if isinstance(vit, ViT) else None


def _reader(method: object) -> tuple[ViT, Read]:
    vit = _vit_of(method)
    if vit is None or vit.head is None:
        raise UserError(
            f"{type(method).__name__}: no relevance map, since it does not answer from everything through one CLS "
            "token; erm, groupdro, jtt, cvar, lff, probe, dfr, zs, robustvit, rrr, gradmask and masktune do"
        )
    answer = getattr(method, "answer", None)  # CLIP's compares its token with words
    return vit, own_scores if answer is None else lambda out: answer(out.cls)


def fit_at_once(vit: ViT, images: Tensor) -> int:
    """How many of such pictures are explained in one go."""
    H, W = vit.grid(images)
    return max(1, MOST_BYTES // (4 * 4 * vit.config.depth * vit.config.heads * (vit.prefix + H * W) ** 2))


class RelevanceSight(nn.Module):
    """Keeps the patches that an answer relies on: the `share` that is most relevant, or all above the mean."""

    def __init__(self, method: nn.Module, kind: Kind = "gae", share: float | None = None):
        super().__init__()
        _reader(method)  # or it says so now
        self.method, self.kind, self.share = method, kind, share

    def look(self, images: Tensor) -> Sight:
        maps = relevance_map(self.method, images, kind=self.kind)
        if self.share is None:
            return Sight(keep=maps > maps.mean(dim=(1, 2), keepdim=True))
        best = maps.flatten(1).topk(max(1, round(self.share * maps[0].numel())), dim=1).indices
        keep = torch.zeros_like(maps.flatten(1), dtype=torch.bool).scatter(1, best, True)
        return Sight(keep=keep.view_as(maps))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {self.kind: relevance_map(self.method, images, kind=self.kind)}

    def extra_repr(self) -> str:
        return f"kind={self.kind}, share={self.share}"
