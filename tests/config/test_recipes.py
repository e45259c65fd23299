"""Recipes: what ends up in run.json, which flags take precedence, and how images reach the model."""

import json

import pytest
import torch
from PIL import Image

from sightline.cli import parse_flags
from sightline.config import A2, Ifam
from sightline.config.recipes import RECIPES, from_recipe
from sightline.data.images import to_tensor
from sightline.errors import UserError
from sightline.load import load_as_trained
from sightline.vit.model import Input

from ..commands import typed
from ..small_runs import table


@pytest.mark.parametrize("name", RECIPES)
def test_flags_and_python_give_the_same_settings_and_flags_take_precedence(name, tmp_path):
    kind, settings = RECIPES[name]
    parsed = parse_flags(kind, "x", [str(tmp_path), "--recipe", name])
    assert parsed == from_recipe(name, kind, data=tmp_path)
    assert {field: getattr(parsed, field) for field in settings} == settings
    assert parsed.recipe == name
    for argument in (["--seed=3", "--fit", "squash"], ["--batch", "7"]):
        changed = parse_flags(kind, "x", [str(tmp_path), f"--recipe={name}", *argument])
        assert (changed.fit == "squash") or changed.batch == 7


def test_a_default_given_beside_a_recipe_takes_precedence(tmp_path):
    given = ["--epochs", str(Ifam.epochs), "--mask_gradient", "False"]
    parsed = parse_flags(Ifam, "x", [str(tmp_path), "--recipe", "ifam-cub", *given])
    assert (parsed.epochs, parsed.mask_gradient, parsed.ema, parsed.balance) == (Ifam.epochs, False, None, "none")


@pytest.mark.parametrize("name", ["ifam-imagenets", "a2-waterbirds"])
def test_unknown_recipes_and_those_of_other_methods_are_errors(name, tmp_path):
    with pytest.raises(UserError, match=r"unknown; choose among ifam-waterbirds|is for a2, not for ifam"):
        parse_flags(Ifam, "x", [str(tmp_path), "--recipe", name])


def test_the_run_has_the_settings_of_its_recipe(toy, tmp_path):
    small = ["--backbone", "random:nano", "--size", 32, "--epochs", 1, "--batch", 32, "--workers", 0, "--device", "cpu"]
    run = tmp_path / "run"
    code, _, err = typed("train", "ifam", toy, "--recipe", "ifam-siim", *small, "--out", run)
    assert code == 0, err
    facts = json.loads((run / "run.json").read_text())
    wanted = RECIPES["ifam-siim"][1] | {"backbone": "random:nano", "size": 32, "epochs": 1, "batch": 32}
    assert {name: facts["config"][name] for name in wanted} == wanted
    assert (facts["vit"]["input"]["fit"], facts["vit"]["input"]["crop"]) == ("squash", 1.0)


def test_a_squashed_image_is_seen_whole_in_training_and_in_prediction(tmp_path):
    data = table(tmp_path / "data", ("a", "b"))
    run = tmp_path / "run"
    flags = ("--backbone", "random:nano", "--size", 32, "--epochs", 1, "--batch", 4, "--workers", 0, "--device", "cpu")
    assert typed("train", "erm", data, *flags, "--fit", "squash", "--allow-copies", "--out", run)[0] == 0
    expects = load_as_trained(run).expects
    assert expects.fit == "squash"
    wide = Image.new("RGB", (96, 32), "black")
    wide.paste((255, 255, 255), (0, 0, 24, 32))  # left of the centre crop
    seen = to_tensor(wide, expects)
    assert float(seen[0, :, :6].mean()) > 0.9
    assert float(to_tensor(wide, Input(size=(32, 32)))[0].max()) < 0.1
    assert torch.equal(seen, to_tensor(wide.resize((32, 32), Image.Resampling.BICUBIC), expects))


def test_crops_of_a_recipe_are_those_of_the_paper():
    assert RECIPES["a2-spawrious"][1]["crop_size"] == ("2/7+1/7",)  # 64 and 32 of 224 pixels
    assert from_recipe("a2-waterbirds", A2, data="x").selects is None  # C = 1, nothing is selected
