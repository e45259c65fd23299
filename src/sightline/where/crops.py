"""Square crops as the answer to where to look: the ones that hold most attention (A²), and its controls.

    sight = CropSight(vit, sides=(2 / 7, 1 / 7)).look(images)     # two crops, of 64 and 32 of 224 pixels

A side is a share of the picture's shorter side, or, above 1, a number of pixels. Crops of one picture do not overlap.
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

BITS = 40  # of the strongest pixel's value: sums over up to 2²² pixels stay exact
NOWHERE = torch.iinfo(torch.int64).min


def greedy_crops(maps: Tensor, sides: Sequence[int], *, full: Literal["raise", "repeat"] = "raise") -> Tensor:
    """int64 [B, k, 4]: one after the other, the square of each side that holds most of `maps` [B, h, w] (A², sec. 3).

    They may touch, not overlap; the first in reading order wins a tie. Sums are of whole numbers, hence exact. Where
    earlier crops have left no room, `full` says whether that is an error or the crop before is taken once more.
    """
    integral = F.pad(in_whole_numbers(maps).cumsum(1).cumsum(2), (1, 0, 1, 0))
    h, w = maps.shape[1:]
    boxes = []
    for s in sides:
        if not 0 < s <= min(h, w):
            raise ValueError(f"a crop of {s} pixels does not fit into maps of {h}×{w}")
        bands = integral[:, s:] - integral[:, :-s]
        scores = bands[:, :, s:] - bands[:, :, :-s]
        if not boxes:
            scores = scores.masked_fill(~maps.isfinite().flatten(1).all(dim=1)[:, None, None], NOWHERE)
        boxes.append(best_square(scores, s, boxes, full))
    return torch.stack(boxes, dim=1)


def in_whole_numbers(maps: Tensor) -> Tensor:
    """int64, by a power of two for each map: nothing of a float32 is lost but what is below 2⁻⁴⁰ of the strongest."""
    maps = maps.double()
    exponent = maps.abs().amax(dim=(1, 2), keepdim=True).frexp().exponent
    return (maps * (BITS - exponent).double().exp2()).round().long()


def best_square(scores: Tensor, side: int, taken: list[Tensor], full: str) -> Tensor:
    """int64 [B, 4]: the corner [B, y, x] with the highest score from which a square overlaps no box `taken`."""
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
        if not taken:  # known only now, so that a GPU is not waited for once more
            raise ValueError("a map with NaN or infinite values: it has no best square")
        raise ValueError(f"no room for a crop of {side} pixels beside {len(taken)} others")
    return box


def random_crops(size: tuple[int, int], sides: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """int64 [B, k, 4]: squares at random places that do not overlap, one row for each generator."""
    boxes: list[Tensor] = []
    for s in sides:
        places = size[0] - s + 1, size[1] - s + 1
        chances = torch.stack([torch.randint(1 << 62, places, generator=g) for g in generators])
        boxes.append(best_square(chances, s, boxes, "repeat"))
    return torch.stack(boxes, dim=1)


def centre_crop(size: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    return left, top, left + side, top + side


def in_pixels(side: float, size: tuple[int, ...]) -> int:
    """Of a side that is a share of the picture's shorter one, or, above 1, already in pixels."""
    return max(1, round(side * min(size))) if side <= 1 else int(side)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear and antialiased; the same tensor where it has that size."""
    if images.shape[-2:] == size:
        return images
    return F.interpolate(images.float(), size, mode="bilinear", antialias=True).to(images.dtype)


class CropSight(nn.Module):
    """The crops that hold most of a ViT's attention. It sees the picture no larger than it was made for."""

    def __init__(self, vit: ViT, sides: Sequence[float] = (2 / 7,), layer: int = -1, heads: Heads = "mean"):
        super().__init__()
        self.vit, self.sides, self.layer, self.heads = vit, tuple(sides), layer, heads

    def look(self, images: Tensor) -> Sight:
        size = images.shape[-2:]
        pixels = F.interpolate(self.attention(images)[:, None], size, mode="bilinear")[:, 0]
        return Sight(boxes=greedy_crops(pixels, [in_pixels(side, size) for side in self.sides], full="repeat"))

    def attention(self, images: Tensor) -> Tensor:
        patch, made_for = self.vit.config.patch, self.vit.config.input.size
        h, w = (max(patch, min(pair) // patch * patch) for pair in zip(images.shape[-2:], made_for, strict=True))
        return cls_attention_map(self.vit, resized(images, (h, w)), self.layer, self.heads)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"attention": self.attention(images)}

    def extra_repr(self) -> str:
        return f"sides={self.sides}, layer={self.layer}, heads={self.heads}"


class CentreSight(nn.Module):
    """The picture's centre: where photographers put things."""

    def __init__(self, side: float = 4 / 7):
        super().__init__()
        self.side = side

    def look(self, images: Tensor) -> Sight:
        h, w = images.shape[-2:]
        box = torch.tensor(centre_crop((h, w), in_pixels(self.side, (h, w))), device=images.device)
        return Sight(boxes=box.expand(len(images), 1, 4))

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (there is nothing to draw but the crops)
        return {}

    def extra_repr(self) -> str:
        return f"side={self.side}"


class RandomSight(nn.Module):
    """Crops anywhere. Where they are depends on the seed and on the picture, so that it is always seen alike."""

    def __init__(self, sides: Sequence[float] = (2 / 7,), seed: int = 0):
        super().__init__()
        self.sides, self.seed = tuple(sides), seed

    def look(self, images: Tensor) -> Sight:
        h, w = images.shape[-2:]
        generators = [self._generator(image) for image in (images.float() * 255).round().to(torch.uint8).cpu()]
        boxes = random_crops((h, w), [in_pixels(side, (h, w)) for side in self.sides], generators)
        return Sight(boxes=boxes.to(images.device))

    def _generator(self, image: Tensor) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} ".encode() + image.contiguous().numpy().tobytes()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (there is nothing to draw but the crops)
        return {}

    def extra_repr(self) -> str:
        return f"sides={self.sides}, seed={self.seed}"
