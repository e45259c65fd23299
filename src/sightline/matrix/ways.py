"""Ways to turn a selector's output into a sight: patches, pixels, or crops."""

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
from ..methods.a2 import CropPlan, parse_crop_sizes
from ..sight import Look, Sight
from ..what.zoom import Zoom, zoom_windows
from ..where.crops import greedy_crops, side_in_pixels

Sees = Literal["mask", "crop"]  # the rest is hidden, or cropped away
ZOOM = Zoom()


@dataclass(frozen=True)
class Way:
    """One way; if there are several, validation accuracy selects."""

    sides: tuple[str, ...] = ()  # of crops
    mass: float | None = None  # keep the patches that hold this fraction of a map's mass
    window: bool = False  # zoom into the window around the visible pixels

    @property
    def description(self) -> str:
        if self.mass is not None:
            return f"patches with {100 * self.mass:g} % of the map"
        if self.sides:
            return f"crops {'+'.join(self.sides)}"
        return "the window around it, enlarged" if self.window else "as it is"

    @property
    def numbers(self) -> tuple[float, ...]:
        return CropPlan(self.sides).side_values


def crop_ways(config: Matrix) -> list[Way]:
    """Every configured set of crops."""
    ways = [Way(sides=sides) for sides, _ in parse_crop_sizes(A2(config.data, crop_size=config.crop_size))]
    if not ways:
        raise UserError("--crop-size: name at least one side")
    return ways


def mass_ways(config: Matrix) -> list[Way]:
    if not config.attention_mass:
        raise UserError("--attention-mass: name at least one fraction")
    return [Way(mass=mass) for mass in config.attention_mass]


def keep_mass(maps: Tensor, mass: float) -> Tensor:
    """bool [B, H, W]: the fewest cells that hold this fraction of each map; the first of ties."""
    order = maps.flatten(1).double().sort(dim=1, descending=True, stable=True)
    before = order.values.cumsum(dim=1) - order.values
    wanted = before < mass * order.values.sum(dim=1, keepdim=True) * (1 - 1e-6)  # tolerance for rounding errors
    wanted[:, 0] = True
    return torch.zeros_like(wanted).scatter(1, order.indices, wanted).view_as(maps)


def sight_from_patches(keep: Tensor, size: tuple[int, int]) -> Sight:
    """From kept cells, whose grid need not divide the image size evenly."""
    if all(length % cells == 0 for length, cells in zip(size, keep.shape[1:], strict=True)):
        return Sight(keep=keep)
    return Sight(keep_pixels=F.interpolate(keep[:, None].float(), size, mode="nearest")[:, 0] > 0)


def crops_on(maps: Tensor, sides: Sequence[float], size: tuple[int, int]) -> Sight:
    """A²'s greedy crops: the squares of an image of this size that hold most of the maps [B, H, W]."""
    pixels = maps.float()
    if pixels.shape[1:] != size:
        pixels = F.interpolate(pixels[:, None], size, mode="bilinear")[:, 0]
    return Sight(boxes=greedy_crops(pixels, [side_in_pixels(side, size) for side in sides], full="repeat"))


def window_around(visible: Tensor) -> Tensor:
    """int64 [B, 1, 4]"""
    return zoom_windows(visible, margin=ZOOM.margin, smallest=ZOOM.smallest)[:, None]


def only_map(look: Look, images: Tensor) -> Tensor:
    """[B, H, W]: the map of a selector that has exactly one."""
    (found,) = look.maps(images).values()
    return found.float()


class TopMass(nn.Module):
    """Selects the patches that hold this fraction of another selector's map."""

    where: Look

    def __init__(self, where: Look, mass: float):
        super().__init__()
        self.where, self.mass = where, mass

    def look(self, images: Tensor) -> Sight:
        return sight_from_patches(
            keep_mass(only_map(self.where, images), self.mass), (images.shape[-2], images.shape[-1])
        )

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.where.maps(images)

    def extra_repr(self) -> str:
        return f"mass={self.mass}"
