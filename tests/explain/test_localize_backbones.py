"""Localisation of backbones: figures with known values, several backbones and layers, and the command."""

import csv
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.config import Localize
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.explain.attention_tables import ATTENTION_TARGETS, FIGURES
from sightline.explain.localize_backbones import (
    backbone_setup,
    even_figures,
    in_boxes,
    localize_backbones,
    map_figures,
)
from sightline.explain.plots import family
from sightline.metrics.attention import attention_columns
from sightline.metrics.inference import sample_evenly
from sightline.training.distributed import make_accelerator
from sightline.where.attention import attention_maps_and_shares, cls_attention_map

from ..commands import QUICK, typed
from ..conftest import PLAIN, small_vit

SIDE = 32
BACKBONES = ("sightline-nano", "random:nano")


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "birds", train=2, val=2, test=16, size=64)


@pytest.fixture(scope="module")
def accelerator():
    return make_accelerator("cpu")


def tiny(name: str = "tiny", layers=(-1,), heads=("mean",), **changes):
    return backbone_setup(name, small_vit(classes=0, input=PLAIN, **changes), layers, heads, SIDE)


def values(figures):
    return {name: (column[:, 0].sum() / column[:, 1].sum()).item() for name, column in figures.items()}


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_a_map_inside_the_truth_has_all_its_mass_and_its_peak_there(generator):
    inside = torch.zeros(2, 8, 8, dtype=torch.bool)
    inside[:, 2:5, 1:6] = True
    found = values(
        map_figures(inside.float() * torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)), inside)
    )
    assert found["mass"] == pytest.approx(1)
    assert found["hit"] == 1
    outside = values(map_figures((~inside).float(), inside))
    assert (outside["mass"], outside["hit"]) == (0, 0)


def test_a_uniform_map_scores_the_fraction_of_ground_truth():
    inside = torch.zeros(1, 20, 20, dtype=torch.bool)
    inside[:, :5] = True
    found = values(even_figures(inside))
    expected = {"mass": 0.25, "hit": 0.25, "entropy": 1, "top10": 0.1, "top25": 0.25}
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_papers_example_map():
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    maps = ((3 * x + 5 * y + x * y) % 7).float()[None]
    inside = in_boxes(torch.tensor([[[2.0, 1.0, 6.0, 5.0]]]), (8, 8))
    found = values(map_figures(maps, inside))
    assert found["entropy"] == pytest.approx(0.933674, abs=1e-5)
    assert found["mass"] == pytest.approx(0.319048, abs=1e-5)
    assert found["top25"] == pytest.approx(0.452381, abs=1e-5)


def test_pixel_figures_agree_with_those_of_runs(generator):
    maps, inside = torch.rand(4, 4, 4, generator=generator), torch.rand(4, SIDE, SIDE, generator=generator) < 0.3
    pixels = torch.nn.functional.interpolate(maps[:, None], (SIDE, SIDE), mode="bilinear")[:, 0]
    ours, theirs = map_figures(pixels, inside), attention_columns(maps, inside)
    for name, column in theirs.items():
        torch.testing.assert_close(ours[name], column)


def test_a_cell_counts_by_its_true_fraction():
    maps = torch.tensor([[[0.6, 0.4], [0.0, 0.0]]])
    found = values(map_figures(maps, torch.tensor([[[0.5, 0.25], [1.0, 1.0]]])))
    assert (found["mass"], found["hit"]) == (pytest.approx(0.4), 1)
    assert values(map_figures(maps, torch.tensor([[[0.4, 1.0], [1.0, 1.0]]])))["hit"] == 0


def test_images_without_ground_truth_count_for_the_entropy_only():
    found = map_figures(torch.ones(2, 4, 4), torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]))
    assert found["mass"][:, 1].tolist() == found["hit"][:, 1].tolist() == [1, 0]
    assert found["entropy"][:, 1].tolist() == [1, 1]


