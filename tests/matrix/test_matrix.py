"""Specs of selectors and predictors, ways to make a sight, and the files and figures of cells."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sightline.config import Matrix
from sightline.errors import UserError
from sightline.matrix.cells import Cell, add_cell, read_cells
from sightline.matrix.heatmap import Square, draw_heatmap
from sightline.matrix.scaling import curves
from sightline.matrix.ways import crop_ways, crops_on, keep_mass, mass_ways, sight_from_patches, window_around
from sightline.matrix.wheres import KINDS
from sightline.matrix.words import WHATS, Spec, parse_attention, parse_specs
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate
from sightline.sight import Sight

from ..answering import made


def settings(**changes) -> Matrix:
    return Matrix(**{"data": "data", "where": ("everything",), "what": ("crop-probe:nano",)} | changes)


# ---- specs -----------------------------------------------------------------------------------------------------------


def test_a_spec_is_a_kind_with_an_optional_argument():
    found = parse_specs(["centre", "u2net:a/b.onnx", "attention:random:nano", "centre"], KINDS, "where")
    assert found == [Spec("centre"), Spec("u2net", "a/b.onnx"), Spec("attention", "random:nano")]
    assert [str(spec) for spec in found] == ["centre", "u2net:a/b.onnx", "attention:random:nano"]


@pytest.mark.parametrize(
    ("texts", "flag", "complaint"),
    [
        (["centre:7"], "where", "centre takes no argument"),
        (["attention"], "where", "attention needs an argument"),
        (["atention:x"], "where", "unknown kind 'atention'; choose among attention, relevance, parts"),
        ([], "where", "name at least one"),
        (["probe:x"], "what", "unknown kind 'probe'; choose among mask-probe"),
    ],
)
def test_invalid_specs_are_refused(texts, flag, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_specs(texts, KINDS if flag == "where" else WHATS, flag)


def test_a_backbone_may_have_a_colon_before_layer_and_heads():
    assert parse_attention("random:nano") == ("random:nano", -1, "mean")
    assert parse_attention("random:nano:-3") == ("random:nano", -3, "mean")
    assert parse_attention("runs/a b/backbone.safetensors:4:2") == ("runs/a b/backbone.safetensors", 4, "2")


def test_file_names_are_short_and_safe():
    spec = Spec("attention", "/some/where/ti/backbone.safetensors")
    assert spec.short == "attention:ti"
    assert Spec("masks", "../../x:y").file_name == "masks-..-x-y"


# ---- ways ------------------------------------------------------------------------------------------------------------


def test_the_fewest_patches_that_hold_the_mass_are_kept():
    maps = torch.tensor([[[0.4, 0.1], [0.3, 0.2]], [[0.25, 0.25], [0.25, 0.25]]])
    assert keep_mass(maps, 0.4).tolist() == [[[True, False], [False, False]], [[True, True], [False, False]]]
    assert keep_mass(maps, 0.7)[0].tolist() == [[True, False], [True, False]]
    assert keep_mass(maps, 0.71)[0].tolist() == [[True, False], [True, True]]
    assert keep_mass(maps, 1.0).all()


@given(seed=st.integers(0, 1000), mass=st.floats(0.05, 1.0))
def test_the_kept_patches_hold_the_mass_and_no_more(seed, mass):
    maps = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(seed))
    keep = keep_mass(maps, mass)
    for each, kept in zip(maps, keep, strict=True):
        held, total = each[kept].sum(), each.sum()
        assert held >= mass * total - 1e-5
        assert held - each[kept].min() < mass * total + 1e-5


def test_crops_lie_where_the_map_is_and_windows_around_the_mask():
    mask = torch.zeros(1, 32, 32, dtype=torch.bool)
    mask[:, 8:16, 20:28] = True
    left, top, right, bottom = crops_on(mask, (0.25,), (32, 32)).boxes[0, 0].tolist()
    assert (left, top, right, bottom) == (20, 8, 28, 16)
    left, top, right, bottom = window_around(mask)[0, 0].tolist()
    assert left <= 20 < 28 <= right
    assert top <= 8 < 16 <= bottom
    assert right - left < 16


def test_patches_that_do_not_divide_the_image_become_pixels():
    keep = torch.eye(3, dtype=torch.bool)[None]
    assert torch.equal(sight_from_patches(keep, (6, 9)).visible((6, 9)), Sight(keep=keep).visible((6, 9)))
    visible = sight_from_patches(keep, (8, 8)).visible((8, 8))
    assert visible[0, 0, 0]
    assert visible[0, 7, 7]
    assert 0.3 < visible.float().mean() < 0.36


def test_invalid_ways_are_refused():
    assert [way.description for way in crop_ways(settings(crop_size=("1/2", "8+4")))] == ["crops 1/2", "crops 8+4"]
    with pytest.raises(UserError, match="--crop-size x"):
        crop_ways(settings(crop_size=("x",)))
    with pytest.raises(UserError, match=r"--attention-mass 0\.5 1\.5: must be above 0 and at most 1"):
        settings(attention_mass=(0.5, 1.5))
    with pytest.raises(UserError, match="--attention-mass: name at least one"):
        mass_ways(settings(attention_mass=()))


# ---- cells -----------------------------------------------------------------------------------------------------------


def cell(where="attention:a", what="crop-probe:b", value=0.5, sizes=(1, 1), **more) -> Cell:
    specs = [Spec(*text.partition(":")[::2]) for text in (where, what)]
    metrics = evaluate(made([round(10 * value)] * 4, [10] * 4), resamples=50)
    parameters = dict(zip(("where", "what"), sizes, strict=True))
    return Cell(*specs, key=f"{where} {what}", metrics=metrics, validation=value, parameters=parameters, **more)


def test_cells_are_read_back_and_a_truncated_line_is_skipped(tmp_path):
    path, first = tmp_path / "cells.jsonl", cell(published="A²", tried={"crops 2/7": 0.5})
    add_cell(path, first)
    with path.open("a") as file:
        file.write(json.dumps(first.to_dict())[:40])
    second = replace(cell("centre"), key="other")
    add_cell(path, second)
    assert read_cells(path) == {first.key: first, "other": second}
    assert read_cells(tmp_path / "none") == {}


def test_true_masks_are_recognised_by_any_name_and_in_older_files():
    assert cell("masks:birds/masks", truth=True).uses_true_masks
    assert cell("masks:data").uses_true_masks
    assert not cell("masks:birds/masks").uses_true_masks


def test_scaling_curves_are_relative_to_the_smallest_with_the_other_side_fixed():
    pairs = [(where, what) for where in (1, 2, 3) for what in (5, 6)]
    cells = [cell(f"attention:w{a}", f"crop-probe:x{b}", sizes=(a, b)) for a, b in reversed(pairs)]
    compared = []

    def gains(reference, others):
        compared.append((reference.key, [other.key for other in others]))
        return [Estimate(0.1, 0.0, 0.2, 20, "made up", difference=True)] * len(others)

    found, notes = curves(cells, gains)
    assert len(notes) == 1
    assert "whatever their pretraining" in notes[0]
    assert [(one.grows, one.fixed, [point.parameters for point in one.points]) for one in found] == [
        ("where", "crop-probe:x6", [1, 2, 3]),
        ("what", "attention:w1", [5, 6]),
    ]
    assert compared[0] == ("attention:w1 crop-probe:x6", ["attention:w2 crop-probe:x6", "attention:w3 crop-probe:x6"])
    assert found[0].points[0].gain is None


def test_one_size_gives_a_note_instead_of_a_curve_and_blocks_are_not_mixed():
    cells = [cell("attention:w", sizes=(1, 5)), cell("attention:v:3", sizes=(2, 5)), cell("centre", sizes=(0, 5))]
    found, notes = curves(cells, lambda *_: pytest.fail("there is nothing to compare"))
    assert found == []
    assert [note.partition(" of ")[0] for note in notes] == ["no scaling curve", "no scaling curve"]


def test_a_grid_without_results_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw_heatmap([[Square(None, empty="no groups")]], ["everything"], ["crop-dfr:x"], "none", tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [1, 3])
def test_equal_values_are_legible_and_drawn_without_warnings(rows, tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    squares = [[Square(Estimate(0.635, 0.5, 0.7, 400, "made up"))]] * rows
    title = "toy, split test: worst-group accuracy in %, with 95 % intervals (400 images)"
    draw_heatmap(squares, ["everything"] * rows, ["mask-probe:sightline-nano"], title, tmp_path / "m.png")
    assert not recwarn.list
    with Image.open(tmp_path / "m.png") as figure:
        pixels = np.asarray(figure.convert("RGB")).astype(int)
    ys, xs = np.nonzero((abs(pixels - (68, 1, 84)) < 3).all(axis=2))  # the dark end of the colours
    xs = xs[ys == ys.min()]  # of the squares, not of the bar beside them
    inside = pixels[ys.min() + 2 : ys.max() - 1, xs.min() + 2 : xs.max() - 1]
    assert inside.min(axis=2).max() > 240, "light on dark"
    assert pixels[:, -2:].min() == 255, "nothing is cut off"
