"""Where backbones look: figures with a known answer, several backbones and layers, and the command."""

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
from sightline.explain.attention_tables import FIGURES, PLACES
from sightline.explain.localize_backbones import (
    even_figures,
    in_boxes,
    localize_backbones,
    map_figures,
    spread_over,
    subject,
)
from sightline.explain.plots import family
from sightline.metrics.overlap import map_columns
from sightline.training.distributed import make_accelerator
from sightline.where.attention import cls_attention_map, cls_attention_shares, maps_and_shares

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
    return subject(name, small_vit(classes=0, input=PLAIN, **changes), layers, heads, SIDE)


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


def test_the_even_map_gets_what_the_truth_covers():
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


def test_pixels_agree_with_what_localize_says_of_runs(generator):
    maps, inside = torch.rand(4, 4, 4, generator=generator), torch.rand(4, SIDE, SIDE, generator=generator) < 0.3
    pixels = torch.nn.functional.interpolate(maps[:, None], (SIDE, SIDE), mode="bilinear")[:, 0]
    ours, theirs = map_figures(pixels, inside), map_columns(maps, inside)
    for name, column in theirs.items():
        torch.testing.assert_close(ours[name], column)


def test_a_cell_counts_by_the_share_of_it_that_is_true():
    maps = torch.tensor([[[0.6, 0.4], [0.0, 0.0]]])
    found = values(map_figures(maps, torch.tensor([[[0.5, 0.25], [1.0, 1.0]]])))
    assert (found["mass"], found["hit"]) == (pytest.approx(0.4), 1)
    assert values(map_figures(maps, torch.tensor([[[0.4, 1.0], [1.0, 1.0]]])))["hit"] == 0


def test_pictures_without_anything_true_do_not_count_inside_but_have_an_entropy():
    found = map_figures(torch.ones(2, 4, 4), torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]))
    assert found["mass"][:, 1].tolist() == found["hit"][:, 1].tolist() == [1, 0]
    assert found["entropy"][:, 1].tolist() == [1, 1]


