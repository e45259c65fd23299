"""The drawn birds and scenes that every test of the builders starts from, and pictures to augment."""

from pathlib import Path

import pytest
import torch

from sightline.config import Build
from sightline.data.augment import Pictures
from sightline.datasets.toy_images import make_toy

from .miniature import draw_cub, draw_scenes


@pytest.fixture(scope="module")
def cub(tmp_path_factory) -> Path:
    return draw_cub(tmp_path_factory.mktemp("birds"))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return draw_scenes(tmp_path_factory.mktemp("places"))


@pytest.fixture
def options(cub, scenes, tmp_path) -> Build:
    return Build(cub, tmp_path / "set", scenes, workers=1)


@pytest.fixture(scope="module")
def toys() -> Pictures:
    toy = make_toy(12, size=64, seed=5)
    boxes = torch.tensor([[[5.0, 9.0, 40.0, 50.0], [torch.nan] * 4]]).expand(12, 2, 4)
    return Pictures(toy.images, toy.masks, boxes, toy.keypoints)
