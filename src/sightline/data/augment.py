"""Augmentation: batched, on the device of the images, joint for images, masks, boxes and keypoints.

    augment = replace(PRESETS["light"], size=(224, 224))
    seen = augment(Pictures(images, masks), seed=0, epoch=3, indices=indices)

What happens to an image follows from (seed, epoch, its index in the data set) and from nothing else: not from the
rest of its batch, nor the number of processes, nor the device, nor from what was drawn before.

Colours change first, on the whole canvas. Then all geometry is one affine map and one resampling, so that whatever it
uncovers is exactly the fill colour. Shrinking does not alias: the resize before a plain crop is antialiased, and an
image that its own crop or zoom shrinks more than 1.5 times is read from a halved copy.

Boxes are edges (pixel i reaches from i to i + 1); keypoints name pixels (mask[y, x] is the one at x, y).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..vit.model import IMAGENET_MEAN
from .colours import GEOMETRIC, OPERATIONS, Round, coloured, operated

RATIOS = (3 / 4, 4 / 3)  # width : height of a random resized crop
SHARP_ENOUGH = 1.5  # source pixels per target pixel that bilinear reading stands without visible aliasing
MAGNITUDE_SPREAD = 0.5  # of RandAugment's magnitude, in its own units from 0 to 10

DRAWS = ("flip", "angle", "x", "y", "scale", "area", "ratio", "crop_x", "crop_y")
DRAWS += ("brightness", "contrast", "saturation", "hue", "planckian", "illuminant")
DRAWS_PER_ROUND = 4  # of RandAugment


@dataclass(frozen=True)
class Pictures:
    """A batch of pictures, and where things are in them."""

    images: Tensor  # [B, 3, h, w]: uint8, or float in [0, 1]
    masks: Tensor | None = None  # bool [B, h, w]
    boxes: Tensor | None = None  # float [B, k, 4]: left, top, right, bottom in pixels; NaN where there is none
    keypoints: Tensor | None = None  # float [B, K, 3]: x, y in pixels, visible 0 or 1

    def __post_init__(self):
        shape = self.images.shape
        if len(shape) != 4 or shape[1] != 3:
            raise ValueError(f"images are [B, 3, h, w], not {list(shape)}")
        if self.masks is not None and (self.masks.dtype != torch.bool or self.masks.shape != (shape[0], *shape[2:])):
            raise ValueError(f"masks are bool [B, h, w] like their images, not {list(self.masks.shape)}")
        for name, value, last in (("boxes", self.boxes, 4), ("keypoints", self.keypoints, 3)):
            if value is not None and (value.ndim != 3 or len(value) != shape[0] or value.shape[2] != last):
                raise ValueError(f"{name} are [B, any, {last}], not {list(value.shape)}")


@dataclass(frozen=True)
class Augment:
    """How pictures are varied; apart from the flip, nothing varies unless asked for."""

    size: tuple[int, int] = (224, 224)
    """Height and width of what comes out, in pixels."""
    crop: float = 1.0
    """Resize until size / crop is just covered, then cut out `size`: 0.875 means 256 before 224."""
    random_crop: bool = False
    """Cut anywhere, not from the centre."""
    random_resized_crop: tuple[float, float] | None = None
    """Instead: cut out a share of the area between these two, sides between 3:4 and 4:3, and resize that."""
    flip: float = 0.5
    """Probability of left becoming right."""
    degrees: float = 0.0
    """Turn by up to this angle, either way."""
    translate: float = 0.0
    """Move by up to this share of width and height, either way."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Enlarge by a factor between these two."""
    brightness: float = 0.0
    """Multiply by 1 ± up to this; likewise contrast and saturation."""
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    """Turn the hue by up to this share of the colour circle, either way."""
    planckian: float = 0.0
    """Probability of other light: one of 25 black bodies of 3,000 to 15,000 K."""
    randaugment: tuple[int, float] | None = None
    """RandAugment: how many operations, and their magnitude from 0 to 10."""
    fill: tuple[float, float, float] = IMAGENET_MEAN
    """The colour of what lies outside the picture."""
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self):
        rounds, magnitude = self.randaugment or (0, 0)
        shares = self.random_resized_crop or (1, 1)
        jitter = min(self.brightness, self.contrast, self.saturation)
        for name, good, expected in (
            ("size", min(self.size) >= 1, "height and width are at least 1 pixel"),
            ("crop", 0 < self.crop <= 1, "a share above 0, at most 1"),
            ("random_resized_crop", 0 < shares[0] <= shares[1] <= 1, "two shares above 0, at most 1, smaller first"),
            ("flip", 0 <= self.flip <= 1, "a probability lies between 0 and 1"),
            ("degrees", 0 <= self.degrees <= 180, "an angle between 0 and 180"),
            ("translate", 0 <= self.translate <= 1, "a share between 0 and 1"),
            ("scale", 0 < self.scale[0] <= self.scale[1], "two factors above 0, smaller first"),
            ("brightness, contrast, saturation", jitter >= 0, "none is below 0"),
            ("hue", 0 <= self.hue <= 0.5, "a share of the colour circle between 0 and 0.5"),
            ("planckian", 0 <= self.planckian <= 1, "a probability lies between 0 and 1"),
            ("randaugment", rounds >= 0 and 0 <= magnitude <= 10, "a number of operations, a magnitude of 0 to 10"),
            ("fill", min(self.fill) >= 0 and max(self.fill) <= 1, "red, green and blue lie between 0 and 1"),
        ):
            if not good:
                value = getattr(self, name, "")
                raise UserError(f"augmentation: {name} {value}: {expected}")

    @torch.no_grad()
    def __call__(self, pictures: Pictures, *, seed: int, epoch: int, indices: Tensor) -> Pictures:
        """Images become float [B, 3, H, W] in [0, 1]; boxes that leave the picture NaN, keypoints invisible."""
        draws, rounds = _drawn(self, seed, epoch, indices)
        images = pictures.images.float()
        if not pictures.images.is_floating_point():
            images = images / 255
        images = operated(coloured(images, self, draws, rounds), rounds)
        forward = _forward(self, pictures.images.shape[2:], draws, rounds)
        images, masks = _placed(self, images, pictures.masks, forward)
        boxes, keypoints = pictures.boxes, pictures.keypoints
        return Pictures(
            images=images,
            masks=masks,
            boxes=None if boxes is None else _placed_boxes(boxes, forward, self.size),
            keypoints=None if keypoints is None else _placed_keypoints(keypoints, forward, self.size),
        )

    @property
    def moves(self) -> bool:
        """Whether geometry varies. Asked of the settings, not of a batch: an image's company must not matter."""
        varied = self.flip or self.degrees or self.translate or tuple(self.scale) != (1, 1)
        return bool(varied or self.random_crop or self.random_resized_crop or self.randaugment)