def test_boxes_join_and_reach_to_whole_pixels():
    boxes = torch.tensor([[[0.6, 0.0, 2.2, 1.0], [2.0, 0.0, 4.0, 0.5], [float("nan")] * 4]])
    assert in_boxes(boxes, (2, 5)).int().tolist() == [[[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]]


def test_one_pass_gives_every_map_and_share(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, SIDE, SIDE, generator=generator)
    maps, shares = attention_maps_and_shares(vit, images, [2, 0], ["max", 1])
    for i, layer in enumerate([2, 0]):
        for j, heads in enumerate(["max", 1]):
            torch.testing.assert_close(maps[:, i, j], cls_attention_map(vit, images, layer, heads))
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(3, vit.config.depth))


def test_a_family_is_known_by_names_that_differ_in_size_alone():
    assert family("dinov2-s14-reg") == family("dinov2-l14-reg") != family("dinov2-l14")
    assert family("runs/nano/backbone.safetensors") == family("runs/ti/backbone.safetensors")
    assert family("random:nano") != family("nano")


def test_samples_are_spread_evenly():
    assert sample_evenly(np.arange(10, 20), 3).tolist() == [10, 14, 19]
    assert sample_evenly(np.arange(3), 8).tolist() == [0, 1, 2]


# ---- backbones -------------------------------------------------------------------------------------------------------


def test_every_backbone_layer_and_way_of_joining_heads_has_figures_whatever_the_batch(birds, accelerator):
    rows = read_rows(birds)
    setups = [tiny("one", (-1, 0), ("mean", "2")), tiny("other", "all", seed=1, patch=16, grid=(2, 2), registers=0)]
    found, again = (
        localize_backbones(setups, rows, rows.split_indices("test"), accelerator, batch=size, resamples=50)
        for size in (16, 5)
    )
    assert json.dumps(found.to_dict()) == json.dumps(again.to_dict())
    one, other = found.backbones
    assert [(a.layer, a.heads) for a in one.attention] == [(2, "mean"), (2, "2"), (0, "mean"), (0, "2")]
    assert [a.layer for a in other.attention] == [0, 1, 2]
    for attention in (*one.attention, *other.attention):
        for figures in attention.levels.values():
            assert set(figures) == set(FIGURES)
            assert all(figure.low <= figure.value <= figure.high and figure.n == 16 for figure in figures.values())
    for seen in found.backbones:
        assert len(seen.shares) == 3
        for shares in seen.shares:
            assert sum(shares[target].value for target in ATTENTION_TARGETS) == pytest.approx(1, abs=1e-5)
    assert all(shares["registers"].value == 0 for shares in other.shares)
    assert one.even["pixels"]["mass"].value == pytest.approx(one.even["patches"]["mass"].value, abs=1e-6)
    constant = one.even["pixels"]["entropy"]
    assert constant.low == pytest.approx(constant.high)  # no image is right or wrong in it
    assert one.parameters == sum(p.numel() for p in setups[0].vit.parameters())


def boxed(folder, boxes: list[str]):
    folder.mkdir()
    for i in range(len(boxes)):
        Image.new("RGB", (SIDE, SIDE), (40 * i, 80, 120)).save(folder / f"{i}.png")
    lines = [f"{i}.png,a,{box},test" for i, box in enumerate(boxes)]
    (folder / "rows.csv").write_text("\n".join(["image,label,box,split", *lines]) + "\n")
    return read_rows(folder)


def test_boxes_are_the_ground_truth_if_there_are_no_masks(tmp_path, accelerator):
    rows = boxed(tmp_path / "boxes", ["0 0 16 32", "0 0 8 32;4 0 16 32", ""])
    found = localize_backbones([tiny()], rows, rows.split_indices("test"), accelerator, resamples=20)
    assert (found.truth, found.n) == ("boxes", 2)
    assert "without a box, not measured: 1 of 3" in found.notes[0]
    assert found.backbones[0].even["pixels"]["mass"].value == pytest.approx(0.5)
    with pytest.raises(UserError, match="no masks to compare with"):
        localize_backbones([tiny()], rows, rows.split_indices("test"), accelerator, truth="masks")


def test_data_without_any_ground_truth_are_refused(tmp_path, accelerator):
    rows = boxed(tmp_path / "boxes", ["40 0 50 32"])
    with pytest.raises(UserError, match="no image has ground truth left"):
        localize_backbones([tiny()], rows, rows.split_indices("test"), accelerator, resamples=20)


