"""Annotated images to augment."""

import pytest
import torch

from sightline.data.augment import AnnotatedImages
from sightline.datasets.toy_images import make_toy


@pytest.fixture(scope="module")
def toys() -> AnnotatedImages:
    toy = make_toy(12, size=64, seed=5)
    boxes = torch.tensor([[[5.0, 9.0, 40.0, 50.0], [torch.nan] * 4]]).expand(12, 2, 4)
    return AnnotatedImages(toy.images, toy.masks, boxes, toy.keypoints)
