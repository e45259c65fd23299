"""Pictures of what a model sees."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hsv_to_rgb

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..sight import Sight, spread

HIDDEN = 0.93  # a light grey that no photograph is full of
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
    return images * (0.1 + 0.9 * spread(light, images.shape[-2:])[:, None])


def sheet(rows: dict[str, Tensor], gap: int = 6) -> Image.Image:
    """Rows of pictures [n, 3, h, w] under their captions."""
    n, _, h, w = next(iter(rows.values())).shape
    page = Image.new("RGB", (n * (w + gap) + gap, len(rows) * (h + CAPTION) + gap), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=15)
    for row, (caption, images) in enumerate(rows.items()):
        top = row * (h + CAPTION)
        draw.text((gap, top + 4), caption, fill="black", font=font)
        for column, image in enumerate(to_pictures(images)):
            page.paste(image, (gap + column * (w + gap), top + CAPTION))
    return page


def to_pictures(images: Tensor) -> Sequence[Image.Image]:
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(one) for one in pixels]
