"""Part discovery: every patch is assigned to one of K parts or to the background (PDiscoFormer; stage 1 of iFAM).

    stage1 = PartDiscovery(vit, parts=4, classes=200)
    parts = stage1.discover(images)                                      # evaluation: no Gumbel noise
    parts = stage1.discover(images, noise=stage1.draw_noise(images))     # training
    embeddings = stage1.embed(parts)                                     # [B, D, K+1]
    logits = stage1.class_logits(embeddings)                             # [B, C]: PDiscoFormer's prediction
    keep = straight_through(parts.scores)                                # [B, H, W]: what stage 2 of iFAM may see

Random draws are always arguments: Gumbel noise [B, K+1, H, W] and `keep_parts` (part dropout), bool [B, K]. Everything
is computed in float32, also under autocast: the part of a patch must not depend on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.augment import Affine, unwarp_affine, warp_affine
from ..sight import Sight
from ..training.trainable import ParameterGroup
from ..vit.model import ViT

if TYPE_CHECKING:
    from .foreground import ForegroundStart

TOKENS = ("cls_token", "reg_token", "pos_embed")

Function = TypeVar("Function", bound=Callable[..., Any])


def in_full_precision(function: Function) -> Function:
    """Decorator: run without autocast, with floating-point arguments converted to float32 or wider."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(torch.promote_types(value.dtype, torch.float32))
        return value

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})

    return cast(Function, wrapped)


@dataclass(frozen=True)
class Parts:
    """The parts discovered in B images; background last."""

    features: Tensor  # [B, D, H, W]: patch tokens after the final norm
    logits: Tensor  # [B, K+1, H, W]: negative squared distance to every prototype
    scores: Tensor  # [B, K+1, H, W]: logits, plus Gumbel noise in training, divided by the temperature
    probabilities: Tensor  # [B, K+1, H, W]: softmax of the scores, the part maps A


