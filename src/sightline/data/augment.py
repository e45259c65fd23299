"""Data augmentation: batched, on the device of the images, joint for images, masks, boxes and keypoints.

    augment = replace(PRESETS["light"], size=(224, 224))
    augmented = augment(AnnotatedImages(images, masks), seed=0, epoch=3, indices=indices)

The augmentation of an image is a function of (seed, epoch, its index in the dataset) only: it does not depend on the
rest of the batch, the number of processes, the device, or earlier draws.

Colour comes first, on the whole image. All geometry is then a single affine map and a single resampling, so that
whatever lies outside the image is exactly the fill colour. Downscaling does not alias: the resize before a plain crop
is antialiased, and an image that its own crop or zoom shrinks by more than 1.5 is sampled from a halved copy.

Boxes are given by their edges (pixel i spans i to i + 1); keypoints name pixels (mask[y, x] is the pixel at x, y).
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
from .colours import GEOMETRIC, OPERATIONS, Round, adjust_colours, apply_nonlinear_operations

ASPECT_RATIOS = (3 / 4, 4 / 3)  # width : height of a random resized crop
MAX_SHRINK = 1.5  # source pixels per target pixel up to which bilinear sampling shows no visible aliasing
MAGNITUDE_STD = 0.5  # of RandAugment's magnitude, in its own units from 0 to 10

DRAWS = ("flip", "angle", "x", "y", "scale", "area", "ratio", "crop_x", "crop_y")
DRAWS += ("brightness", "contrast", "saturation", "hue", "planckian", "illuminant")
DRAWS_PER_ROUND = 4  # of RandAugment: operation, whether it is applied, magnitude, sign


@dataclass(frozen=True)
class AnnotatedImages:
    """A batch of images with their masks, boxes and keypoints."""

    images: Tensor  # [B, 3, h, w]: uint8, or float in [0, 1]
    masks: Tensor | None = None  # bool [B, h, w]
    boxes: Tensor | None = None  # float [B, k, 4]: left, top, right, bottom in pixels; NaN where absent
    keypoints: Tensor | None = None  # float [B, K, 3]: x, y in pixels, visibility 0 or 1

    def __post_init__(self):
        shape = self.images.shape
        if len(shape) != 4 or shape[1] != 3:
            raise ValueError(f"images must be [B, 3, h, w], not {list(shape)}")
        if self.masks is not None and (self.masks.dtype != torch.bool or self.masks.shape != (shape[0], *shape[2:])):
            raise ValueError(f"masks must be bool [B, h, w] like their images, not {list(self.masks.shape)}")
        for name, value, last in (("boxes", self.boxes, 4), ("keypoints", self.keypoints, 3)):
            if value is not None and (value.ndim != 3 or len(value) != shape[0] or value.shape[2] != last):
                raise ValueError(f"{name} must be [B, any, {last}], not {list(value.shape)}")


@dataclass(frozen=True)
class Augment:
    """Augmentation settings; apart from the horizontal flip, every augmentation is off by default."""

    size: tuple[int, int] = (224, 224)
    """Output height and width in pixels."""
    crop: float = 1.0
    """Resize until size / crop is just covered, then crop `size`: 0.875 means resize to 256 before cropping 224."""
    random_crop: bool = False
    """Crop at a random position instead of the centre."""
    random_resized_crop: tuple[float, float] | None = None
    """Instead: crop a random fraction of the area in this range, aspect ratio 3:4 to 4:3, and resize the crop."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    degrees: float = 0.0
    """Maximum rotation, in either direction."""
    translate: float = 0.0
    """Maximum translation as a fraction of width and height, in either direction."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Range of the zoom factor."""
    brightness: float = 0.0
    """Colour jitter: multiply by a factor within 1 ± this; likewise contrast and saturation."""
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    """Maximum hue rotation as a fraction of the colour circle, in either direction."""
    planckian: float = 0.0
    """Probability of Planckian jitter: the light of one of 25 black bodies of 3,000 to 15,000 K."""
    randaugment: tuple[int, float] | None = None
    """RandAugment: number of operations, and their magnitude from 0 to 10."""
    fill: tuple[float, float, float] = IMAGENET_MEAN
    """Colour of the area outside the image."""
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self):
        rounds, magnitude = self.randaugment or (0, 0)
        area = self.random_resized_crop or (1, 1)
        jitter = min(self.brightness, self.contrast, self.saturation)
        for name, valid, expected in (
            ("size", min(self.size) >= 1, "height and width must be at least 1 pixel"),
            ("crop", 0 < self.crop <= 1, "must be above 0 and at most 1"),
            ("random_resized_crop", 0 < area[0] <= area[1] <= 1, "must be two fractions in (0, 1], the smaller first"),
            ("flip", 0 <= self.flip <= 1, "must be a probability between 0 and 1"),
            ("degrees", 0 <= self.degrees <= 180, "must be an angle between 0 and 180"),
            ("translate", 0 <= self.translate <= 1, "must be between 0 and 1"),
            ("scale", 0 < self.scale[0] <= self.scale[1], "must be two factors above 0, the smaller first"),
            ("brightness, contrast, saturation", jitter >= 0, "must not be negative"),
            ("hue", 0 <= self.hue <= 0.5, "must be between 0 and 0.5"),
            ("planckian", 0 <= self.planckian <= 1, "must be a probability between 0 and 1"),
            (
                "randaugment",
                rounds >= 0 and 0 <= magnitude <= 10,
                "number of operations, magnitude 0 to 10",
            ),
            ("fill", min(self.fill) >= 0 and max(self.fill) <= 1, "red, green and blue must lie between 0 and 1"),
        ):
            if not valid:
                value = getattr(self, name, "")
                raise UserError(f"augmentation: {name} {value}: {expected}")

    @torch.no_grad()
    def __call__(self, given: AnnotatedImages, *, seed: int, epoch: int, indices: Tensor) -> AnnotatedImages:
        """Images become float [B, 3, H, W] in [0, 1]; boxes that leave the image become NaN, keypoints invisible."""
        draws, rounds = _draw(self, seed, epoch, indices)
        images = given.images.float()
        if not given.images.is_floating_point():
            images = images / 255
        images = apply_nonlinear_operations(adjust_colours(images, self, draws, rounds), rounds)
        forward = _forward_matrix(self, given.images.shape[2:], draws, rounds)
        images, masks = _transform_images(self, images, given.masks, forward)
        boxes, keypoints = given.boxes, given.keypoints
        return AnnotatedImages(
            images=images,
            masks=masks,
            boxes=None if boxes is None else _transform_boxes(boxes, forward, self.size),
            keypoints=None if keypoints is None else _transform_keypoints(keypoints, forward, self.size),
        )

    @property
    def changes_geometry(self) -> bool:
        """Decided by the settings, never by the draws of a batch: an image must not depend on its batch."""
        varied = self.flip or self.degrees or self.translate or tuple(self.scale) != (1, 1)
        return bool(varied or self.random_crop or self.random_resized_crop or self.randaugment)


