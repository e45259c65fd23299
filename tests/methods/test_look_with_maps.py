"""The sight and its maps from one pass of stage 1: the same as from two."""

from pathlib import Path

import pytest
import torch

from sightline.config import Ifam, Pdiscoformer
from sightline.interventions.apply import apply_intervention
from sightline.interventions.file import Intervention
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.ifam import IFam, make_predictor, pixel_settings
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.metrics.inference import sight_and_maps

from ..conftest import small_vit

SETTINGS = {
    "clusters": {},
    "learned pixels": {"selector": "learned"},
    "patches": {"sight": "patches"},
    "soft": {"soft_mask": True},
    "noise in evaluation": {"preset": "published"},
}


def model(name: str):
    if name == "pdiscoformer":
        config = Pdiscoformer(Path("toy"), parts=3)
        return PDiscoFormer(make_selector(small_vit(), config, 2), PartSettings.of(config)).eval()
    config = Ifam(Path("toy"), parts=3, **SETTINGS[name])
    halves = make_selector(small_vit(), config, 2), make_predictor(small_vit(), config, 2)
    return IFam(*halves, PartSettings.of(config), pixel_settings(config)).eval()


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", [*SETTINGS, "pdiscoformer"])
@torch.no_grad()
def test_both_at_once_are_the_same(name, corrected, generator):
    method = part_method = model(name)
    if corrected:
        method = apply_intervention(part_method, Intervention(drop=(1,), names={0: "head"}))
    images = torch.rand(3, 3, 32, 32, generator=generator)
    sight, maps = method.look(images), method.maps(images)
    passes = []
    part_method.where.vit.register_forward_hook(lambda *_: passes.append(1))
    both = sight_and_maps(method, images, None)
    once = 2 if part_method.refines else 1
    assert len(passes) == once + (name == "noise in evaluation" and not corrected)
    assert torch.equal(both[0].keep, sight.keep)
    assert maps.keys() == both[1].keys()
    assert all(torch.equal(maps[key], both[1][key]) for key in maps)
