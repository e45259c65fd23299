"""The pretrained backbone included in the package."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sightline
from sightline.datasets.toy_images import make_toy
from sightline.errors import UserError
from sightline.methods.dino import patch_attention
from sightline.metrics.attention import mass_and_hit
from sightline.vit.weights import load_backbone

FILE = Path(sightline.__file__).parent / "vit" / "embedded" / "nano.safetensors"


def test_it_is_small_and_in_half_precision():
    assert FILE.stat().st_size < 6e6
    tensors = load_file(FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert 1e6 < sum(tensor.numel() for tensor in tensors.values()) < 3e6


def test_it_needs_no_hub():
    vit = load_backbone("sightline-nano", classes=3)
    assert vit.origin.repository is None
    assert vit(torch.rand(1, 3, 96, 96)).logits.shape == (1, 3)
    with pytest.raises(UserError, match="included in this package"):
        load_backbone("sightline-nano", revision="main")


@torch.no_grad()
def test_its_best_head_attends_to_the_object():
    """Head 0, as measured on other images; random weights attend uniformly."""
    toy = make_toy(64, size=96, seed=99, correlation=0.5)
    images, uniform = toy.images.float() / 255, toy.masks.float().mean().item()
    mass = {}
    for name in ("sightline-nano", "random:sightline-nano"):
        vit = load_backbone(name)
        out = vit(images, cls_attention=[-1])
        attention = patch_attention(vit, out.cls_attention).unflatten(2, out.grid)
        mass[name] = mass_and_hit(attention, toy.masks)[0][:, 0].mean().item()
    assert mass["sightline-nano"] > 3 * uniform
    assert abs(mass["random:sightline-nano"] - uniform) < 0.02