PRESETS = {
    "none": Augment(flip=0.0),
    "light": Augment(random_resized_crop=(0.5, 1.0)),
    # iFAM's "cub_original", black corners and all.
    "published": Augment(
        random_crop=True, planckian=0.8, degrees=90.0, translate=0.2, scale=(0.8, 1.2), fill=(0.0, 0.0, 0.0)
    ),
    "imagenet": Augment(
        random_resized_crop=(0.08, 1.0),
        brightness=0.4,
        contrast=0.4,
        saturation=0.4,
        randaugment=(2, 6.0),
        resample="bicubic",
    ),
}


def uniforms(seed: int, epoch: int, indices: Tensor, count: int) -> Tensor:
    """float64 [B, count] in [0, 1), on the CPU: SplitMix64 (Steele et al., 2014) as a hash of all that is given."""
    step = np.uint64(0x9E3779B97F4A7C15)
    key = _scrambled(np.array([seed % 2**64], dtype=np.uint64) + step)
    key = _scrambled((key ^ np.uint64(epoch % 2**64)) + step)
    key = _scrambled((key ^ indices.cpu().numpy().astype(np.int64).view(np.uint64)) + step)
    bits = _scrambled(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * step)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _scrambled(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _drawn(how: Augment, seed: int, epoch: int, indices: Tensor) -> tuple[dict[str, Tensor], list[Round]]:
    """A setting's draws stay the same whatever the other settings are."""
    count, magnitude = how.randaugment or (0, 0.0)
    columns = uniforms(seed, epoch, indices, len(DRAWS) + DRAWS_PER_ROUND * count).T
    rounds = []
    for which, whether, spread, sign in columns[len(DRAWS) :].unflatten(0, (count, DRAWS_PER_ROUND)):
        operation = torch.where(whether < 0.5, (which * len(OPERATIONS)).long(), -1)
        strength = (magnitude + MAGNITUDE_SPREAD * torch.special.ndtri(spread)).clamp(0, 10) / 10
        rounds.append((operation, torch.where(sign < 0.5, -strength, strength)))
    return dict(zip(DRAWS, columns, strict=False)), rounds


# Geometry: [B, 3, 3] in float64 on the CPU, from pixels of the canvas to pixels of the target, edges at 0 and w.


def _matrices(*rows: Tensor | float) -> Tensor:
    """From the six numbers of the first two rows, each of them one for all images or [B]."""
    entries = torch.broadcast_tensors(*(torch.as_tensor(entry, dtype=torch.float64) for entry in (*rows, 0, 0, 1)))
    return torch.stack(entries, -1).unflatten(-1, (3, 3))


def _shift(x: Tensor | float, y: Tensor | float) -> Tensor:
    return _matrices(1, 0, x, 0, 1, y)


def _stretch(x: Tensor | float, y: Tensor | float) -> Tensor:
    return _matrices(x, 0, 0, 0, y, 0)


def _turn(degrees: Tensor | float) -> Tensor:
    """Clockwise, as y points down."""
    angle = torch.as_tensor(degrees, dtype=torch.float64).deg2rad()
    return _matrices(angle.cos(), -angle.sin(), 0, angle.sin(), angle.cos(), 0)


def _about_centre(matrix: Tensor, size: tuple[int, ...]) -> Tensor:
    h, w = size
    return _shift(w / 2, h / 2) @ matrix @ _shift(-w / 2, -h / 2)


def _forward(how: Augment, canvas: tuple[int, ...], draws: dict[str, Tensor], rounds: list[Round]) -> Tensor:
    either_way = {name: 2 * draw - 1 for name, draw in draws.items()}
    if how.random_resized_crop is None:
        (h, w), (top, left) = _window(how, canvas)
        if how.random_crop:
            left = (draws["crop_x"] * (w - how.size[1] + 1)).floor()
            top = (draws["crop_y"] * (h - how.size[0] + 1)).floor()
        fitted, cut = _stretch(w / canvas[1], h / canvas[0]), _shift(-left, -top)
    else:
        (h, w), fitted, cut = how.size, _resized_crop(how, canvas, draws), _shift(0, 0)
    low, high = how.scale
    zoom = low + (high - low) * draws["scale"]
    varied = _stretch(torch.where(draws["flip"] < how.flip, -1.0, 1.0), 1)
    varied = _turn(how.degrees * either_way["angle"]) @ _stretch(zoom, zoom) @ varied
    varied = _shift(how.translate * w * either_way["x"], how.translate * h * either_way["y"]) @ varied
    for operation, amount in rounds:
        turn, lean_x, lean_y, x, y = (amount * (operation == OPERATIONS.index(name)) for name in GEOMETRIC)
        varied = _shift(0.45 * w * x, 0.45 * h * y) @ _turn(30 * turn) @ varied
        varied = _matrices(1, 0.3 * lean_x, 0, 0.3 * lean_y, 1, 0) @ varied
    return cut @ _about_centre(varied, (h, w)) @ fitted


def _window(how: Augment, canvas: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The resized canvas, and the corner of the centre cut: the rounding is that of `images.to_tensor`."""
    (h, w), (H, W) = canvas, how.size
    scale = max(math.floor(H / how.crop) / h, math.floor(W / how.crop) / w)
    h, w = max(H, round(h * scale)), max(W, round(w * scale))
    return (h, w), (round((h - H) / 2), round((w - W) / 2))


def _resized_crop(how: Augment, canvas: tuple[int, ...], draws: dict[str, Tensor]) -> Tensor:
    """The ratio is drawn among those that fit the canvas; on a very long canvas none does, and the area gives way."""
    assert how.random_resized_crop is not None
    (h, w), (low, high) = canvas, how.random_resized_crop
    share = low + (high - low) * draws["area"]
    narrow, wide = (share * w / h).clamp(*RATIOS).log(), (w / h / share).clamp(*RATIOS).log()
    ratio = (narrow + (wide - narrow) * draws["ratio"]).exp()
    width, height = (share * h * w * ratio).sqrt(), (share * h * w / ratio).sqrt()
    fits = torch.minimum(w / width, h / height).clamp(max=1)
    width, height = width * fits, height * fits
    corner = _shift(-draws["crop_x"] * (w - width), -draws["crop_y"] * (h - height))
    return _stretch(how.size[1] / width, how.size[0] / height) @ corner


def _placed(how: Augment, images: Tensor, masks: Tensor | None, forward: Tensor) -> tuple[Tensor, Tensor | None]:
    canvas, (H, W) = images.shape[2:], how.size
    resized, (top, left) = _window(how, canvas)
    if how.random_resized_crop is None and resized != canvas:
        images = F.interpolate(images, resized, mode=how.resample, antialias=True).clamp_(0, 1)
    if not how.moves:
        if masks is not None and resized != canvas:
            masks = F.interpolate(masks[:, None].float(), resized, mode="nearest-exact")[:, 0] > 0
        rows, columns = slice(top, top + H), slice(left, left + W)
        return images[:, :, rows, columns], None if masks is None else masks[:, rows, columns]
    backward = _backward(forward, canvas, how.size)
    grid = _grid(backward, how.size, images)
    images = _read(images, grid, backward, how.resample)
    if (backward[:, :2].abs().sum(2) > 1 + 1e-9).any():
        inside = grid.abs().amax(3) <= 1
        fill = torch.tensor(how.fill, dtype=images.dtype).to(images.device, non_blocking=True)
        images = torch.where(inside[:, None], images, fill[:, None, None])
    if masks is not None:
        masks = F.grid_sample(masks[:, None].float(), grid, mode="nearest", align_corners=False)[:, 0] > 0
    return images, masks


def _backward(forward: Tensor, canvas: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """From target to canvas, both from -1 to 1 whatever their resolution."""
    (h, w), (H, W) = canvas, size
    canvas_pixels, target_pixels = (_stretch(x / 2, y / 2) @ _shift(1, 1) for x, y in ((w, h), (W, H)))
    return torch.linalg.inv(forward @ canvas_pixels) @ target_pixels


def _grid(backward: Tensor, size: tuple[int, ...], like: Tensor) -> Tensor:
    """[B, H, W, 2] for grid_sample. Written out, because a matrix product may be rounded to TF32 or bfloat16."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    y, x = ((torch.arange(n, dtype=dtype, device=like.device) * 2 + 1) / n - 1 for n in size)
    rows = backward[:, :2].to(dtype).to(like.device, non_blocking=True)  # nothing here waits for the device
    grid = torch.empty(len(rows), *size, 2, dtype=dtype, device=like.device)
    for axis in (0, 1):
        across, down, offset = rows[:, axis, :, None].unbind(1)
        torch.add((across * x)[:, None, :], (down * y + offset)[:, :, None], out=grid[..., axis])
    return grid


def _read(images: Tensor, grid: Tensor, backward: Tensor, mode: str) -> Tensor:
    sides = torch.tensor(images.shape[:1:-1], dtype=torch.float64)
    targets = torch.tensor(grid.shape[2:0:-1], dtype=torch.float64)
    shrinks = torch.linalg.matrix_norm(backward[:, :2, :2] * sides[:, None] / targets, ord=2)
    levels = (shrinks / SHARP_ENOUGH).log2().ceil().clamp(min=0).int()
    if not levels.any():
        return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False).clamp_(0, 1)
    read = images.new_empty(len(images), 3, *grid.shape[1:3])
    for level in levels.unique().tolist():
        here = (levels == level).nonzero()[:, 0].to(images.device, non_blocking=True)
        halved = [max(1, side >> level) for side in images.shape[2:]]
        some = F.interpolate(images[here], halved, mode="bilinear", antialias=True) if level else images[here]
        read[here] = F.grid_sample(some, grid[here], mode=mode, padding_mode="border", align_corners=False).clamp_(0, 1)
    return read


def _placed_points(x: Tensor, y: Tensor, forward: Tensor) -> Iterator[Tensor]:
    for row in forward[:, :2].to(x.dtype).to(x.device, non_blocking=True).unbind(1):
        across, down, offset = row[:, :, None].unbind(1)
        yield across * x + down * y + offset


def _placed_boxes(boxes: Tensor, forward: Tensor, size: tuple[int, int]) -> Tensor:
    """What bounds the four moved corners, clipped."""
    k = boxes.shape[1]
    x, y = _placed_points(boxes[..., [0, 2, 2, 0]].flatten(1), boxes[..., [1, 1, 3, 3]].flatten(1), forward)
    (left, right), (top, bottom) = (
        (side.unflatten(1, (k, 4)).amin(2).clamp(0, end), side.unflatten(1, (k, 4)).amax(2).clamp(0, end))
        for side, end in ((x, size[1]), (y, size[0]))
    )
    there = (left < right) & (top < bottom)
    return torch.where(there[..., None], torch.stack([left, top, right, bottom], 2), torch.nan)


def _placed_keypoints(keypoints: Tensor, forward: Tensor, size: tuple[int, int]) -> Tensor:
    x, y = _placed_points(keypoints[..., 0] + 0.5, keypoints[..., 1] + 0.5, forward)
    inside = (x >= 0) & (x < size[1]) & (y >= 0) & (y < size[0])
    return torch.stack([x - 0.5, y - 0.5, torch.where(inside, keypoints[..., 2], 0)], 2)


# iFAM's equivariance loss: one random affine map for a whole batch, and its inverse on the part maps


@dataclass(frozen=True)
class Affine:
    """About the centre: turn (degrees, clockwise), enlarge, then move (pixels)."""

    angle: float = 0.0
    x: float = 0.0
    y: float = 0.0
    scale: float = 1.0


def random_affine(
    size: tuple[int, int],
    *,
    seed: int,
    step: int,
    degrees: float = 90.0,
    translate: float = 0.11,
    scale: tuple[float, float] = (0.8, 1.4),
) -> Affine:
    """One for each step of training, with moves of whole pixels; the defaults are iFAM's."""
    no_epoch = -1  # so that no image of the same seed shares these draws
    angle, x, y, zoom = uniforms(seed, no_epoch, torch.tensor([step]), 4)[0].tolist()
    x, y = (round((2 * draw - 1) * translate * side) for draw, side in ((x, size[1]), (y, size[0])))
    return Affine((2 * angle - 1) * degrees, x, y, scale[0] + (scale[1] - scale[0]) * zoom)


def warp(images: Tensor, affine: Affine) -> Tensor:
    """Bilinear; zero outside, so warp normalised images."""
    turned = _turn(affine.angle) @ _stretch(affine.scale, affine.scale)
    return _warped(images, _shift(affine.x, affine.y) @ turned, "bilinear")


def unwarp(maps: Tensor, affine: Affine, image_size: tuple[int, int]) -> Tensor:
    """Maps [B, K+1, H, W] of warped images, back in place: iFAM's inverse, two nearest readings one after the other."""
    (h, w), (H, W) = image_size, maps.shape[2:]
    maps = _warped(maps, _shift(-affine.x * W / w, -affine.y * H / h), "nearest")
    return _warped(maps, _turn(-affine.angle) @ _stretch(1 / affine.scale, 1 / affine.scale), "nearest")


def _warped(images: Tensor, matrix: Tensor, mode: str) -> Tensor:
    size = images.shape[2:]
    grid = _grid(_backward(_about_centre(matrix, size)[None], size, size), size, images)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images.to(grid.dtype), grid, mode=mode, align_corners=False).to(images.dtype)
