"""Test images with masks, boxes and keypoints, and a shortcut to augment them."""

from dataclasses import replace

import numpy as np
import torch

from sightline.data.augment import AnnotatedImages, Augment

OFF = Augment(flip=0.0)
COLOUR = {
    "brightness": replace(OFF, brightness=0.4),
    "contrast": replace(OFF, contrast=0.4),
    "saturation": replace(OFF, saturation=0.8),
    "hue": replace(OFF, hue=0.5),
    "planckian": replace(OFF, planckian=1.0),
}


def squares(count: int, preprocess: tuple[int, int]) -> AnnotatedImages:
    """A red square on blue near the centre of each image, with its mask, box and centre as keypoint."""
    h, w = preprocess
    generator = np.random.default_rng(3)
    left, top, side = generator.integers(w // 3, w // 2, count), generator.integers(h // 3, h // 2, count), 24
    masks = torch.zeros(count, h, w, dtype=torch.bool)
    for mask, x, y in zip(masks, left, top, strict=True):
        mask[y : y + side, x : x + side] = True
    corners = torch.from_numpy(np.stack([left, top], 1)).float()
    images = torch.stack([masks, torch.zeros_like(masks), ~masks], 1).mul(255).byte()
    centre = torch.cat([corners + side / 2 - 0.5, torch.ones(count, 1)], 1)
    return AnnotatedImages(images, masks, torch.cat([corners, corners + side], 1)[:, None], centre[:, None])


def points(count: int, *positions: tuple[float, float]) -> AnnotatedImages:
    keypoints = torch.tensor([[*position, 1.0] for position in positions], dtype=torch.float64).expand(count, -1, 3)
    return AnnotatedImages(torch.zeros(count, 3, 60, 80, dtype=torch.uint8), keypoints=keypoints)


def augmented(config: Augment, given: AnnotatedImages, size=None, *, seed=0, epoch=0, indices=None) -> AnnotatedImages:
    config = replace(config, size=size or tuple(given.images.shape[2:]))
    indices = torch.arange(len(given.images)) if indices is None else indices
    return config(given, seed=seed, epoch=epoch, indices=indices)


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a & b).sum((1, 2)) / (a | b).sum((1, 2)).clamp(min=1)
