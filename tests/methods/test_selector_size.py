"""In which size iFAM looks for parts: what goes, what it takes by itself, and that a run keeps to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from sightline.config import Ifam
from sightline.config.stored import stored_config
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.base import check_selector_size
from sightline.methods.ifam import build_ifam, selector_size
from sightline.training.run_folder import read_run, vit_config_of

from ..commands import SMALL, typed
from ..conftest import small_vit


def test_the_selector_size_must_divide_the_image():
    vit = small_vit(classes=0)
    patch, expects = vit.config.patch, replace(vit.config.input, size=(32, 32))
    for side in (None, 32, 64):
        check_selector_size(side, vit, expects)
    for side in (3, 32 + patch // 2, 40, 48):
        with pytest.raises(UserError, match=f"--selector-size {side}.* choose --selector-size 64"):
            check_selector_size(side, vit, expects)
    uneven = replace(expects, size=(32 + patch // 2,) * 2)
    with pytest.raises(
        UserError, match=f"--size {32 + patch // 2}: the selector's {patch}-pixel patches do not divide"
    ):
        check_selector_size(None, vit, uneven)


@pytest.mark.parametrize(
    ("side", "settings", "looked"),
    [
        (32, {}, 48),  # coarse: 4 patches a side
        (24, {}, 40),  # 5 patches a side, which do not divide the image evenly
        (32, {"selector": "learned"}, 64),
        (32, {"sight": "patches"}, None),
        (32, {"preset": "published"}, None),
        (32, {"selector_size": 32}, 32),
        (224, {}, None),  # 28 patches a side
    ],
)
def test_the_selector_sees_larger_images_where_patches_are_coarse(side, settings, looked):
    vit = small_vit(classes=0)
    assert selector_size(Ifam(Path("data"), **settings), vit, replace(vit.config.input, size=(side, side))) == looked


def test_a_run_keeps_its_selector_size(tmp_path):
    """Also one from before images were enlarged by default, which says nothing of it."""
    toy = write_toy(tmp_path / "toy", train=16, val=8, test=8, size=32)
    code, _, err = typed("train", "ifam", toy, "--out", tmp_path / "run", *SMALL, "--size", 32)
    assert code == 0, err
    facts = load(tmp_path / "run").run.facts
    assert facts["selector_size"] == 48
    assert load(tmp_path / "run").method.where.size == 48
    vit = vit_config_of(read_run(tmp_path / "run"))
    before = {name: fact for name, fact in facts.items() if name != "selector_size"}
    assert build_ifam(vit, stored_config(Ifam, before["config"]), before).where.size is None


def test_a_run_is_named_after_both_of_its_backbones():
    assert Ifam(Path("birds"), "b.safetensors").folder == Path("runs/birds-ifam-b-0")
    assert Ifam(Path("birds"), "b.safetensors", where="a:c").folder == Path("runs/birds-ifam-a-c-b-0")