PRESETS = {
    "none": Augment(flip=0.0),
    "flip": Augment(),
    "light": Augment(random_resized_crop=(0.5, 1.0)),
    # iFAM's "cub_original", with its black corners.
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
    """float64 [B, count] in [0, 1), on the CPU: SplitMix64 (Steele et al., 2014) as a hash of seed, epoch and index."""
    step = np.uint64(0x9E3779B97F4A7C15)
    key = _mix64(np.array([seed % 2**64], dtype=np.uint64) + step)
    key = _mix64((key ^ np.uint64(epoch % 2**64)) + step)
    key = _mix64((key ^ indices.cpu().numpy().astype(np.int64).view(np.uint64)) + step)
    bits = _mix64(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * step)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix64(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _draw(config: Augment, seed: int, epoch: int, indices: Tensor) -> tuple[dict[str, Tensor], list[Round]]:
    """The random draws of all settings; those of one setting do not depend on the other settings."""
    count, magnitude = config.randaugment or (0, 0.0)
    columns = uniforms(seed, epoch, indices, len(DRAWS) + DRAWS_PER_ROUND * count).T
    rounds = []
    for choice, applied, normal, sign in columns[len(DRAWS) :].unflatten(0, (count, DRAWS_PER_ROUND)):
        operation = torch.where(applied < 0.5, (choice * len(OPERATIONS)).long(), -1)
        strength = (magnitude + MAGNITUDE_STD * torch.special.ndtri(normal)).clamp(0, 10) / 10
        rounds.append((operation, torch.where(sign < 0.5, -strength, strength)))
    return dict(zip(DRAWS, columns, strict=False)), rounds


# Geometry: affine matrices [B, 3, 3] in float64 on the CPU, from source to target pixels, edges at 0 and w.


def _matrices(*rows: Tensor | float) -> Tensor:
    """From the six entries of the first two rows, each a scalar for all images or [B]."""
    entries = torch.broadcast_tensors(*(torch.as_tensor(entry, dtype=torch.float64) for entry in (*rows, 0, 0, 1)))
    return torch.stack(entries, -1).unflatten(-1, (3, 3))


def _translation(x: Tensor | float, y: Tensor | float) -> Tensor:
    return _matrices(1, 0, x, 0, 1, y)


def _scaling(x: Tensor | float, y: Tensor | float) -> Tensor:
    return _matrices(x, 0, 0, 0, y, 0)


def _rotation(degrees: Tensor | float) -> Tensor:
    """Clockwise, as y points down."""
    angle = torch.as_tensor(degrees, dtype=torch.float64).deg2rad()
    return _matrices(angle.cos(), -angle.sin(), 0, angle.sin(), angle.cos(), 0)


def _about_centre(matrix: Tensor, size: tuple[int, ...]) -> Tensor:
    h, w = size
    return _translation(w / 2, h / 2) @ matrix @ _translation(-w / 2, -h / 2)


def _forward_matrix(config: Augment, source: tuple[int, ...], draws: dict[str, Tensor], rounds: list[Round]) -> Tensor:
    """The whole geometry as one map: resize, vary about the centre, crop."""
    signed = {name: 2 * draw - 1 for name, draw in draws.items()}
    if config.random_resized_crop is None:
        (h, w), (top, left) = _resize_and_crop(config, source)
        if config.random_crop:
            left = (draws["crop_x"] * (w - config.size[1] + 1)).floor()
            top = (draws["crop_y"] * (h - config.size[0] + 1)).floor()
        resized, cropped = _scaling(w / source[1], h / source[0]), _translation(-left, -top)
    else:
        (h, w), resized, cropped = config.size, _resized_crop(config, source, draws), _translation(0, 0)
    low, high = config.scale
    zoom = low + (high - low) * draws["scale"]
    varied = _scaling(torch.where(draws["flip"] < config.flip, -1.0, 1.0), 1)
    varied = _rotation(config.degrees * signed["angle"]) @ _scaling(zoom, zoom) @ varied
    varied = _translation(config.translate * w * signed["x"], config.translate * h * signed["y"]) @ varied
    for operation, amount in rounds:
        rotate, shear_x, shear_y, x, y = (amount * (operation == OPERATIONS.index(name)) for name in GEOMETRIC)
        varied = _translation(0.45 * w * x, 0.45 * h * y) @ _rotation(30 * rotate) @ varied
        varied = _matrices(1, 0.3 * shear_x, 0, 0.3 * shear_y, 1, 0) @ varied
    return cropped @ _about_centre(varied, (h, w)) @ resized


def _resize_and_crop(config: Augment, source: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size after resizing, and the corner of the centre crop, rounded as in `images.to_tensor`."""
    (h, w), (H, W) = source, config.size
    scale = max(math.floor(H / config.crop) / h, math.floor(W / config.crop) / w)
    h, w = max(H, round(h * scale)), max(W, round(w * scale))
    return (h, w), (round((h - H) / 2), round((w - W) / 2))


def _resized_crop(config: Augment, source: tuple[int, ...], draws: dict[str, Tensor]) -> Tensor:
    """The aspect ratio is drawn among those that fit; in a very long image none does, and the area is reduced."""
    assert config.random_resized_crop is not None
    (h, w), (low, high) = source, config.random_resized_crop
    area = low + (high - low) * draws["area"]
    narrow, wide = (area * w / h).clamp(*ASPECT_RATIOS).log(), (w / h / area).clamp(*ASPECT_RATIOS).log()
    ratio = (narrow + (wide - narrow) * draws["ratio"]).exp()
    width, height = (area * h * w * ratio).sqrt(), (area * h * w / ratio).sqrt()
    fits = torch.minimum(w / width, h / height).clamp(max=1)
    width, height = width * fits, height * fits
    corner = _translation(-draws["crop_x"] * (w - width), -draws["crop_y"] * (h - height))
    return _scaling(config.size[1] / width, config.size[0] / height) @ corner


def _transform_images(
    config: Augment, images: Tensor, masks: Tensor | None, forward: Tensor
) -> tuple[Tensor, Tensor | None]:
    source, (H, W) = images.shape[2:], config.size
    resized, (top, left) = _resize_and_crop(config, source)
    if config.random_resized_crop is None and resized != source:
        images = F.interpolate(images, resized, mode=config.resample, antialias=True).clamp_(0, 1)
    if not config.changes_geometry:
        if masks is not None and resized != source:
            masks = F.interpolate(masks[:, None].float(), resized, mode="nearest-exact")[:, 0] > 0
        rows, columns = slice(top, top + H), slice(left, left + W)
        return images[:, :, rows, columns], None if masks is None else masks[:, rows, columns]
    inverse = _inverse_matrix(forward, source, config.size)
    grid = _sampling_grid(inverse, config.size, images)
    images = _sample(images, grid, inverse, config.resample)
    if (inverse[:, :2].abs().sum(2) > 1 + 1e-9).any():
        inside = grid.abs().amax(3) <= 1
        fill = torch.tensor(config.fill, dtype=images.dtype).to(images.device, non_blocking=True)
        images = torch.where(inside[:, None], images, fill[:, None, None])
    if masks is not None:
        masks = F.grid_sample(masks[:, None].float(), grid, mode="nearest", align_corners=False)[:, 0] > 0
    return images, masks


def _inverse_matrix(forward: Tensor, source: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """From target to source, both in coordinates from -1 to 1."""
    (h, w), (H, W) = source, size
    source_pixels, target_pixels = (_scaling(x / 2, y / 2) @ _translation(1, 1) for x, y in ((w, h), (W, H)))
    return torch.linalg.inv(forward @ source_pixels) @ target_pixels


def _sampling_grid(inverse: Tensor, size: tuple[int, ...], like: Tensor) -> Tensor:
    """[B, H, W, 2] for grid_sample. Written out, because a matrix product may be rounded to TF32 or bfloat16."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    y, x = ((torch.arange(n, dtype=dtype, device=like.device) * 2 + 1) / n - 1 for n in size)
    rows = inverse[:, :2].to(dtype).to(like.device, non_blocking=True)  # nothing here waits for the device
    grid = torch.empty(len(rows), *size, 2, dtype=dtype, device=like.device)
    for axis in (0, 1):
        across, down, offset = rows[:, axis, :, None].unbind(1)
        torch.add((across * x)[:, None, :], (down * y + offset)[:, :, None], out=grid[..., axis])
    return grid


def _sample(images: Tensor, grid: Tensor, inverse: Tensor, mode: str) -> Tensor:
    """grid_sample without aliasing: images that shrink are first halved as often as needed."""
    sides = torch.tensor(images.shape[:1:-1], dtype=torch.float64)
    targets = torch.tensor(grid.shape[2:0:-1], dtype=torch.float64)
    shrinks = torch.linalg.matrix_norm(inverse[:, :2, :2] * sides[:, None] / targets, ord=2)
    levels = (shrinks / MAX_SHRINK).log2().ceil().clamp(min=0).int()
    if not levels.any():
        return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False).clamp_(0, 1)
    sampled = images.new_empty(len(images), 3, *grid.shape[1:3])
    for level in levels.unique().tolist():
        here = (levels == level).nonzero()[:, 0].to(images.device, non_blocking=True)
        halved = [max(1, side >> level) for side in images.shape[2:]]
        smaller = F.interpolate(images[here], halved, mode="bilinear", antialias=True) if level else images[here]
        sampled[here] = F.grid_sample(
            smaller, grid[here], mode=mode, padding_mode="border", align_corners=False
        ).clamp_(0, 1)
    return sampled


def _transform_points(x: Tensor, y: Tensor, forward: Tensor) -> Iterator[Tensor]:
    for row in forward[:, :2].to(x.dtype).to(x.device, non_blocking=True).unbind(1):
        across, down, offset = row[:, :, None].unbind(1)
        yield across * x + down * y + offset


def _transform_boxes(boxes: Tensor, forward: Tensor, size: tuple[int, int]) -> Tensor:
    """The bounding boxes of the four transformed corners, clipped; NaN where nothing is left."""
    k = boxes.shape[1]
    x, y = _transform_points(boxes[..., [0, 2, 2, 0]].flatten(1), boxes[..., [1, 1, 3, 3]].flatten(1), forward)
    (left, right), (top, bottom) = (
        (side.unflatten(1, (k, 4)).amin(2).clamp(0, end), side.unflatten(1, (k, 4)).amax(2).clamp(0, end))
        for side, end in ((x, size[1]), (y, size[0]))
    )
    visible = (left < right) & (top < bottom)
    return torch.where(visible[..., None], torch.stack([left, top, right, bottom], 2), torch.nan)


def _transform_keypoints(keypoints: Tensor, forward: Tensor, size: tuple[int, int]) -> Tensor:
    x, y = _transform_points(keypoints[..., 0] + 0.5, keypoints[..., 1] + 0.5, forward)
    inside = (x >= 0) & (x < size[1]) & (y >= 0) & (y < size[0])
    return torch.stack([x - 0.5, y - 0.5, torch.where(inside, keypoints[..., 2], 0)], 2)


# iFAM's equivariance loss: one random affine map for a whole batch, and its inverse on the part maps


@dataclass(frozen=True)
class Affine:
    """About the centre: rotate (degrees, clockwise), scale, then translate (pixels)."""

    angle: float = 0.0
    x: float = 0.0
    y: float = 0.0
    scale: float = 1.0


def random_affine(size: tuple[int, int], *, seed: int, step: int) -> Affine:
    """One per training step, with iFAM's ranges: ±90 degrees, ±11 % in whole pixels, scale 0.8 to 1.4."""
    no_epoch = -1  # so that no image of the same seed shares these draws
    angle, x, y, zoom = uniforms(seed, no_epoch, torch.tensor([step]), 4)[0].tolist()
    x, y = (round((2 * draw - 1) * 0.11 * side) for draw, side in ((x, size[1]), (y, size[0])))
    return Affine((2 * angle - 1) * 90.0, x, y, 0.8 + (1.4 - 0.8) * zoom)


def warp_affine(images: Tensor, affine: Affine) -> Tensor:
    """Bilinear; zero outside, so apply it to normalised images."""
    rotated = _rotation(affine.angle) @ _scaling(affine.scale, affine.scale)
    return _warp(images, _translation(affine.x, affine.y) @ rotated, "bilinear")


def unwarp_affine(maps: Tensor, affine: Affine, image_size: tuple[int, int]) -> Tensor:
    """Part maps [B, K+1, H, W] of warped images, mapped back: iFAM's inverse, nearest-neighbour sampling twice."""
    (h, w), (H, W) = image_size, maps.shape[2:]
    maps = _warp(maps, _translation(-affine.x * W / w, -affine.y * H / h), "nearest")
    return _warp(maps, _rotation(-affine.angle) @ _scaling(1 / affine.scale, 1 / affine.scale), "nearest")


def _warp(images: Tensor, matrix: Tensor, mode: str) -> Tensor:
    size = images.shape[2:]
    grid = _sampling_grid(_inverse_matrix(_about_centre(matrix, size)[None], size, size), size, images)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images.to(grid.dtype), grid, mode=mode, align_corners=False).to(images.dtype)
