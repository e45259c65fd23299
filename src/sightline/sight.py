"""`Sight` and `Prediction`, and the interface that every method implements.

A `Sight` is all that passes from *where to look* to *what to make of it*: what is not in it does not exist for the
prediction. Everything that works with methods (verify, intervene, localize, audit, ...) uses `Method` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.drawing import draw_sight
from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from .vit.model import ViT, ViTOutput


@dataclass(frozen=True)
class Sight:
    """What may be seen of B images: whole patches, pixels inside them, or boxes.

    A pixel is visible if its patch is kept, it is kept itself, and it lies in a box; a field that is None restricts
    nothing. The masks are boolean, never weights: soft masks exist only in training, inside the methods.
    """

    keep: Tensor | None = None  # bool [B, H, W]: the patch grid, whose cells divide the image evenly
    keep_pixels: Tensor | None = None  # bool [B, h, w]
    boxes: Tensor | None = None  # int [B, k, 4]: left, top, right, bottom in pixels, right and bottom excluded
    parts: Tensor | None = None  # [B, K+1, H, W]: part probabilities, background last; explain, do not restrict

    def __post_init__(self):
        for name, ndim in (("keep", 3), ("keep_pixels", 3), ("boxes", 3), ("parts", 4)):
            value = getattr(self, name)
            if value is None:
                continue
            if value.ndim != ndim:
                raise ValueError(f"Sight.{name} has {ndim} dimensions, not {list(value.shape)}")
            if name.startswith("keep") and value.dtype != torch.bool:
                raise ValueError(f"Sight.{name} must be bool, not {value.dtype}")
        lengths = [len(value) for value in self._given().values()]
        if any(length != lengths[0] for length in lengths):  # one by one, so that export can trace any batch size
            raise ValueError("the fields of a Sight have different numbers of images")

    @classmethod
    def everything(cls, images: Tensor) -> Sight:
        return cls(keep=images.new_ones((len(images), 1, 1), dtype=torch.bool))

    @classmethod
    def of_pixels(cls, visible: Tensor, grid: tuple[int, ...], *, at_least: float = 0.1, exact: bool = True) -> Sight:
        """From a pixel mask [B, h, w]: keep the patches of which at least a fraction `at_least` is visible.

        `exact` also hides the other pixels of kept patches; without it kept patches are visible as a whole.
        """
        keep = cell_share(visible, grid) >= at_least
        return cls(keep=keep, keep_pixels=visible if exact else None)

    def visible(self, size: tuple[int, ...]) -> Tensor:
        """bool [B, h, w]: the pixels that may be seen, in images of this size."""
        given = self._given()
        given.pop("parts", None)
        if not given:
            raise ValueError("an empty Sight does not define what may be seen")
        first = next(iter(given.values()))
        visible = torch.ones(len(first), *size, dtype=torch.bool, device=first.device)
        if self.keep is not None:
            visible &= cells_to_pixels(self.keep, size)
        if self.keep_pixels is not None:
            if self.keep_pixels.shape[1:] != size:
                raise ValueError(f"keep_pixels is for images of {list(self.keep_pixels.shape[1:])}, not {list(size)}")
            visible &= self.keep_pixels
        if self.boxes is not None:
            visible &= inside_boxes(self.boxes, size)
        return visible

    def on_grid(self, grid: tuple[int, ...], size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The same sight as `keep` and `keep_pixels` for a ViT with this patch grid, exact to the pixel.

        This connects selectors and predictors with different patches, and boxes: a patch is kept if any of its pixels
        is visible; if not all are, the others are hidden.
        """
        if self.boxes is None and self.keep is not None and self.keep.shape[1:] == grid:
            return self.keep, self.keep_pixels
        visible = self.visible(size)
        share = cell_share(visible, grid)
        keep = share > 0
        return keep, None if bool((share[keep] == 1).all()) else visible

    def coverage(self, size: tuple[int, ...]) -> Tensor:
        """[B]: the fraction of each image that is visible."""
        return self.visible(size).float().mean(dim=(1, 2))

    def show(self, images: Tensor | None = None) -> Image:
        """An image of the visible parts of these images; without them, of the shape of the sight."""
        return draw_sight(self, images)

    def to(self, device: torch.device | str) -> Sight:
        return replace(self, **{name: value.to(device) for name, value in self._given().items()})

    def __len__(self) -> int:
        return len(next(iter(self._given().values())))

    def __getitem__(self, which: slice | Tensor | list[int]) -> Sight:
        return replace(self, **{name: value[which] for name, value in self._given().items()})

    def _given(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Prediction:
    """Logits, and the sight they were computed from."""

    logits: Tensor  # [B, C]
    sight: Sight
    tokens: Tensor | None = None  # [B, T, D]: the tokens the logits were computed from, zeros where hidden

    @property
    def probabilities(self) -> Tensor:
        return self.logits.float().softmax(dim=-1)

    @property
    def labels(self) -> Tensor:
        return self.logits.argmax(dim=-1)


@runtime_checkable
class Judge(Protocol):
    """*What*: the half of a method that predicts from a `Sight`. Images are floats [B, 3, h, w] in [0, 1]."""

    blind: bool
    """Whether nothing outside the sight can reach the prediction: what `sightline verify` proves or refutes."""

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        """Predict from nothing but `sight`: cheap, called many times."""
        ...


@runtime_checkable
class Look(Protocol):
    """*Where*: the half of a method that chooses the `Sight`."""

    def look(self, images: Tensor) -> Sight:
        """Choose the sight: costly, called once per image."""
        ...

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        """Named maps [B, H, W] to draw."""
        ...


class Method(nn.Module):
    """The interface of a method. Everything that works with methods relies on this, and on nothing else.

    A method must define `look`, `judge` and `maps` and declare `blind`; the rest has defaults.
    """

    blind: bool
    """Required. Whether nothing outside the sight can reach the prediction. A method that sees the whole image is
    blind outside its sight for the trivial reason that nothing is outside; it declares `sees_everything` as well."""
    sees_everything: bool = False
    """The sight is always the whole image, so that there is nothing to hide, draw or intervene on."""
    uses_sight: bool = True
    """Whether `judge` depends on the sight it is given; if not, evaluation need not call `look` first."""
    needs_masks: bool = False
    """Whether every image needs a mask that defines the sight (`look_at`)."""
    accepts_masks: bool = False
    """Whether `look_at` is available."""
    part_count: int = 0
    """K, the number of discovered parts; a method with parts is a `methods.base.PartMethod`."""
    export_graph: str = ""
    """Which traceable graph `sightline export` makes of it (a key of `export.graph.GRAPHS`); empty: not exportable."""
    export_obstacle: str = "its graph is not known"
    """Why it cannot be exported, where `export_graph` is empty."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(type(self), "blind"):
            raise TypeError(f"{type(self).__name__} must declare `blind`: whether hidden pixels cannot reach it")

    def look(self, images: Tensor) -> Sight:
        """Choose the sight: costly, called once per image."""
        raise NotImplementedError(f"{type(self).__name__}.look")

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        """Predict from nothing but `sight`: cheap, called many times."""
        raise NotImplementedError(f"{type(self).__name__}.judge")

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        """Named maps [B, H, W] to draw."""
        raise NotImplementedError(f"{type(self).__name__}.maps")

    def look_with_maps(self, images: Tensor) -> tuple[Sight, dict[str, Tensor]]:
        """Both `look` and `maps`; a method that computes them together does so once."""
        return self.look(images), self.maps(images)

    def look_at(self, images: Tensor, masks: Tensor) -> Sight:  # noqa: ARG002 (the interface)
        """The sight defined by masks, bool [B, h, w]."""
        raise UserError("--mask: this method takes no masks; ifam, early-mask and late-mask do")

    def with_masks(self, rows: Any) -> Any:
        """The rows of a dataset with the masks that this method uses; by default unchanged."""
        return rows

    def relevance_source(self) -> tuple[ViT, Callable[[ViTOutput], Tensor]] | None:
        """What relevance maps explain: the ViT whose CLS token alone the method predicts from, and how class logits
        [B, C] follow from its output. None if it hides anything, or predicts in another way."""
        return None


def cells_to_pixels(cells: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, H, W] over cells -> [B, h, w] over pixels."""
    H, W = cells.shape[1:]
    if size[0] % H or size[1] % W:
        raise ValueError(f"a grid of {H}×{W} cells does not divide an image of {size[0]}×{size[1]} pixels")
    return cells.repeat_interleave(size[0] // H, dim=1).repeat_interleave(size[1] // W, dim=2)


def cell_share(pixels: Tensor, grid: tuple[int, ...]) -> Tensor:
    """[B, h, w] over pixels -> [B, H, W]: the fraction of True pixels in each cell. Of a grid that does not divide the
    image evenly, every cell is the smallest block of whole pixels that contains it."""
    h, w = pixels.shape[1:]
    values = pixels[:, None].float()
    if h % grid[0] or w % grid[1]:
        return F.adaptive_avg_pool2d(values, (grid[0], grid[1]))[:, 0]
    return F.avg_pool2d(values, (h // grid[0], w // grid[1]))[:, 0]


def inside_boxes(boxes: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, k, 4] -> bool [B, h, w]: in the union of each image's boxes."""
    y = torch.arange(size[0], device=boxes.device)[:, None]
    x = torch.arange(size[1], device=boxes.device)
    left, top, right, bottom = boxes[..., None, None].unbind(dim=2)
    return ((x >= left) & (x < right) & (y >= top) & (y < bottom)).any(dim=1)
