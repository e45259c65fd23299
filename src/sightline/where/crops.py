"""Square crops as selectors: those that hold most attention (A²), and its controls, centre and random crops.

    sight = CropSight(vit, sides=(2 / 7, 1 / 7)).look(images)     # two crops, of 64 and 32 of 224 pixels

A side is a fraction of the image's shorter side or, above 1, a number of pixels. Crops of one image do not overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sight import Sight
from ..vit.model import ViT
from .attention import Heads, cls_attention_map

BITS = 40  # of the integer for the largest value: sums over up to 2²² pixels stay exact
NOWHERE = torch.iinfo(torch.int64).min  # score of a position that is not allowed


def greedy_crops(maps: Tensor, sides: Sequence[int], *, full: Literal["raise", "repeat"] = "raise") -> Tensor:
    """int64 [B, k, 4]: greedily, the square of each side with the largest sum of `maps` [B, h, w] (A², sec. 3).

    Crops may touch but not overlap; ties go to the first in reading order. Sums are of integers, hence exact. Where
    earlier crops leave no room, `full` raises an error or repeats the crop before.
    """
    integral = F.pad(to_integers(maps).cumsum(1).cumsum(2), (1, 0, 1, 0))
    h, w = maps.shape[1:]
    boxes = []
    for s in sides:
        if not 0 < s <= min(h, w):
            raise ValueError(f"a crop of {s} pixels does not fit into maps of {h}×{w}")
        bands = integral[:, s:] - integral[:, :-s]
        scores = bands[:, :, s:] - bands[:, :, :-s]
        if not boxes:
            scores = scores.masked_fill(~maps.isfinite().flatten(1).all(dim=1)[:, None, None], NOWHERE)
        boxes.append(best_position(scores, s, boxes, full))
    return torch.stack(boxes, dim=1)


def to_integers(maps: Tensor) -> Tensor:
    """int64, scaled by a power of two per map; exact for float32 values down to 2⁻⁴⁰ of the largest."""
    maps = maps.double()
    exponent = maps.abs().amax(dim=(1, 2), keepdim=True).frexp().exponent
    return (maps * (BITS - exponent).double().exp2()).round().long()


def best_position(scores: Tensor, side: int, taken: list[Tensor], full: str) -> Tensor:
    """int64 [B, 4]: the square at the corner [B, y, x] with the highest score that overlaps no box in `taken`."""
    y, x = (torch.arange(length, device=scores.device) for length in scores.shape[1:])
    for left, top, right, bottom in (box.T[..., None] for box in taken):
        rows, columns = (y > top - side) & (y < bottom), (x > left - side) & (x < right)
        scores = scores.masked_fill(rows[:, :, None] & columns[:, None], NOWHERE)
    best = scores.flatten(1).argmax(dim=1)
    top, left = best // len(x), best % len(x)
    box = torch.stack([left, top, left + side, top + side], dim=1)
    room = scores.flatten(1).gather(1, best[:, None]) > NOWHERE
    if full == "repeat" and taken:
        return torch.where(room, box, taken[-1])
    if not room.all():
        if not taken:  # checked here to synchronise with the GPU only once
            raise ValueError("a map has NaN or infinite values, so no best crop")
        raise ValueError(f"no room for a crop of {side} pixels beside {len(taken)} others")
    return box


def random_crops(size: tuple[int, int], sides: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """int64 [B, k, 4]: squares at random positions that do not overlap, one row for each generator."""
    boxes: list[Tensor] = []
    for s in sides:
        positions = size[0] - s + 1, size[1] - s + 1
        scores = torch.stack([torch.randint(1 << 62, positions, generator=g) for g in generators])
        boxes.append(best_position(scores, s, boxes, "repeat"))
    return torch.stack(boxes, dim=1)


def side_in_pixels(side: float, size: tuple[int, ...]) -> int:
    """A side given as a fraction of the image's shorter side, or, above 1, already in pixels."""
    return max(1, round(side * min(size))) if side <= 1 else int(side)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear and antialiased; the same tensor if it has that size already."""
    if images.shape[-2:] == size:
        return images
    return F.interpolate(images.float(), size, mode="bilinear", antialias=True).to(images.dtype)


def vit_input_size(vit: ViT, size: tuple[int, ...]) -> tuple[int, int]:
    """The largest size of whole patches that exceeds neither `size` nor the input size of the ViT."""
    patch = vit.config.patch
    h, w = (max(patch, min(pair) // patch * patch) for pair in zip(size, vit.config.input.size, strict=True))
    return h, w


class CropSight(nn.Module):
    """The crops that hold most of a ViT's attention; it sees images no larger than its input size."""

    def __init__(self, vit: ViT, sides: Sequence[float] = (2 / 7,), layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.sides, self.layer, self.heads = vit, tuple(sides), layer, heads

    def look(self, images: Tensor) -> Sight:
        size = images.shape[-2:]
        pixels = F.interpolate(self.attention(images)[:, None], size, mode="bilinear")[:, 0]
        return Sight(boxes=greedy_crops(pixels, [side_in_pixels(side, size) for side in self.sides], full="repeat"))

    def attention(self, images: Tensor) -> Tensor:
        seen = resize(images, vit_input_size(self.vit, images.shape[-2:]))
        return cls_attention_map(self.vit, seen, self.layer, self.heads)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": self.attention(images)}

    def extra_repr(self) -> str:
        return f"sides={self.sides}, layer={self.layer}, heads={self.heads}"


class CentreSight(nn.Module):
    """A crop of the image's centre, where photographers put objects."""

    def __init__(self, side: float = 4 / 7):
        super().__init__()
        self.side = side

    def look(self, images: Tensor) -> Sight:
        h, w = images.shape[-2:]
        side = side_in_pixels(self.side, (h, w))
        top, left = (h - side) // 2, (w - side) // 2
        box = torch.tensor([left, top, left + side, top + side], device=images.device)
        return Sight(boxes=box.expand(len(images), 1, 4))

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (no map, only the crops)
        return {}

    def extra_repr(self) -> str:
        return f"side={self.side}"


class RandomSight(nn.Module):
    """Random crops. Positions depend on the seed and on a hash of the image, so they are the same at every call."""

    def __init__(self, sides: Sequence[float] = (2 / 7,), seed: int = 0):
        super().__init__()
        self.sides, self.seed = tuple(sides), seed

    def look(self, images: Tensor) -> Sight:
        h, w = images.shape[-2:]
        generators = [self._generator(image) for image in (images.float() * 255).round().to(torch.uint8).cpu()]
        boxes = random_crops((h, w), [side_in_pixels(side, (h, w)) for side in self.sides], generators)
        return Sight(boxes=boxes.to(images.device))

    def _generator(self, image: Tensor) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} ".encode() + image.contiguous().numpy().tobytes()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (no map, only the crops)
        return {}

    def extra_repr(self) -> str:
        return f"sides={self.sides}, seed={self.seed}"
