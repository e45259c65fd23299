"""Pictures that show whether what moves moves together, and how to augment them in one line."""

from dataclasses import replace

import numpy as np
import torch

from sightline.data.augment import Augment, Pictures

OFF = Augment(flip=0.0)
COLOUR = {
    "brightness": replace(OFF, brightness=0.4),
    "contrast": replace(OFF, contrast=0.4),
    "saturation": replace(OFF, saturation=0.8),
    "hue": replace(OFF, hue=0.5),
    "planckian": replace(OFF, planckian=1.0),
}


def squares(count: int, canvas: tuple[int, int]) -> Pictures:
    """A red square on blue in each picture, somewhere near the middle, with all that is known about it."""
    h, w = canvas
    chance = np.random.default_rng(3)
    left, top, side = chance.integers(w // 3, w // 2, count), chance.integers(h // 3, h // 2, count), 24
    masks = torch.zeros(count, h, w, dtype=torch.bool)
    for mask, x, y in zip(masks, left, top, strict=True):
        mask[y : y + side, x : x + side] = True
    corners = torch.from_numpy(np.stack([left, top], 1)).float()
    images = torch.stack([masks, torch.zeros_like(masks), ~masks], 1).mul(255).byte()
    middle = torch.cat([corners + side / 2 - 0.5, torch.ones(count, 1)], 1)
    return Pictures(images, masks, torch.cat([corners, corners + side], 1)[:, None], middle[:, None])


def points(count: int, *places: tuple[float, float]) -> Pictures:
    keypoints = torch.tensor([[*place, 1.0] for place in places], dtype=torch.float64).expand(count, -1, 3)
    return Pictures(torch.zeros(count, 3, 60, 80, dtype=torch.uint8), keypoints=keypoints)


def go(how: Augment, pictures: Pictures, size=None, *, seed=0, epoch=0, indices=None) -> Pictures:
    how = replace(how, size=size or tuple(pictures.images.shape[2:]))
    return how(
        pictures, seed=seed, epoch=epoch, indices=torch.arange(len(pictures.images)) if indices is None else indices
    )


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a & b).sum((1, 2)) / (a | b).sum((1, 2)).clamp(min=1)
