"""One image from a bird and a scene: the bird as photographed or moved, rotated and resized, perhaps with an object.

Masks are hard, one bit per pixel: every pixel inside is the bird's, and no pixel outside is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from ..errors import UserError
from .birds import Bird, Birds, Scenes

BICUBIC = Image.Resampling.BICUBIC
MAX_COVERED = 0.05  # fraction of the bird that a spurious object may cover
MAX_OVERLAP = 0.4  # fraction of the object that may lie on the bird: it should mostly be beside it
TRIES = 80  # positions for an object before it is made smaller
SUPERSAMPLING = 4  # objects are drawn this many times larger, then downsampled: smooth edges


@dataclass(frozen=True)
class Pose:
    """Where a cut-out bird goes; positions and extents are fractions of the image."""

    extent: float  # of the bird's bounding box, in the tighter direction
    x: float = 0.5  # of the box's centre
    y: float = 0.5
    angle: float = 0.0  # degrees, anticlockwise
    enlarge: bool = True  # False: only ever shrink


@dataclass(frozen=True)
class SpuriousObject:
    """A drawn object beside the bird; the seed determines its appearance and its position."""

    kind: str
    seed: int


@dataclass(frozen=True)
class ImagePlan:
    """Everything about an image but its pixels: which bird, on which scene, in which split and groups."""

    bird: Bird
    split: str
    label: str
    groups: Mapping[str, str]
    scene: str = ""  # "": the bird's own photograph
    variant: str = ""  # distinguishes several images of one bird
    pose: Pose | None = None  # None: where it was photographed
    spurious: SpuriousObject | None = None
    extra: Mapping[str, str] = field(default_factory=dict)  # further columns, which make no groups

    @property
    def name(self) -> str:
        return f"{self.variant}/{self.bird.name}" if self.variant else self.bird.name


@dataclass(frozen=True)
class PastedImage:
    """The pixels of an image, and where its bird is."""

    image: Image.Image
    mask: Image.Image  # the visible pixels of the bird
    box: tuple[float, ...]  # CUB's own for a bird that was not moved, else the mask's
    object_mask: Image.Image | None = None  # every pixel that the spurious object touches


def paste(plan: ImagePlan, birds: Birds, scenes: Scenes | None) -> PastedImage:
    bird = plan.bird
    photo, mask, box = birds.photo(bird), birds.mask(bird), bird.box
    if photo.size != mask.size or mask.getbbox() is None:
        problem = "is empty" if photo.size == mask.size else f"has size {mask.size}, the photograph {photo.size}"
        raise UserError(f"{birds.files.root / bird.mask}: the mask {problem}; restore it")
    image, object_mask = photo, None
    if plan.scene:
        assert scenes is not None, "a plan with a scene comes from a recipe that was given scenes"
        background = ImageOps.fit(scenes.photo(plan.scene), photo.size, BICUBIC)
        if plan.pose:
            photo, mask, box = move(photo, mask, plan.pose)
        image = Image.composite(photo, background, mask)
    if plan.spurious:
        image, object_mask = add_object(image, mask, plan.spurious)
        mask = Image.fromarray(np.asarray(mask) & ~np.asarray(object_mask))
    return PastedImage(image, mask, box, object_mask)


def move(photo: Image.Image, mask: Image.Image, pose: Pose) -> tuple[Image.Image, Image.Image, tuple[float, ...]]:
    """The bird alone on a canvas of the same size, its mask there, and its box."""
    bird = photo.convert("RGBA")
    bird.putalpha(mask.convert("L"))
    bird = bird.crop(mask.getbbox())
    scale = min(pose.extent * photo.width / bird.width, pose.extent * photo.height / bird.height)
    if not pose.enlarge:
        scale = min(scale, 1.0)
    # Pillow weights the colours of RGBA by their alpha: nothing of the old background gets into the bird's edge,
    # and filters without negative weights leave no bright rim.
    smooth = Image.Resampling.HAMMING if scale < 1 else Image.Resampling.BILINEAR
    bird = bird.resize((max(1, round(bird.width * scale)), max(1, round(bird.height * scale))), smooth)
    if pose.angle:
        bird = bird.rotate(pose.angle, Image.Resampling.BILINEAR, expand=True)
    alpha = bird.getchannel("A")
    threshold = min(128, alpha.getextrema()[1])  # so that the mask of a very thin bird is not empty
    shape = alpha.point(lambda level: 255 * (level >= threshold), mode="1")
    corner = round(pose.x * photo.width - bird.width / 2), round(pose.y * photo.height - bird.height / 2)
    canvas, moved = Image.new("RGB", photo.size), Image.new("1", photo.size)
    canvas.paste(bird.convert("RGB"), corner, shape)
    moved.paste(shape, corner)
    box = moved.getbbox()
    assert box is not None, "poses keep the bird in the image"
    return canvas, moved, box


def add_object(image: Image.Image, bird: Image.Image, spurious: SpuriousObject) -> tuple[Image.Image, Image.Image]:
    """The image with the object, and the object's mask: it touches the bird or is near, and covers little of it."""
    generator, shape, side = np.random.default_rng(spurious.seed), np.asarray(bird), float(min(image.size))
    style = generator.random(6)
    while True:
        drawing = OBJECTS[spurious.kind](style, side)
        opaque = np.asarray(drawing.getchannel("A")) > 0
        corners = list(_corners(spurious.kind, drawing.size, bird, generator))
        covered = [int((shape[y : y + opaque.shape[0], x : x + opaque.shape[1]] & opaque).sum()) for x, y in corners]
        if min(covered) <= MAX_COVERED * shape.sum() or max(drawing.size) <= 3:
            break
        side *= 0.8
    limit = min(MAX_COVERED * shape.sum(), MAX_OVERLAP * opaque.sum())
    touching = (corner for corner, pixels in zip(corners, covered, strict=True) if 0 < pixels <= limit)
    layer = Image.new("RGBA", image.size)
    layer.paste(drawing, next(touching, corners[int(np.argmin(covered))]))
    combined = Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")
    return combined, layer.getchannel("A").point(lambda level: 255 * (level > 0), mode="1")


