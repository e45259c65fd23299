"""Small drawn birds and scenes for the tests of the dataset builders."""

from pathlib import Path

import pytest

from sightline.config import Build

from .miniature import draw_cub, draw_scenes


@pytest.fixture(scope="module")
def cub(tmp_path_factory) -> Path:
    return draw_cub(tmp_path_factory.mktemp("birds"))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return draw_scenes(tmp_path_factory.mktemp("backgrounds"))


@pytest.fixture
def options(cub, scenes, tmp_path) -> Build:
    return Build(cub, tmp_path / "set", scenes, workers=1)