def test_settings_that_do_not_fit_a_backbone_are_refused():
    with pytest.raises(UserError, match="--layer 3: tiny has the blocks 0 to 2"):
        tiny(layers=(3,))
    with pytest.raises(UserError, match="--heads 4"):
        tiny(heads=("4",))
    with pytest.raises(UserError, match=r"--size 30: must be a multiple of the patch size of x \(8\), such as 24"):
        backbone_setup("x", small_vit(), (-1,), ("mean",), 30)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_results_and_figures(birds, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    code, text, _ = typed("localize", *BACKBONES, birds, "--layer", -1, -2, *QUICK, "--limit", 6, "--out", out)
    assert code == 0
    assert "6 images, ground truth: masks" in text
    for row in ("sightline-nano  5 (-1)  mean", "random:nano  4 (-2)  mean", "uniform map – – pixels"):
        assert " ".join(row.split()) in " ".join(text.split())
    content = json.loads((out / "backbones.json").read_text())
    assert [seen["name"] for seen in content["backbones"]] == list(BACKBONES)
    mass = content["backbones"][0]["attention"][0]["levels"]["pixels"]["mass"]
    assert mass["n"] == 6
    assert 0 <= mass["low"] <= mass["value"] <= mass["high"] <= 1
    with (out / "backbones.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * (2 * 2 * 5 + 2 * 5 + 6 * 3)  # maps, the uniform map, shares of six blocks
    assert float(lines[0]["low"]) <= float(lines[0]["value"]) <= float(lines[0]["high"])
    for name in ("size", "shares", "layers", "attention"):
        with Image.open(out / f"{name}.png") as image:
            assert min(image.size) > 300


def test_without_matplotlib_it_fails_early_unless_figures_are_off(birds, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ("localize", "random:nano", birds, *QUICK, "--limit", 2, "--out", tmp_path / "out")
    code, _, err = typed(*command)
    assert (code, "pip install 'sightline[plots]'" in err, (tmp_path / "out").exists()) == (2, True, False)
    assert typed(*command, "--no-figures")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["backbones.csv", "backbones.json"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nonesuch", "DATA"), "nonesuch: no such file or backbone"),
        (("sightline-nano",), "name the data too: `sightline localize sightline-nano DATA`"),
        (("sightline-nano", "random:nano"), "random:nano: no such file or folder"),
        (("random:nano", "random:nano", "DATA"), "random:nano: named twice"),
        (("random:nano", "DATA", "--layer", 6), "--layer 6: random:nano has the blocks 0 to 5"),
        (("random:nano", "DATA", "--layer", -7), "--layer -7: random:nano has the blocks 0 to 5"),
        (("random:nano", "DATA", "--ground-truth", "boxes"), "no boxes to compare with"),
        (("random:nano", "DATA", "--limit", 0), "--limit 0: must be at least 1"),
        (("random:nano", "DATA", "--per-map"), "--per-map: for runs only (random:nano)"),
        (("random:nano", "PLAIN"), "no masks to compare with"),
    ],
)
def test_invalid_settings_are_refused(birds, tmp_path, arguments, expected):
    (tmp_path / "plain" / "duck").mkdir(parents=True)
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "plain" / "duck" / "1.png")
    names = {"DATA": birds, "PLAIN": tmp_path / "plain"}
    code, _, err = typed("localize", *(names.get(word, word) for word in arguments), *QUICK)
    assert (code, expected in " ".join(err.split())) == (2, True), err


def test_a_run_folder_is_measured_as_a_run(runs, toy, tmp_path):
    code, text, _ = typed("localize", runs / "erm-0", *QUICK, "--out", tmp_path / "out")
    assert code == 0
    assert "Sight IoU" in text
    assert (tmp_path / "out" / "localization.json").is_file()
    for more, expected in ((("--layer", -2), "for backbones only"), ((toy, toy), "a run is measured alone")):
        code, _, err = typed("localize", runs / "erm-0", *more, *QUICK)
        assert (code, expected in err) == (2, True), err
    code, _, err = typed("localize", "random:nano", runs / "erm-0", toy, *QUICK)
    assert (code, "a run, not a backbone" in err) == (2, True)
    assert Localize(runs / "erm-0").of_backbones is False