class PartDiscovery(nn.Module):
    """Compares the patch tokens of a ViT with K+1 learned prototypes; one linear head classifies all parts."""

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
        gated: bool = False,
    ):
        super().__init__()
        if vit.head is not None:
            raise ValueError("part discovery has its own head; build the ViT with classes=0")
        if parts < 1 or not 0 <= dropout < 1 or not temperature > 0:
            raise ValueError(f"invalid: {parts} parts, dropout {dropout} or temperature {temperature}")
        self.vit, self.dropout, self.temperature, self.size = vit, dropout, temperature, size
        D, generator = vit.config.width, torch.Generator().manual_seed(seed)
        self.prototypes = nn.Parameter(torch.empty(parts + 1, D).uniform_(-(D**-0.5), D**-0.5, generator=generator))
        # Weights and bias of a foreground classifier; without one, the last prototype is the background.
        self.gate = nn.Parameter(torch.zeros(D + 1), requires_grad=False) if gated else None
        self.modulation = nn.LayerNorm([D, parts + 1])
        self.head = nn.utils.skip_init(nn.Linear, D, classes, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=0.02, generator=generator)

    def extra_repr(self) -> str:
        return f"parts={self.parts}, dropout={self.dropout}, temperature={self.temperature}"

    @property
    def parts(self) -> int:
        return len(self.prototypes) - 1

    def discover(self, images: Tensor, *, noise: Tensor | None = None) -> Parts:
        """Assign every patch to a part; training passes Gumbel noise (`draw_noise`), evaluation none."""
        return self._assign(self.vit(self.resize(images)).feature_map, noise)

    def resize(self, images: Tensor) -> Tensor:
        """To the side at which parts are discovered, if that differs."""
        if self.size is None or images.shape[2:] == (self.size, self.size):
            return images
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """H×W of the part maps of these images."""
        return self.vit.grid(self.resize(images[:1]))

    def discover_transformed(self, images: Tensor, affine: Affine, *, noise: Tensor | None = None) -> Tensor:
        """[B, K+1, H, W]: the part maps of transformed images, transformed back; for the equivariance loss."""
        mean = self.vit.mean  # the warp fills with zero, which is the mean of normalised images
        transformed = warp_affine(images - mean, affine) + mean
        maps = self.discover(transformed, noise=noise).probabilities
        return unwarp_affine(maps, affine, (images.shape[-2], images.shape[-1]))

    @in_full_precision
    def _assign(self, features: Tensor, noise: Tensor | None) -> Parts:
        prototypes = self.prototypes.to(features.dtype)
        squares = features.square().sum(dim=1, keepdim=True), prototypes.square().sum(dim=1)[:, None, None]
        logits = 2 * self.inner_products(features) - squares[0] - squares[1]
        if self.gate is not None:
            logits = self._gated(features, logits[:, :-1])
        scores = self.scores(logits, noise)
        return Parts(features, logits, scores, scores.softmax(dim=1))

    def _gated(self, features: Tensor, parts: Tensor) -> Tensor:
        """[B, K+1, H, W]: part logits with that background logit which makes the foreground probability the gate's."""
        assert self.gate is not None
        gate = self.gate.to(features.dtype)
        foreground = torch.einsum("bdhw,d->bhw", features, gate[:-1]) + gate[-1]
        return torch.cat([parts, (parts.logsumexp(dim=1) - foreground)[:, None]], dim=1)

    @torch.no_grad()
    def start_from(self, start: ForegroundStart) -> None:
        """Take over a foreground and parts that were found by clustering; they are not trained."""
        assert self.gate is not None
        self.gate.copy_(start.gate)
        self.prototypes[:-1] = start.prototypes
        self.prototypes.requires_grad_(False)

    @in_full_precision
    def inner_products(self, features: Tensor) -> Tensor:
        """[B, K+1, H, W], of patches and prototypes. A matrix product, because convolutions may be rounded to TF32."""
        return torch.einsum("bdhw,kd->bkhw", features, self.prototypes.to(features.dtype))

    @in_full_precision
    def scores(self, logits: Tensor, noise: Tensor | None = None) -> Tensor:
        """[B, K+1, H, W]: the scores of these logits, also for another noise draw than that of `discover`."""
        return (logits if noise is None else logits + noise) / self.temperature

    def embed(self, parts: Parts) -> Tensor:
        """[B, D, K+1]: pooled, then one LayerNorm over both D and K+1 (PDiscoFormer's modulation)."""
        pooled, norm = pool(parts.features, parts.probabilities), self.modulation
        weight, bias = norm.weight.to(pooled.dtype), norm.bias.to(pooled.dtype)
        return F.layer_norm(pooled, norm.normalized_shape, weight, bias, norm.eps)  # not affected by autocast

    @in_full_precision
    def part_scores(self, embeddings: Tensor, keep_parts: Tensor | None = None) -> Tensor:
        """[B, C, K]: class logits of each part; zero where dropped, the others scaled by 1 / (1 - dropout)."""
        parts = embeddings[:, :, :-1]
        if keep_parts is not None:
            parts = parts * keep_parts[:, None] / (1 - self.dropout)
        return torch.einsum("bdk,cd->bck", parts, self.head.weight.to(parts.dtype))

    def class_logits(self, embeddings: Tensor, keep_parts: Tensor | None = None) -> Tensor:
        """[B, C]: the mean over all K parts, dropped or not."""
        return self.part_scores(embeddings, keep_parts).mean(dim=2)

    def draw_noise(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[B, K+1, H, W]: Gumbel noise for the part maps of these images."""
        return gumbel_noise((len(images), self.parts + 1, *self.grid(images)), images.device, generator)

    def draw_keep_parts(
        self, images: Tensor, rate: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """bool [B, K]: part dropout at this rate, by default that of the part classifier."""
        rate = self.dropout if rate is None else rate
        return torch.rand(len(images), self.parts, device=images.device, generator=generator) >= rate

    def look(self, images: Tensor) -> Sight:
        """Every patch that more likely belongs to a part than to the background."""
        parts = self.discover(images)
        return Sight(keep=hard_keep(parts.scores), parts=parts.probabilities)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.named_maps(self.discover(images).probabilities)

    @staticmethod
    def named_maps(probabilities: Tensor) -> dict[str, Tensor]:
        *parts, background = probabilities.unbind(dim=1)
        return {f"part {k}": part_map for k, part_map in enumerate(parts)} | {"background": background}

    def part_groups(self, head_lr_factor: float, prototype_lr_factor: float) -> list[ParameterGroup]:
        """Parameter groups of everything but the ViT; weight decay for the head only."""
        groups = [
            ParameterGroup([self.prototypes], prototype_lr_factor, decay=False),
            ParameterGroup(list(self.modulation.parameters()), head_lr_factor, decay=False),
            ParameterGroup(list(self.head.parameters()), head_lr_factor),
        ]
        return [replace(group, parameters=[p for p in group.parameters if p.requires_grad]) for group in groups]


def freeze(vit: ViT, *, tokens: bool = False) -> None:
    """Freeze the ViT, except for its CLS token, registers and position embeddings (with `tokens`, these too)."""
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name in TOKENS and not tokens)


@in_full_precision
def pool(features: Tensor, probabilities: Tensor) -> Tensor:
    """[B, D, K+1]: Σ A_k · feature / (H·W); the length of an embedding grows with the size of its part
    (PDiscoFormer)."""
    return torch.einsum("bkhw,bdhw->bdk", probabilities, features) / (features.shape[2] * features.shape[3])


# ---- masks ------------------------------------------------------------------------------------------------


def hard_keep(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """bool [B, H, W]: the hard mask, True where a part that is not dropped scores no lower than the background.

    It compares scores, not probabilities: where these underflow to 0, patches of a dropped part would tie and be kept.
    """
    return kept_parts(scores, keep_parts, -torch.inf).amax(dim=1) >= scores[:, -1]


def soft_keep(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W] in [0, 1]: the soft mask, the probability of the likeliest part not dropped (iFAM's ablation)."""
    return kept_parts(scores.softmax(dim=1), keep_parts, 0.0).max(dim=1).values


def foreground_probability(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W] in [0, 1]: the summed probability of all parts that are not dropped."""
    return kept_parts(scores.softmax(dim=1), keep_parts, 0.0).sum(dim=1)


def straight_through(scores: Tensor, keep_parts: Tensor | None = None) -> Tensor:
    """[B, H, W]: `hard_keep` in the forward pass, with the gradient of `foreground_probability` (straight-through
    estimator; iFAM, sec. 3.3)."""
    soft = foreground_probability(scores, keep_parts)
    return hard_keep(scores, keep_parts).to(soft.dtype) + (soft - soft.detach())


def kept_parts(values: Tensor, keep_parts: Tensor | None, instead: float) -> Tensor:
    """[B, K, H, W]: without the background, and with `instead` for dropped parts."""
    parts = values[:, :-1]
    return parts if keep_parts is None else parts.masked_fill(~keep_parts[..., None, None], instead)


def gumbel_noise(
    shape: Sequence[int], device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """Gumbel(0, 1) noise, always finite: an exponential draw in float32 may be exactly 0, whose logarithm is not."""
    return -torch.empty(*shape, device=device).exponential_(generator=generator).clamp_min_(1e-8).log_()
