"""iFAM's default: stage 1 is found by clustering before training and is not trained."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.config import Ifam
from sightline.errors import UserError
from sightline.load import load_as_trained
from sightline.sight import cell_share
from sightline.train import train
from sightline.training.run_folder import read_run
from sightline.verify.verify import verify
from sightline.vit.weights import load_backbone
from sightline.where.parts import PartDiscovery, foreground_probability

from ..conftest import small_vit
from ..small_runs import Stop, files, stopped_after

BRIEF = {"backbone": "sightline-nano", "size": 32, "epochs": 2, "batch": 32, "workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory) -> Path:
    return train(Ifam(toy, out=tmp_path_factory.mktemp("clusters") / "run", parts=3, **BRIEF))


@pytest.mark.parametrize(
    ("changes", "clusters"),
    [
        ({}, True),
        ({"sight": "patches"}, False),
        ({"preset": "published"}, False),
        ({"soft_mask": True}, False),
        ({"mask_gradient": True}, False),
        ({"selector": "learned"}, False),
    ],
)
def test_who_follows_the_papers_learns_stage_1(changes, clusters):
    config = Ifam(Path("data"), **changes)
    assert config.clusters == clusters
    assert config.refines == (config.hides_pixels and not clusters), "a learned stage 1 looks twice"


@pytest.mark.parametrize("parts", [1, 4])
def test_the_gate_alone_is_the_foreground_probability(parts, generator):
    stage1 = PartDiscovery(small_vit(classes=0), parts, 2, gated=True).eval()
    with torch.no_grad():
        stage1.gate.normal_(generator=generator)
        images = torch.rand(2, 3, 32, 32, generator=generator)
        found = stage1.discover(images)
        logit = torch.einsum("bdhw,d->bhw", found.features, stage1.gate[:-1]) + stage1.gate[-1]
        torch.testing.assert_close(foreground_probability(found.scores), logit.sigmoid(), atol=1e-5, rtol=1e-5)


def test_stage_1_is_the_same_after_training_as_before(run):
    facts = read_run(run).facts
    assert 0 < facts["foreground"]["coverage"] < 1
    method = load_as_trained(run).method
    assert method.part_count == 3
    assert not any(p.requires_grad for p in method.where.parameters())
    assert method.where.gate.abs().sum() > 0
    backbone = load_backbone("sightline-nano", classes=0).state_dict()
    stage1 = method.where.vit.state_dict()
    assert all(torch.equal(backbone[name], tensor) for name, tensor in stage1.items()), "not one weight has moved"


def test_stage_1_uses_two_thirds_of_the_blocks_unless_told_otherwise(run, toy, tmp_path):
    assert len(load_as_trained(run).method.where.vit.blocks) == 4
    assert read_run(run).facts["selector_depth"] == 4
    deeper = train(Ifam(toy, out=tmp_path / "run", selector_depth=6, **BRIEF | {"epochs": 1}))
    assert len(load_as_trained(deeper).method.where.vit.blocks) == 6
    with pytest.raises(UserError, match="--selector-depth 7: from 1 to 6 blocks"):
        train(Ifam(toy, out=tmp_path / "other", selector_depth=7, **BRIEF))


def test_the_log_has_the_visible_fraction_of_every_epoch(run, toy, tmp_path, capsys, monkeypatch):
    for line in map(json.loads, (run / "log.jsonl").read_text().splitlines()):
        assert 0 < line["coverage"] < 1
        assert 0 <= line["coverage_sd"] < 0.5
    monkeypatch.setattr("sightline.methods.base.PLAUSIBLE_COVERAGE", (0.99, 1.0))
    train(Ifam(toy, out=tmp_path / "run", **BRIEF | {"epochs": 1}))
    assert "of the image on average, hardly an object" in capsys.readouterr().err


def as_tensor(path: Path) -> torch.Tensor:
    """[3, 32, 32] in [0, 1]"""
    return torch.from_numpy(np.array(Image.open(path).resize((32, 32)))).permute(2, 0, 1) / 255


def is_blind(method):
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(4, 32, 32, dtype=torch.bool)
    masks[:, 8:24, 8:24] = True
    return [
        verify(method, images, sight, draws=1, ascent_steps=1).verdict
        for sight in (method.look_at(images, masks), method.look(images))
    ]


def test_it_is_blind(run):
    alone, together = is_blind(load_as_trained(run).method)
    assert alone == "blind"
    assert together in ("blind", "refused")


@pytest.mark.parametrize("zoom", [False, True])
def test_whole_patches_are_those_with_at_least_half_of_their_pixels_in_the_same_mask(zoom, run, toy, tmp_path):
    changes = {"sight": "patches", "selector": "clusters", "zoom": zoom or None, "parts": 3}
    patches = train(Ifam(toy, out=tmp_path / "run", **changes, **BRIEF | {"epochs": 1}))
    coarse, fine = load_as_trained(patches).method, load_as_trained(run).method
    assert (coarse.what.zoom is not None) == zoom
    assert not coarse.settings.mask_gradient
    images = torch.stack([as_tensor(path) for path in sorted((toy / "test").glob("*.png"))[:8]])
    pixels, sight = fine.look(images).keep_pixels, coarse.look(images)
    assert sight.keep_pixels is None
    assert torch.equal(sight.keep, cell_share(pixels, sight.keep.shape[1:]) >= 0.5)
    assert 0 < sight.keep.float().mean() < 1
    assert is_blind(coarse)[0] == "blind"


def test_an_interrupted_run_ends_with_the_same_bits(toy, run, tmp_path):
    config = Ifam(toy, out=tmp_path / "run", parts=3, save_minutes=0.0, **BRIEF)
    with stopped_after(2), pytest.raises(Stop):
        train(config)
    resumed = files(train(replace(config, save_minutes=10.0, resume=True)))
    whole = files(run)
    assert [name for name in whole if name != "last.safetensors" and resumed[name] != whole[name]] == []
