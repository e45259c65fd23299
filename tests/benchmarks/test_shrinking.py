"""Stage 1 on tokens computed beforehand learns as it does on images."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import shrinking
from sightline.data.augment import random_affine, warp_affine
from sightline.where.parts import PartDiscovery, gumbel_noise

from ..conftest import small_vit


def test_tokens_of_images_and_of_transformed_ones_give_the_same_maps_as_the_images(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, 32, 32, generator=generator)
    affine, noise = random_affine((32, 32), seed=0, step=5), gumbel_noise((3, 4, 4, 4), generator=generator)
    learned, prepared = (kind(vit, 3, 2, seed=1).eval() for kind in (PartDiscovery, shrinking.Prepared))
    moved = warp_affine(images - vit.mean, affine) + vit.mean
    tokens, prepared.moved, prepared.image_size = vit(images).feature_map, vit(moved).feature_map, (32, 32)
    with torch.no_grad():
        assert torch.equal(learned.discover(images, noise=noise).scores, prepared.discover(tokens, noise=noise).scores)
        expected = learned.discover_transformed(images, affine, noise=noise)
        assert torch.equal(expected, prepared.discover_transformed(tokens, affine, noise=noise))


def test_every_setting_is_trained_and_measured(toy, tmp_path, monkeypatch):
    for name, value in (("COPIES", 1), ("AFFINES", 2), ("STEPS", 2), ("BATCH", 16), ("TEST", 8)):
        monkeypatch.setattr(shrinking, name, value)
    out = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["shrinking.py", str(toy), "sightline-nano", "--out", str(out), "--seeds", "2"])
    shrinking.main()
    runs = json.loads(out.read_text())["runs"]
    assert len({tuple(run[name] for name in list(run)[:4]) for run in runs}) == 2 * 2 * 2 * 2
    assert all(0 <= run[name] <= 1 for run in runs for name in ("coverage", "patch_iou"))
    assert len({run["coverage"] for run in runs}) > 1


@pytest.mark.parametrize("parts", [1, 4])
def test_only_what_stage_1_learns_is_trained(parts, monkeypatch):
    monkeypatch.setattr(shrinking, "STEPS", 1)
    monkeypatch.setattr(shrinking, "COPIES", 1)
    monkeypatch.setattr(shrinking, "AFFINES", 1)
    vit = small_vit(classes=0)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    size, tokens = (32, 32), torch.randn(2, 6, 32, 4, 4, generator=torch.Generator().manual_seed(0)).half()
    affines = [[random_affine(size, seed=0, step=0)]]
    given = shrinking.Tokens(torch.tensor([0, 1] * 3), tokens[:1], tokens[None, :1], affines, size)
    config = shrinking.Pdiscoformer(Path("data"), parts=parts, preset="published")
    where = shrinking.trained(vit, given, config, seed=0)
    start = PartDiscovery(vit, parts, 2, seed=0)
    assert not torch.equal(where.prototypes, start.prototypes)
    assert not torch.equal(where.head.weight, start.head.weight)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
