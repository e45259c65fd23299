"""Drawing what a model sees: hidden pixels greyed out, parts tinted, attention overlaid, grids of images."""

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

HIDDEN = 0.93  # a light grey, rare in photographs
PATCH = 16  # pixels of a patch where there is no image
CAPTION = 26  # height of a row's caption in pixels


def grey_out_hidden(images: Tensor, sight: Sight) -> Tensor:
    """The images with everything outside the sight greyed out: exactly what the prediction is based on."""
    visible = sight.visible(images.shape[-2:])
    return torch.where(visible[:, None], images, torch.full_like(images, HIDDEN))


def tint_parts(images: Tensor, sight: Sight) -> Tensor:
    """The visible pixels tinted by their most probable part; the rest greyed out."""
    assert sight.parts is not None, "this sight has no parts"
    size = (images.shape[-2], images.shape[-1])
    part = F.interpolate(sight.parts[:, :-1].float(), size, mode="bilinear").argmax(dim=1)
    K = sight.parts.shape[1] - 1
    colours = torch.tensor([hsv_to_rgb(k / K, 0.9, 1.0) for k in range(K)])
    tint = colours.to(images)[part].movedim(-1, 1)
    return grey_out_hidden(0.45 * images + 0.55 * tint, sight)


def overlay_attention(images: Tensor, maps: Tensor) -> Tensor:
    """The images, with brightness following the attention maps [n, H, W]."""
    brightness = (maps / maps.amax(dim=(1, 2), keepdim=True)).sqrt()
    return images * (0.1 + 0.9 * F.interpolate(brightness[:, None], images.shape[-2:]))


def image_grid(rows: dict[str, Tensor], gap: int = 6) -> Image.Image:
    """Rows of images [n, 3, h, w] under their captions."""
    n, _, h, w = next(iter(rows.values())).shape
    page = Image.new("RGB", (n * (w + gap) + gap, len(rows) * (h + CAPTION) + gap), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=15)
    for row, (caption, images) in enumerate(rows.items()):
        top = row * (h + CAPTION)
        draw.text((gap, top + 4), caption, fill="black", font=font)
        for column, image in enumerate(to_pil_images(images)):
            page.paste(image, (gap + column * (w + gap), top + CAPTION))
    return page


def to_pil_images(images: Tensor) -> Sequence[Image.Image]:
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in pixels]


def draw_sight(sight: Sight, images: Tensor | None) -> Image.Image:
    """The images, what is visible of them, and the parts if there are any."""
    if images is None:
        grey = torch.full((len(sight), 3, *image_size(sight)), 0.4)
        return image_grid({"visible": grey_out_hidden(grey, sight.to("cpu"))})
    rows = {"image": images, "visible": grey_out_hidden(images, sight)}
    return image_grid(rows if sight.parts is None else rows | {"parts": tint_parts(images, sight)})


def image_size(sight: Sight) -> tuple[int, int]:
    """The size of the images of this sight."""
    if sight.keep_pixels is not None:
        return sight.keep_pixels.shape[1], sight.keep_pixels.shape[2]
    if sight.keep is not None:
        return PATCH * sight.keep.shape[1], PATCH * sight.keep.shape[2]
    assert sight.boxes is not None, "a Sight without keep, keep_pixels and boxes has no size"
    return int(sight.boxes[..., 3].max()), int(sight.boxes[..., 2].max())
