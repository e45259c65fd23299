"""A tiny iFAM with random weights, and what the published code computed with it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sightline.methods.import_ import load_stage1
from sightline.vit.model import ViT, ViTConfig
from sightline.vit.weights import load_backbone
from sightline.where.parts import PartDiscovery, freeze

from ..conftest import PLAIN, shared

CONFIG = ViTConfig(
    width=48, depth=3, heads=3, patch=14, grid=(6, 6), registers=4, layer_scale=1.0, head_norm=True, input=PLAIN
)
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
LOSS = {"atol": 2e-6, "rtol": 1e-5}


def golden(name: str) -> dict[str, Tensor]:
    with np.load(shared("golden", name)) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def gradients_agree(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-7)


@pytest.fixture
def stage1() -> PartDiscovery:
    model = load_stage1(shared("golden", "ifam_tiny.safetensors"), prefix="stage_1.", config=CONFIG)
    freeze(model.vit)
    return model


@pytest.fixture
def stage2() -> ViT:
    return load_backbone(shared("golden", "ifam_tiny.safetensors"), prefix="stage_2.", config=CONFIG)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return load_file(shared("golden", "ifam_tiny.safetensors"))