def test_boxes_join_and_reach_to_whole_pixels():
    boxes = torch.tensor([[[0.6, 0.0, 2.2, 1.0], [2.0, 0.0, 4.0, 0.5], [float("nan")] * 4]])
    assert in_boxes(boxes, (2, 5)).int().tolist() == [[[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]]


def test_one_pass_gives_every_map_and_share(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, SIDE, SIDE, generator=generator)
    maps, shares = maps_and_shares(vit, images, [2, 0], ["max", 1])
    for i, layer in enumerate([2, 0]):
        for j, heads in enumerate(["max", 1]):
            torch.testing.assert_close(maps[:, i, j], cls_attention_map(vit, images, layer, heads))
    torch.testing.assert_close(shares, cls_attention_shares(vit, images))


def test_a_family_is_known_by_names_that_differ_in_size_alone():
    assert family("dinov2-s14-reg") == family("dinov2-l14-reg") != family("dinov2-l14")
    assert family("runs/nano/backbone.safetensors") == family("runs/ti/backbone.safetensors")
    assert family("random:nano") != family("nano")


def test_a_few_are_taken_from_all_over():
    assert spread_over(np.arange(10, 20), 3).tolist() == [10, 14, 19]
    assert spread_over(np.arange(3), 8).tolist() == [0, 1, 2]


# ---- backbones -------------------------------------------------------------------------------------------------------


def test_every_backbone_layer_and_way_of_joining_heads_has_figures_whatever_the_batch(birds, accelerator):
    rows = read_rows(birds)
    subjects = [tiny("one", (-1, 0), ("mean", "2")), tiny("other", "all", seed=1, patch=16, grid=(2, 2), registers=0)]
    found, again = (
        localize_backbones(subjects, rows, rows.where("test"), accelerator, batch=size, resamples=50)
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
        assert all(sum(shares[place].value for place in PLACES) == pytest.approx(1, abs=1e-5) for shares in seen.shares)
    assert all(shares["registers"].value == 0 for shares in other.shares)
    assert one.even["pixels"]["mass"].value == pytest.approx(one.even["patches"]["mass"].value, abs=1e-6)
    constant = one.even["pixels"]["entropy"]
    assert constant.low == pytest.approx(constant.high)  # no image is right or wrong in it
    assert one.parameters == sum(p.numel() for p in subjects[0].vit.parameters())


def boxed(folder, boxes: list[str]):
    folder.mkdir()
    for i in range(len(boxes)):
        Image.new("RGB", (SIDE, SIDE), (40 * i, 80, 120)).save(folder / f"{i}.png")
    lines = [f"{i}.png,a,{box},test" for i, box in enumerate(boxes)]
    (folder / "rows.csv").write_text("\n".join(["image,label,box,split", *lines]) + "\n")
    return read_rows(folder)


def test_boxes_are_the_truth_where_there_are_no_masks(tmp_path, accelerator):
    rows = boxed(tmp_path / "boxes", ["0 0 16 32", "0 0 8 32;4 0 16 32", ""])
    found = localize_backbones([tiny()], rows, rows.where("test"), accelerator, resamples=20)
    assert (found.truth, found.n) == ("boxes", 2)
    assert "want of a box: 1 of 3" in found.notes[0]
    assert found.backbones[0].even["pixels"]["mass"].value == pytest.approx(0.5)
    with pytest.raises(UserError, match="no masks to compare with"):
        localize_backbones([tiny()], rows, rows.where("test"), accelerator, truth="masks")


def test_data_in_which_nothing_is_true_are_refused(tmp_path, accelerator):
    rows = boxed(tmp_path / "boxes", ["40 0 50 32"])
    with pytest.raises(UserError, match="nothing is true in any of the pictures"):
        localize_backbones([tiny()], rows, rows.where("test"), accelerator, resamples=20)


def test_what_a_backbone_does_not_have_is_said():
    with pytest.raises(UserError, match="--layer 3: tiny has 3 blocks, 0 to 2"):
        tiny(layers=(3,))
    with pytest.raises(UserError, match="--heads 4"):
        tiny(heads=("4",))
    with pytest.raises(UserError, match="--size 30: must be a multiple of the patch of x, 8, such as 24"):
        subject("x", small_vit(), (-1,), ("mean",), 30)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_figures_and_pictures(birds, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    code, text, _ = typed("localize", *BACKBONES, birds, "--layer", -1, -2, *QUICK, "--limit", 6, "--out", out)
    assert code == 0
    assert "6 pictures, the truth being masks" in text
    for row in ("sightline-nano  5 (-1)  mean", "random:nano  4 (-2)  mean", "even map – – pixels"):
        assert " ".join(row.split()) in " ".join(text.split())
    content = json.loads((out / "backbones.json").read_text())
    assert [seen["name"] for seen in content["backbones"]] == list(BACKBONES)
    mass = content["backbones"][0]["attention"][0]["levels"]["pixels"]["mass"]
    assert mass["n"] == 6
    assert 0 <= mass["low"] <= mass["value"] <= mass["high"] <= 1
    with (out / "backbones.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * (2 * 2 * 5 + 2 * 5 + 6 * 3)  # maps, the even map, shares of six blocks
    assert float(lines[0]["low"]) <= float(lines[0]["value"]) <= float(lines[0]["high"])
    for name in ("size", "shares", "layers", "attention"):
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_without_matplotlib_it_says_so_before_the_work_and_figures_can_be_had(birds, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked = ("localize", "random:nano", birds, *QUICK, "--limit", 2, "--out", tmp_path / "out")
    code, _, err = typed(*asked)
    assert (code, "pip install 'sightline[plots]'" in err, (tmp_path / "out").exists()) == (2, True, False)
    assert typed(*asked, "--no-pictures")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["backbones.csv", "backbones.json"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("nonesuch", "DATA"), "nonesuch: no such file, and no backbone of that name"),
        (("sightline-nano",), "a backbone needs data, too: `sightline localize sightline-nano DATA`"),
        (("sightline-nano", "random:nano"), "random:nano: no such file or folder"),
        (("random:nano", "random:nano", "DATA"), "random:nano: is named twice"),
        (("random:nano", "DATA", "--layer", 6), "--layer 6: random:nano has 6 blocks, 0 to 5"),
        (("random:nano", "DATA", "--layer", -7), "--layer -7: random:nano has 6 blocks, 0 to 5"),
        (("random:nano", "DATA", "--truth", "boxes"), "no boxes to compare with"),
        (("random:nano", "DATA", "--limit", 0), "--limit 0: at least 1"),
        (("random:nano", "DATA", "--maps"), "--maps does not go with random:nano: it is for runs"),
        (("random:nano", "PLAIN"), "no masks to compare with"),
    ],
)
def test_what_cannot_be_asked_is_refused(birds, tmp_path, asked, said):
    (tmp_path / "plain" / "duck").mkdir(parents=True)
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "plain" / "duck" / "1.png")
    names = {"DATA": birds, "PLAIN": tmp_path / "plain"}
    code, _, err = typed("localize", *(names.get(word, word) for word in asked), *QUICK)
    assert (code, said in " ".join(err.split())) == (2, True), err


def test_a_run_goes_its_own_way(runs, toy, tmp_path):
    code, text, _ = typed("localize", runs / "erm-0", *QUICK, "--out", tmp_path / "out")
    assert code == 0
    assert "IoU of the sight" in text
    assert (tmp_path / "out" / "localization.json").is_file()
    for more, said in ((("--layer", -2), "it is for backbones"), ((toy, toy), "a run is measured alone")):
        code, _, err = typed("localize", runs / "erm-0", *more, *QUICK)
        assert (code, said in err) == (2, True), err
    code, _, err = typed("localize", "random:nano", runs / "erm-0", toy, *QUICK)
    assert (code, "is a run, not a backbone" in err) == (2, True)
    assert Localize(runs / "erm-0").of_backbones is False
