"""Part discovery: every patch goes to one of K parts or to the background (PDiscoFormer; iFAM's first stage).

    stage1 = PartDiscovery(vit, parts=4, classes=200)
    parts = stage1.discover(images)                                      # evaluation: no noise
    parts = stage1.discover(images, noise=stage1.draw_noise(images))     # training
    embeddings = stage1.embed(parts)                                     # [B, D, K+1]
    logits = stage1.class_logits(embeddings)                             # [B, C]: PDiscoFormer's answer
    keep = straight_through(parts.scores)                                # [B, H, W]: what iFAM's second stage may see

Randomness is always given from outside: noise [B, K+1, H, W] and `keep_parts`, bool [B, K]. All of this is computed in
float32, also under autocast: a patch's part must not depend on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.augment import Affine, unwarp, warp
from ..sight import Sight
from ..training.context import Group
from ..vit.model import ViT

TOKENS = ("cls_token", "reg_token", "pos_embed")

Function = TypeVar("Function", bound=Callable[..., Any])


def in_full_precision(function: Function) -> Function:
    """Autocast is off inside, and its tensors are float32 or wider."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(torch.promote_types(value.dtype, torch.float32))
        return value

    @wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        device = next(value.device.type for value in (*given, *named.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*map(widen, given), **{name: widen(value) for name, value in named.items()})

    return cast(Function, wrapped)


@dataclass(frozen=True)
class Parts:
    """What was discovered in B images; background last."""

    features: Tensor  # [B, D, H, W]: the patches after the final norm
    logits: Tensor  # [B, K+1, H, W]: minus the squared distance to every prototype
    scores: Tensor  # [B, K+1, H, W]: logits, with noise, by the temperature
    shares: Tensor  # [B, K+1, H, W]: their softmax, the part maps A


class PartDiscovery(nn.Module):
    """A ViT's patches against K+1 learned prototypes, and one head for all parts."""

    def __init__(
        self,
        vit: ViT,
        parts: int,
        classes: int,
        *,
        dropout: float = 0.3,
        temperature: float = 1.0,
        size: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        if vit.head is not None:
            raise ValueError("part discovery has its own head: build the ViT with classes=0")
        if parts < 1 or not 0 <= dropout < 1 or not temperature > 0:
            raise ValueError(f"no part discovery with {parts} parts, dropout {dropout}, temperature {temperature}")
        self.vit, self.dropout, self.temperature, self.size = vit, dropout, temperature, size
        D, generator = vit.config.width, torch.Generator().manual_seed(seed)
        self.prototypes = nn.Parameter(torch.empty(parts + 1, D).uniform_(-(D**-0.5), D**-0.5, generator=generator))
        self.modulation = nn.LayerNorm([D, parts + 1])
        self.head = nn.utils.skip_init(nn.Linear, D, classes, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=0.02, generator=generator)

    def extra_repr(self) -> str:
        return f"parts={self.parts}, dropout={self.dropout}, temperature={self.temperature}"

    @property
    def parts(self) -> int:
        return len(self.prototypes) - 1

    def discover(self, images: Tensor, *, noise: Tensor | None = None) -> Parts:
        """Which part every patch belongs to; training gives Gumbel noise (`draw_noise`), evaluation none."""
        return self._discovered(self.vit(self.sized(images)).feature_map, noise)

    def sized(self, images: Tensor) -> Tensor:
        """As large as parts are to be discovered in."""
        if self.size is None or images.shape[2:] == (self.size, self.size):
            return images
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """H×W, of the parts of these images."""
        return self.vit.grid(self.sized(images[:1]))

    def discover_moved(self, images: Tensor, affine: Affine, *, noise: Tensor | None = None) -> Tensor:
        """[B, K+1, H, W]: the shares found in images that were moved, put back in place. For equivariance."""
        mean = self.vit.mean  # of normalised images it is zero, the warp's fill
        moved = warp(images - mean, affine) + mean
        return unwarp(self.discover(moved, noise=noise).shares, affine, (images.shape[-2], images.shape[-1]))

    @in_full_precision
    def _discovered(self, features: Tensor, noise: Tensor | None) -> Parts:
        prototypes = self.prototypes.to(features.dtype)
        squares = features.square().sum(dim=1, keepdim=True), prototypes.square().sum(dim=1)[:, None, None]
        logits = 2 * self.inner_products(features) - squares[0] - squares[1]
        scores = self.scores(logits, noise)
        return Parts(features, logits, scores, scores.softmax(dim=1))

    @in_full_precision
    def inner_products(self, features: Tensor) -> Tensor:
        """[B, K+1, H, W]. A plain matrix product: convolutions may be rounded to TF32."""
        return torch.einsum("bdhw,kd->bkhw", features, self.prototypes.to(features.dtype))

    @in_full_precision
    def scores(self, logits: Tensor, noise: Tensor | None = None) -> Tensor:
        """[B, K+1, H, W]: for another draw of noise than that of `discover`."""
        return (logits if noise is None else logits + noise) / self.temperature

    def embed(self, parts: Parts) -> Tensor:
        """[B, D, K+1]: pooled, then one LayerNorm over both D and K+1 (PDiscoFormer's modulation)."""
        pooled, norm = pool(parts.features, parts.shares), self.modulation
        weight, bias = norm.weight.to(pooled.dtype), norm.bias.to(pooled.dtype)
        return F.layer_norm(pooled, norm.normalized_shape, weight, bias, norm.eps)  # which autocast leaves alone

    @in_full_precision
    def part_scores(self, embeddings: Tensor, keep_parts: Tensor | None = None) -> Tensor:
        """[B, C, K]: what each part says of each class; zero where dropped, the others scaled by 1 / (1 - dropout)."""
        foreground = embeddings[:, :, :-1]
        if keep_parts is not None:
            foreground = foreground * keep_parts[:, None] / (1 - self.dropout)
        return torch.einsum("bdk,cd->bck", foreground, self.head.weight.to(foreground.dtype))

    def class_logits(self, embeddings: Tensor, keep_parts: Tensor | None = None) -> Tensor:
        """[B, C]: the mean over all K parts, dropped or not."""
        return self.part_scores(embeddings, keep_parts).mean(dim=2)

    def draw_noise(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[B, K+1, H, W]"""
        return gumbel((len(images), self.parts + 1, *self.grid(images)), images.device, generator)

    def draw_keep_parts(
        self, images: Tensor, rate: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """bool [B, K]: each part of each image is dropped at this rate, by default that of the classifier."""
        rate = self.dropout if rate is None else rate
        return torch.rand(len(images), self.parts, device=images.device, generator=generator) >= rate

    def look(self, images: Tensor) -> Sight:
        """Every patch that is more likely of a part than of the background."""
        parts = self.discover(images)
        return Sight(keep=hard_keep(parts.scores), parts=parts.shares)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        shares = self.discover(images).shares.unbind(dim=1)
        return {f"part {k}": share for k, share in enumerate(shares[:-1])} | {"background": shares[-1]}

    def part_groups(self, head_lr: float, prototype_lr: float) -> list[Group]:
        """All that is not the ViT: only the head decays."""
        groups = [
            Group([self.prototypes], prototype_lr, decay=False),
            Group(list(self.modulation.parameters()), head_lr, decay=False),
            Group(list(self.head.parameters()), head_lr),
        ]
        return [replace(group, parameters=[p for p in group.parameters if p.requires_grad]) for group in groups]


def freeze(vit: ViT, *, tokens: bool = False) -> None:
    """Train nothing of the ViT but, unless these are frozen too, its CLS token, registers and positions."""
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name in TOKENS and not tokens)


@in_full_precision
def pool(features: Tensor, shares: Tensor) -> Tensor:
    """[B, D, K+1]: Σ share × feature / (H·W), so that a part's size shows in its length (PDiscoFormer)."""
    return torch.einsum("bkhw,bdhw->bdk", shares, features) / (features.shape[2] * features.shape[3])


# ---- what may be seen ------------------------------------------------------------------------------------------------


def hard_keep(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """bool [B, H, W]: where a part that is not dropped scores no lower than the background.

    Scores decide, not shares: where shares underflow to 0, the patches of a dropped part would tie, and stay.
    """
    return surviving(scores, keep_parts, -torch.inf).amax(dim=1) >= scores[:, -1]


def soft_keep(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W] in [0, 1]: the share of the likeliest part that is not dropped (iFAM's ablation)."""
    return surviving(scores.softmax(dim=1), keep_parts, 0.0).max(dim=1).values


def foreground(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W] in [0, 1]: the share of all parts that are not dropped."""
    return surviving(scores.softmax(dim=1), keep_parts, 0.0).sum(dim=1)


def straight_through(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W]: exactly `hard_keep`, with the gradient of the sum of the surviving parts' shares (iFAM, sec. 3.3)."""
    shares = foreground(scores, keep_parts)
    return hard_keep(scores, keep_parts).to(shares.dtype) + (shares - shares.detach())


def surviving(values: Tensor, keep_parts: Tensor | None, instead: float) -> Tensor:
    """[B, K, H, W]: without the background, and `instead` for what is dropped."""
    foreground = values[:, :-1]
    return foreground if keep_parts is None else foreground.masked_fill(~keep_parts[..., None, None], instead)


def gumbel(
    shape: Sequence[int], device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """Gumbel(0, 1) noise, always finite: a float32 draw may be exactly 0, whose logarithm is not."""
    return -torch.empty(*shape, device=device).exponential_(generator=generator).clamp_min_(1e-8).log_()
