"""Ways to make a sight of what a where shows: patches, pixels, or crops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import A2
from ..config.matrix import Matrix
from ..errors import UserError
from ..methods.a2 import Crops, plans
from ..sight import Look, Sight
from ..what.zoom import Zoom, zoom_boxes
from ..where.crops import greedy_crops, in_pixels

Sees = Literal["mask", "crop"]  # all else is hidden, or cut off
CLOSER = Zoom()


@dataclass(frozen=True)
class Way:
    """One of them; where there are several, validation data choose."""

    sides: tuple[str, ...] = ()  # of crops
    mass: float | None = None  # of a map: the patches that hold so much of it are kept
    window: bool = False  # around what is visible, enlarged

    @property
    def words(self) -> str:
        if self.mass is not None:
            return f"patches with {100 * self.mass:g} % of the map"
        if self.sides:
            return f"crops {'+'.join(self.sides)}"
        return "the window around it, enlarged" if self.window else "as it is"

    @property
    def numbers(self) -> tuple[float, ...]:
        return Crops(self.sides).numbers


def crop_ways(config: Matrix) -> list[Way]:
    """Every plan of crops that was asked for."""
    ways = [Way(sides=sides) for sides, _ in plans(A2(config.data, crop=config.crop))]
    if not ways:
        raise UserError("--crop: name at least one side")
    return ways


def mass_ways(config: Matrix) -> list[Way]:
    for mass in config.mass:
        if not 0 < mass <= 1:
            raise UserError(f"--mass {mass}: a share above 0, at most 1")
    if not config.mass:
        raise UserError("--mass: name at least one share")
    return [Way(mass=mass) for mass in config.mass]


def most_of(maps: Tensor, mass: float) -> Tensor:
    """bool [B, H, W]: the fewest cells that hold this share of each map, the first of equals."""
    order = maps.flatten(1).double().sort(dim=1, descending=True, stable=True)
    before = order.values.cumsum(dim=1) - order.values
    wanted = before < mass * order.values.sum(dim=1, keepdim=True) * (1 - 1e-6)  # maps are not exact
    wanted[:, 0] = True
    return torch.zeros_like(wanted).scatter(1, order.indices, wanted).view_as(maps)


def showing(keep: Tensor, size: tuple[int, int]) -> Sight:
    """Cells that need not divide a picture of this size evenly."""
    if all(length % cells == 0 for length, cells in zip(size, keep.shape[1:], strict=True)):
        return Sight(keep=keep)
    return Sight(keep_pixels=F.interpolate(keep[:, None].float(), size, mode="nearest")[:, 0] > 0)


def crops_on(maps: Tensor, sides: Sequence[float], size: tuple[int, int]) -> Sight:
    """A²'s: the squares of a picture of this size that hold most of the maps [B, H, W]."""
    pixels = maps.float()
    if pixels.shape[1:] != size:
        pixels = F.interpolate(pixels[:, None], size, mode="bilinear")[:, 0]
    return Sight(boxes=greedy_crops(pixels, [in_pixels(side, size) for side in sides], full="repeat"))


def window_around(visible: Tensor) -> Tensor:
    """int64 [B, 1, 4]"""
    return zoom_boxes(visible, margin=CLOSER.margin, smallest=CLOSER.smallest)[:, None]


def only_map(look: Look, images: Tensor) -> Tensor:
    """[B, H, W]: of something that has one."""
    (found,) = look.maps(images).values()
    return found.float()


class Most(nn.Module):
    """Looks at the patches that hold this share of another's map."""

    where: Look

    def __init__(self, where: Look, mass: float):
        super().__init__()
        self.where, self.mass = where, mass

    def look(self, images: Tensor) -> Sight:
        return showing(most_of(only_map(self.where, images), self.mass), (images.shape[-2], images.shape[-1]))

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)

    def extra_repr(self) -> str:
        return f"mass={self.mass}"