def _corners(
    kind: str, size: tuple[int, int], bird: Image.Image, generator: np.random.Generator
) -> Iterable[tuple[int, int]]:
    """Top-left corners for an object of this size inside the image, around the bird; posts stand on the lower edge."""
    left, top, right, bottom = bird.getbbox() or (0, 0, *bird.size)
    room_x, room_y = bird.width - size[0], bird.height - size[1]
    for x, y in generator.random((TRIES, 2)):
        across = left - size[0] + x * (right - left + size[0])
        middle = (top + bottom) / 2 if kind == "buoy" else top  # buoys float low
        down = room_y if kind == "post" else middle - size[1] / 2 + y * (bottom - middle)
        yield int(np.clip(across, 0, room_x)), int(np.clip(down, 0, room_y))


def _tag(style: np.ndarray, side: float) -> Image.Image:
    """A card with a hole, a string and two lines of print."""
    w, h = round(0.15 * side * SUPERSAMPLING), round(0.22 * side * SUPERSAMPLING)
    tag = Image.new("RGBA", (w, h))
    draw, ink = ImageDraw.Draw(tag), (40, 36, 44, 255)
    line = max(1, h // 32)
    paper = _colour(style, (225, 150, 30), (255, 220, 70))
    draw.line((w / 2, h * 0.3, w * (0.3 + 0.4 * style[4]), 0), fill=(245, 240, 225, 255), width=2 * line)
    card = [(w * 0.28, h * 0.14), (w * 0.72, h * 0.14), (w - line, h * 0.34), (w - line, h - line), (line, h - line)]
    draw.polygon([*card, (line, h * 0.34)], fill=paper, outline=ink, width=line)
    draw.ellipse(_circle(w / 2, h * 0.28, w * 0.09), fill=(250, 250, 250, 255), outline=ink, width=line)
    for row, reach in ((0.52, 0.8), (0.68, 0.5 + 0.3 * style[3])):
        draw.rectangle((w * 0.2, h * row, w * reach, h * (row + 0.07)), fill=ink)
    return _downsample(tag.rotate(40 * style[5] - 20, BICUBIC, expand=True))


def _buoy(style: np.ndarray, side: float) -> Image.Image:
    """A red ball with a white band, and a lamp on a pole."""
    w, h = round(0.17 * side * SUPERSAMPLING), round(0.27 * side * SUPERSAMPLING)
    body, middle = Image.new("RGBA", (w, h)), h - w / 2
    draw, line = ImageDraw.Draw(body), max(1, h // 48)
    red = _colour(style, (190, 30, 30), (240, 70, 50))
    draw.line((w / 2, h * 0.08, w / 2, middle), fill=(60, 60, 66, 255), width=3 * line)
    draw.ellipse(_circle(w / 2, h * 0.08, h * 0.06), fill=(250, 220, 90, 255), outline=(60, 60, 66, 255), width=line)
    draw.polygon([(w * 0.3, middle), (w * 0.42, h * 0.2), (w * 0.58, h * 0.2), (w * 0.7, middle)], fill=red)
    ball = Image.new("L", (w, h))
    ImageDraw.Draw(ball).ellipse(_circle(w / 2, middle, w / 2 - 1), fill=255)
    paint = Image.new("RGBA", (w, h), red)
    band = ImageDraw.Draw(paint)
    band.rectangle((0, middle - h * 0.06, w, middle + h * 0.06), fill=(245, 245, 240, 255))
    band.ellipse((w * 0.2, middle - w * 0.38, w * 0.42, middle - w * 0.2), fill=(255, 200, 190, 255))
    body.paste(paint, (0, 0), ball)
    draw.ellipse(_circle(w / 2, middle, w / 2 - 1), outline=(70, 20, 20, 255), width=line)
    return _downsample(body.rotate(24 * style[3] - 12, BICUBIC, expand=True))


def _post(style: np.ndarray, side: float) -> Image.Image:
    """A wooden post with a slanted top and a blue and white band."""
    w, h = round(0.08 * side * SUPERSAMPLING), round((0.45 + 0.2 * style[3]) * side * SUPERSAMPLING)
    post = Image.new("RGBA", (w, h))
    draw, line = ImageDraw.Draw(post), max(1, w // 16)
    wood = _colour(style, (120, 85, 55), (160, 115, 75))
    dark = _colour(style, (70, 50, 32), (95, 68, 45))
    slant = w * (0.3 + 0.4 * style[4])
    draw.polygon([(0, slant), (w - 1, 0), (w - 1, h), (0, h)], fill=wood)
    for grain in (0.25, 0.5, 0.8):
        draw.line((w * grain, slant, w * (grain + 0.08), h), fill=dark, width=line)
    draw.rectangle((0, h * 0.2, w, h * 0.2 + w), fill=(35, 80, 170, 255))
    draw.rectangle((0, h * 0.2 + w * 0.35, w, h * 0.2 + w * 0.65), fill=(245, 245, 245, 255))
    draw.line([(0, h), (0, slant), (w - 1, 0), (w - 1, h)], fill=dark, width=line)
    return _downsample(post)


def _colour(style: np.ndarray, low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    return *(int(a + (b - a) * fraction) for a, b, fraction in zip(low, high, style[:3], strict=True)), 255


def _circle(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    return x - radius, y - radius, x + radius, y + radius


def _downsample(drawing: Image.Image) -> Image.Image:
    width, height = (max(2, round(length / SUPERSAMPLING)) for length in drawing.size)
    return drawing.resize((width, height), Image.Resampling.BOX)


OBJECTS: dict[str, Callable[[np.ndarray, float], Image.Image]] = {"tag": _tag, "buoy": _buoy, "post": _post}
