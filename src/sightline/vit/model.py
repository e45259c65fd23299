"""The Vision Transformer, with exact hiding of patches and pixels.

Every backbone in Sightline is this class with another :class:`ViTConfig`. It takes RGB images with values in
[0, 1] (it normalises them itself), and what it may see:

    out = vit(images)                          # everything
    out = vit(images, keep)                    # only the patches where `keep` [B, H, W] is True
    out = vit(images, keep, keep_pixels)       # and inside them only the pixels where `keep_pixels` [B, h, w] is True

CLS and registers are always visible: they are learned, the same for every image, and contain nothing of it. There are
three ways of hiding, with the same result:

    removal    boolean `keep`; hidden patches are removed before the embedding. The default.
    mask       boolean `keep`; hidden patches are blanked before the embedding and masked in the attention.
               Static shapes: for compilation and export.
    weighted   float `keep` in [0, 1]; log(keep + 1e-10) is added to the attention scores, so that a gradient
               reaches `keep`. It uses the content of hidden patches, so it is for training only.

Shapes: B images of h×w pixels, H×W = N patches, D width, P prefix tokens (CLS and registers), T = P + N tokens.
Parameter names are timm's, so that most published files load as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block, PatchEmbed, initialise
from .config import IMAGENET_MEAN as IMAGENET_MEAN
from .config import IMAGENET_STD as IMAGENET_STD
from .config import Input as Input
from .config import ViTConfig as ViTConfig
from .masking import VisiblePatches, attention_bias, blank, check_not_float16
from .packing import Packing, can_pack
from .positions import Rotary, resize_position_embeddings, rotary_table, with_unrotated_prefix

Hide = Literal["removal", "mask", "weighted"]


@dataclass(frozen=True)
class ViTOutput:
    """The result of a forward pass. Hidden patches are zero, except under `weighted` hiding."""

    cls: Tensor  # [B, D], after the final norm, like registers and patches
    registers: Tensor  # [B, R, D]
    patches: Tensor  # [B, N, D], row by row
    grid: tuple[int, int]
    hide: Hide | None  # how hiding was done; None: nothing was hidden
    layout: str = ""  # of removal: how sequences of unequal length were computed; empty: all were equally long
    logits: Tensor | None = None  # [B, C], when there is a head
    cls_attention: Tensor | None = None  # [B, layers, heads, T]: attention of CLS in the requested blocks
    keys: Tensor | None = None  # [B, layers, heads, N, D/heads]: keys of the patches in the requested blocks
    attention: tuple[Tensor, ...] = ()  # [B, heads, T, T] per requested block; part of the graph

    @property
    def path(self) -> str:
        """The computation that produced this, in words: what `verify` certifies."""
        return ", ".join([self.hide or "nothing hidden", *filter(None, [self.layout])])

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.cls[:, None], self.registers, self.patches], dim=1)

    @property
    def feature_map(self) -> Tensor:
        return self.patches.transpose(1, 2).unflatten(2, self.grid)


ReadLogits = Callable[[ViTOutput], Tensor]  # class logits [B, C] from a ViT's output


def vit_logits(out: ViTOutput) -> Tensor:
    assert out.logits is not None, "a ViT without a head has no logits to explain"
    return out.logits


class ViT(nn.Module):
    origin: Any = None  # the source of the weights: set by `weights.load_backbone`
    mean: Tensor
    std: Tensor

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        D = config.width
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, D)) if config.registers else None
        # For patches only. A position embedding of CLS in a file is added to the CLS token on loading.
        learned = config.positions != "rotary"
        self.pos_embed = nn.Parameter(torch.zeros(1, math.prod(config.grid), D)) if learned else None
        self.patch_embed = PatchEmbed(config)
        self.norm_pre = nn.LayerNorm(D, config.norm_eps) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(D, config.norm_eps)
        self.fc_norm = nn.LayerNorm(D) if config.head_norm else nn.Identity()
        self.head = nn.Linear(D, config.classes, bias=config.head_bias) if config.classes else None
        self.register_buffer("mean", torch.tensor(config.input.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.input.std).view(3, 1, 1), persistent=False)
        self.apply(initialise)
        for parameter in (self.cls_token, self.reg_token, self.pos_embed):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)

    def extra_repr(self) -> str:
        return str(self.config)

    @property
    def prefix(self) -> int:
        return 1 + self.config.registers

    def forward(
        self,
        images: Tensor,
        keep: Tensor | None = None,
        keep_pixels: Tensor | None = None,
        *,
        hide: Hide | None = None,
        cls_attention: Sequence[int] = (),
        keys: Sequence[int] = (),
        attention: Sequence[int] = (),
    ) -> ViTOutput:
        """Encode the visible part of `images` [B, 3, h, w].

        `hide` defaults to `removal` for a boolean `keep` and to `weighted` for a float one. `cls_attention`, `keys`
        and `attention` are the blocks (0-based, negative from the end) whose values are returned. Full `attention`
        needs T×T memory per head and block and covers all tokens, so it excludes removal.
        """
        grid = self.grid(images)
        hide = self._choose_hide(images, keep, keep_pixels, grid, hide, attention)
        requested = {"cls_attention": cls_attention, "keys": keys, "attention": attention}
        requested = {name: [self._block_index(i) for i in blocks] for name, blocks in requested.items()}

        pixels = self._patchify((images - self.mean) / self.std)
        if keep_pixels is not None:
            pixels = blank(pixels, self._patchify(keep_pixels[:, None]).repeat(1, 1, 3))
        positions, visible, bias, packing = self._positions(grid), None, None, None
        if keep is not None:
            keep = keep.flatten(1)
            if hide == "removal":  # a shorter sequence, with its padding masked below
                visible = VisiblePatches.from_keep(keep)
                pixels, positions = visible.gather(pixels), [visible.gather(p) for p in positions]
                keep = visible.present
            if keep.dtype == torch.bool:
                pixels = blank(pixels, keep[..., None])
            if visible is not None and visible.padded and not any(requested.values()) and self.can_pack(pixels):
                packing = Packing.of(visible, self.prefix)
            elif visible is None or visible.padded:
                bias = self._key_bias(attention_bias(keep))

        x, rotary = self._embed(pixels, positions)
        padded = x.shape
        if packing is not None:
            x, rotary = packing.pack(x), self._pack_rotary(packing, rotary, len(x))
        if bias is not None and bias.requires_grad:
            x.requires_grad_()  # also of a frozen ViT: CUDA's attention saves its sums only if q, k or v need them
        captured = []
        for index, block in enumerate(self.blocks):
            asked = {name for name, blocks in requested.items() if index in blocks}
            x, values = block(x, bias, rotary, asked, packing)
            captured.append(values)
        x = self.norm(x)
        if packing is not None:
            x = packing.unpack(x, padded)

        patches = x[:, self.prefix :]
        if keep is not None and keep.dtype == torch.bool:
            patches = blank(patches, keep[..., None])
        return ViTOutput(
            cls=x[:, 0],
            registers=x[:, 1 : self.prefix],
            patches=patches if visible is None else visible.restore(patches),
            grid=grid,
            hide="weighted" if keep_pixels is not None and keep_pixels.dtype != torch.bool else hide,
            layout=f"packed, {packing.kernel}" if packing else "padded" if visible and visible.padded else "",
            logits=None if self.head is None else self.head(self.fc_norm(x[:, 0])),
            cls_attention=self._stack(
                [captured[i]["cls_attention"].mT for i in requested["cls_attention"]], visible, 0
            ),
            keys=self._stack([captured[i]["keys"] for i in requested["keys"]], visible, self.prefix),
            attention=tuple(captured[i]["attention"] for i in requested["attention"]),
        )

    def relevance_source(self) -> tuple[ViT, ReadLogits] | None:
        """As of a method (`sight.Method`): itself, if it has a head."""
        return None if self.head is None else (self, vit_logits)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """H×W: the patch grid of these images."""
        p = self.config.patch
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images must be floats [B, 3, h, w] in [0, 1], not {images.dtype} {list(images.shape)}")
        h, w = images.shape[-2:]
        if h % p or w % p or not h * w:
            nearest = f"{max(h // p, 1) * p}×{max(w // p, 1) * p}"
            raise ValueError(f"images of {h}×{w} do not divide into {p}×{p} patches; resize or crop, e.g. to {nearest}")
        return h // p, w // p

    def _choose_hide(self, images, keep, keep_pixels, grid, hide, attention) -> Hide | None:
        """Check the arguments and choose how patches are hidden."""
        for name, given, shape in (("keep", keep, grid), ("keep_pixels", keep_pixels, images.shape[-2:])):
            if given is None:
                continue
            if given.shape != (len(images), *shape):
                raise ValueError(f"{name} must have shape {[len(images), *shape]}, not {list(given.shape)}")
            if given.is_floating_point():
                check_not_float16(given, self.cls_token, images)
            elif given.dtype != torch.bool:
                raise ValueError(f"{name} must be boolean (exact hiding) or float (weighted), not {given.dtype}")
        if keep is None:
            if hide is not None:
                raise ValueError(f"hide={hide!r} needs keep, which is missing")
            return None if keep_pixels is None else "mask"
        weighted = keep.is_floating_point()
        hide = hide or ("weighted" if weighted else "mask" if attention else "removal")
        if weighted != (hide == "weighted"):
            raise ValueError(f"hide={hide!r} does not go with {keep.dtype} keep; weighted takes float, the others bool")
        if attention and hide == "removal":
            raise ValueError("full attention matrices cover all tokens; use hide='mask' instead of removal")
        return hide

    def _block_index(self, index: int) -> int:
        if not -self.config.depth <= index < self.config.depth:
            raise ValueError(f"no block {index}: this ViT has {self.config.depth} blocks")
        return index % self.config.depth

    def _patchify(self, images: Tensor) -> Tensor:
        """[B, c, h, w] -> [B, N, c·patch²], with pixels in the order of a convolution's weights."""
        p = self.config.patch
        B, c, h, w = images.shape
        return images.reshape(B, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, c * p * p)

    def _positions(self, grid: tuple[int, int]) -> list[Tensor]:
        """Learned position embeddings [1, N, D] for `grid`, or cosines and sines [1, N, D/heads] of rotary ones."""
        c = self.config
        if self.pos_embed is None:
            return list(rotary_table(grid, c.width // c.heads, c.rotary_base, self.cls_token.device))
        return [resize_position_embeddings(self.pos_embed, c.grid, grid, c.positions)]

    def _embed(self, pixels: Tensor, positions: list[Tensor]) -> tuple[Tensor, Rotary | None]:
        """Embed patches as tokens, with CLS and registers in front."""
        x, rotary = self.patch_embed(pixels), None
        x = x.to(self.cls_token.dtype)  # autocast must not round x
        if self.pos_embed is None:
            rotary = with_unrotated_prefix((positions[0], positions[1]), self.prefix)
        else:
            x = x + positions[0]
        prefix = [t.to(x.dtype).expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        return self.norm_pre(torch.cat([*prefix, x], dim=1)), rotary

    def _key_bias(self, scores: Tensor) -> Tensor:
        """The bias of the attention scores, [B, 1, 1, T], in their precision."""
        return F.pad(scores, (self.prefix, 0))[:, None, None].to(self._dtype(scores.device.type))

    def _dtype(self, device: str) -> torch.dtype:
        """Of queries, keys and values."""
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.cls_token.dtype

    def can_pack(self, x: Tensor) -> bool:
        """Whether removal computes sequences of unequal length without padding, on the device of `x`."""
        return can_pack(x, self._dtype(x.device.type), self.config.width // self.config.heads)

    def _pack_rotary(self, packing: Packing, rotary: Rotary | None, images: int) -> Rotary | None:
        if rotary is None:
            return None
        cos, sin = (packing.pack(table.expand(images, -1, -1)) for table in rotary)
        return cos, sin

    def _stack(self, values: list[Tensor], visible: VisiblePatches | None, start: int) -> Tensor | None:
        """[B, heads, tokens, c] per block -> [B, blocks, heads, tokens from `start` on, c] over the full grid."""
        if not values:
            return None
        x = torch.stack(values, dim=1)
        prefix, patches = x[:, :, :, start : self.prefix], x[:, :, :, self.prefix :]
        if visible is not None:
            B, L, H, n, c = patches.shape
            flat = blank(patches.permute(0, 3, 1, 2, 4).reshape(B, n, L * H * c), visible.present[..., None])
            patches = visible.restore(flat).view(B, -1, L, H, c).permute(0, 2, 3, 1, 4)
        return torch.cat([prefix, patches], dim=3).squeeze(-1)
