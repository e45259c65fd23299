"""S²: an image at several scales, through one frozen ViT."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sightline.config import S2, Probe
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.train import train
from sightline.vit.weights import load_backbone, save_backbone
from sightline.what.probe import ScaleProbe, resize_bicubic

from ..commands import QUICK, SMALL, typed
from ..conftest import small_vit


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=24, val=12, test=8)


def settings(toy: Path, out: Path, **changes) -> dict:
    return {"data": toy, "out": out, "backbone": "random:nano", "workers": 0, "device": "cpu", "batch": 16} | changes


@torch.no_grad()
def test_one_scale_is_the_plain_features(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, 32, 32, generator=generator)
    assert torch.equal(ScaleProbe(vit, (32, 32), (1,)).embed(images), vit(images).cls)


@torch.no_grad()
def test_scales_stand_side_by_side_each_the_mean_of_its_tiles(generator):
    vit, images = small_vit(classes=0), torch.rand(2, 3, 32, 32, generator=generator)
    found = ScaleProbe(vit, (32, 32), (1, 3)).embed(images)
    assert found.shape == (2, 2 * vit.config.width)
    large = F.interpolate(images, (96, 96), mode="bicubic")
    tiles = [vit(large[:, :, y : y + 32, x : x + 32]).cls for y in (0, 32, 64) for x in (0, 32, 64)]
    torch.testing.assert_close(found, torch.cat([vit(images).cls, sum(tiles) / 9], dim=1))


@torch.no_grad()
def test_larger_images_keep_their_resolution_at_the_larger_scale(generator):
    vit, images = small_vit(classes=0), torch.rand(2, 3, 64, 64, generator=generator)
    tiles = [vit(images[:, :, y : y + 32, x : x + 32]).cls for y in (0, 32) for x in (0, 32)]
    torch.testing.assert_close(ScaleProbe(vit, (32, 32), (2,)).embed(images), sum(tiles) / 4)
    assert resize_bicubic(images, (64, 64)) is images


def test_at_one_scale_it_is_the_probe(toy, tmp_path):
    save_backbone(load_backbone("random:nano"), file := tmp_path / "nano.safetensors")
    same = {"backbone": str(file)}
    models = [
        load(train(S2(**settings(toy, tmp_path / "s2", scales=(1,), **same)))),
        load(train(Probe(**settings(toy, tmp_path / "probe", **same)))),
    ]
    images = torch.rand(4, 3, 64, 64)
    predictions = [model.method.judge(images, model.method.look(images)).logits for model in models]
    torch.testing.assert_close(predictions[0], predictions[1])


def test_features_are_kept_for_each_set_of_scales(toy, tmp_path):
    cache = tmp_path / "cache"
    first = train(S2(**settings(toy, tmp_path / "a", cache=cache)))
    files = {file: file.stat().st_mtime_ns for file in cache.glob("features-*")}
    assert len(files) == 2  # of train and val
    again = train(S2(**settings(toy, tmp_path / "b", cache=cache)))
    assert {file: file.stat().st_mtime_ns for file in cache.glob("features-*")} == files
    assert (first / "best.safetensors").read_bytes() == (again / "best.safetensors").read_bytes()
    train(S2(**settings(toy, tmp_path / "c", cache=cache, scales=(1, 3))))
    assert len(list(cache.glob("features-*"))) == 4


def test_from_the_command_line_to_predictions(toy, tmp_path):
    run = tmp_path / "run"
    code, out, err = typed("train", "s2", toy, *SMALL, "--size", 128, "--out", run)
    assert (code, err) == (0, "")
    assert "selected by class-balanced validation accuracy" in out
    assert json.loads((run / "run.json").read_text())["tiles"] == {"scales": [1, 2], "size": [64, 64]}
    assert load(run).expects.size == (128, 128)
    assert typed("evaluate", run, *QUICK, "--out", tmp_path / "on")[0] == 0
    assert "duck" in typed("predict", run, toy / "test", "--device", "cpu")[1]


@pytest.mark.parametrize("scales", [(), (0, 1), (2, 2)])
def test_invalid_scales_are_errors(toy, tmp_path, scales):
    with pytest.raises(UserError, match=r"--scales .*at least 1"):
        train(S2(**settings(toy, tmp_path / "run", scales=scales)))
