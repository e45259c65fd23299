"""Drawing what a model sees: hidden pixels greyed out, parts tinted, rows of images on a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

if TYPE_CHECKING:
    from ..sight import Sight

HIDDEN = 0.93  # a light grey that no photograph is full of
CELL = 16  # pixels of a patch where there is no image
CAPTION = 26  # pixels above a row


def as_seen(images: Tensor, sight: Sight) -> Tensor:
    """The images with everything that is hidden greyed out: what the prediction was made from, and no more."""
    visible = sight.visible(images.shape[-2:])
    return torch.where(visible[:, None], images, torch.full_like(images, HIDDEN))


def with_parts(images: Tensor, sight: Sight) -> Tensor:
    """What may be seen, each pixel tinted by the part that it is most of; the rest greyed out."""
    assert sight.parts is not None, "a picture of parts needs parts"
    size = (images.shape[-2], images.shape[-1])
    part = F.interpolate(sight.parts[:, :-1].float(), size, mode="bilinear").argmax(dim=1)
    K = sight.parts.shape[1] - 1
    colours = torch.tensor([hsv_to_rgb(k / K, 0.9, 1.0) for k in range(K)])
    tint = colours.to(images)[part].movedim(-1, 1)
    return as_seen(0.45 * images + 0.55 * tint, sight)


def lit(images: Tensor, maps: Tensor) -> Tensor:
    """The images, as bright as the attention [n, H, W] that each place gets."""
    light = (maps / maps.amax(dim=(1, 2), keepdim=True)).sqrt()
    return images * (0.1 + 0.9 * F.interpolate(light[:, None], images.shape[-2:]))


def sheet(rows: dict[str, Tensor], gap: int = 6) -> Image.Image:
    """Rows of pictures [n, 3, h, w] under their captions."""
    n, _, h, w = next(iter(rows.values())).shape
    page = Image.new("RGB", (n * (w + gap) + gap, len(rows) * (h + CAPTION) + gap), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=15)
    for row, (caption, images) in enumerate(rows.items()):
        top = row * (h + CAPTION)
        draw.text((gap, top + 4), caption, fill="black", font=font)
        for column, image in enumerate(to_images(images)):
            page.paste(image, (gap + column * (w + gap), top + CAPTION))
    return page


def to_images(images: Tensor) -> Sequence[Image.Image]:
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(one) for one in pixels]


def draw_sight(sight: Sight, images: Tensor | None) -> Image.Image:
    """The pictures, what may be seen of them, and the parts in it, where there are any."""
    if images is None:
        grey = torch.full((len(sight), 3, *size_of(sight)), 0.4)
        return sheet({"what may be seen": as_seen(grey, sight.to("cpu"))})
    rows = {"the picture": images, "what it sees": as_seen(images, sight)}
    return sheet(rows if sight.parts is None else rows | {"its parts": with_parts(images, sight)})


def size_of(sight: Sight) -> tuple[int, int]:
    """Of pictures that it could be a sight of."""
    if sight.keep_pixels is not None:
        return sight.keep_pixels.shape[1], sight.keep_pixels.shape[2]
    if sight.keep is not None:
        return CELL * sight.keep.shape[1], CELL * sight.keep.shape[2]
    assert sight.boxes is not None, "an empty Sight says nothing about what may be seen"
    return int(sight.boxes[..., 3].max()), int(sight.boxes[..., 2].max())
