"""The matrix, from the command line and from Python: its results, and what is not computed twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageOps

import sightline
from sightline.config import A2, Matrix, Probe
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.matrix.bench import MatrixContext
from sightline.matrix.cells import Cell, read_cells
from sightline.matrix.matrix import fill
from sightline.metrics.groups import score
from sightline.metrics.predictions import Predictions

from ..commands import typed

NANO = "random:nano"
WHERES = (f"attention:{NANO}:2", "masks:data", "random", "everything")
WHATS = (f"mask-probe:{NANO}", f"crop-probe:{NANO}", f"mask-dfr:{NANO}")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=32, val=32, test=24)


def settings_for(data: Path, out: Path, **changes) -> Matrix:
    settings = {
        "where": WHERES, "what": WHATS, "crop_size": ("1/2", "1/4+1/4"), "attention_mass": (0.3, 0.8),
        "epochs": 1, "batch": 16, "workers": 0, "device": "cpu", "figures": False,
    }  # fmt: skip
    return Matrix(data=data, out=out, **settings | changes)


@pytest.fixture(scope="module")
def grid(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    return settings_for(toy, out), fill(settings_for(toy, out))


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """The passes over the images from now on."""
    passes, real = [], MatrixContext.over

    def recorded(self, function, indices, preprocess, *, exact):
        passes.append("maps" if exact else "features")
        return real(self, function, indices, preprocess, exact=exact)

    monkeypatch.setattr(MatrixContext, "over", recorded)
    return passes


def predictions_of(config: Matrix, cell: Cell, split: str = "test") -> Predictions:
    return Predictions.load_csv(config.folder / "cells" / cell.folder / "predictions" / f"{split}.csv")


# ---- results ---------------------------------------------------------------------------------------------------------


def test_every_cell_is_computed_and_agrees_with_its_file(grid):
    config, found = grid
    assert len(found.filled) == len(WHERES) * len(WHATS)
    for cell in found.filled:
        assert cell.figure.value == pytest.approx(score(predictions_of(config, cell), "worst-group"))
        assert cell.figure.n > 0
    assert set(read_cells(config.folder / "cells.jsonl")) == {cell.key for cell in found.cells}
    content = json.loads((config.folder / "matrix.json").read_text())
    assert [len(content["cells"]), content["wheres"]] == [12, list(WHERES)]


def test_the_way_is_selected_on_validation_data_without_group_labels(grid):
    config, found = grid
    for cell in found.filled:
        assert cell.tried[cell.way] == max(cell.tried.values())
        if "dfr" not in cell.what.kind:
            assert cell.validation == pytest.approx(score(predictions_of(config, cell, "val"), "balanced"))
            assert cell.validation == cell.tried[cell.way]
    ways = {str(cell.where): set(cell.tried) for cell in found.cells if cell.what.kind == "mask-probe"}
    assert ways[WHERES[0]] == {"patches with 30 % of the map", "patches with 80 % of the map"}
    assert ways["masks:data"] == {"as it is", "the window around it, enlarged"}
    assert ways["everything"] == {"as it is"}


def test_everything_with_a_frozen_backbone_is_the_probe(grid, toy, tmp_path):
    config, found = grid
    run = sightline.train(Probe(toy, backbone=NANO, out=tmp_path / "run", workers=0, device="cpu", batch=16))
    expected = Predictions.load_csv(run / "predictions" / "test.csv").probabilities
    for cell in found.filled:
        if cell.where.kind == "everything" and "probe" in cell.what.kind:
            assert predictions_of(config, cell).probabilities == pytest.approx(expected, abs=1e-4)


def test_attention_with_crops_is_a2(toy, tmp_path):
    known = "sightline-nano"
    config = settings_for(toy, tmp_path / "grid", where=(f"attention:{NANO}:2",), what=(f"crop-probe:{known}",))
    shared = {
        "backbone": known,
        "where": NANO,
        "layer": (2,),
        "crop_size": config.crop_size,
        "workers": 0,
        "device": "cpu",
    }
    run = sightline.train(A2(toy, out=tmp_path / "run", **shared))
    expected = Predictions.load_csv(run / "predictions" / "test.csv").probabilities
    (cell,) = fill(config).cells
    assert cell.published == "A²"
    assert predictions_of(config, cell).probabilities == pytest.approx(expected, abs=1e-4)


def test_the_best_new_pair_is_compared_with_the_best_published_one(grid):
    _, found = grid
    overall, without_masks = found.comparisons
    for best, candidates in (
        (overall, found.filled),
        (without_masks, [c for c in found.filled if c.where.kind != "masks"]),
    ):
        for chosen, published in ((best.new, False), (best.published, True)):
            same = [cell.validation for cell in candidates if bool(cell.published) == published]
            assert chosen.validation == max(same)
        gain = best.new.figure.value - best.published.figure.value
        assert best.gain.value == pytest.approx(gain)
        assert best.gain.low <= gain <= best.gain.high
    assert "masks:data" not in without_masks.sentence
    assert found.best is not None
    assert not found.best.uses_true_masks


def test_cells_can_be_compared_like_runs(grid):
    config, found = grid
    first, second = (config.folder / "cells" / cell.folder for cell in found.cells[:2])
    code, text, _ = typed("compare", first, second)
    assert code == 0
    assert "24 images" in text


# ---- what is not computed twice --------------------------------------------------------------------------------------


def test_a_finished_grid_computes_nothing_again(grid, computed):
    config, found = grid
    lines = (config.folder / "cells.jsonl").read_text()
    again = fill(config)
    assert computed == []
    assert again.cells == found.cells
    assert (config.folder / "cells.jsonl").read_text() == lines


def test_a_grid_is_collected_without_computing(grid, computed):
    config, found = grid
    wheres = (*config.where, "centre")
    collected = fill(replace(config, where=wheres, collect=True))
    assert computed == []
    assert list(collected.cells[: len(found.cells)]) == list(found.cells)
    assert {cell.empty for cell in collected.cells[len(found.cells) :]} == {"not computed yet"}
    with pytest.raises(UserError, match="no finished cells to collect"):
        fill(replace(config, collect=True, out=config.folder / "elsewhere"))


def test_a_grid_is_collected_from_all_cells_whatever_is_named(grid):
    config, found = grid
    collected = fill(replace(config, where=("everything",), what=WHATS[2:], collect=True))
    assert [str(spec) for spec in collected.wheres] == ["everything", *WHERES[:3]]
    assert {cell.key for cell in collected.filled} >= {cell.key for cell in found.filled}
    kept = json.loads((config.folder / "matrix.json").read_text())
    assert kept["whats"][0] == WHATS[2]
    assert len([cell for cell in kept["cells"] if cell["metrics"]]) >= len(found.filled)


def test_a_grid_is_not_collected_with_other_data(grid, tmp_path):
    config, found = grid
    other = write_toy(tmp_path / "toy", train=8, val=8, test=found.cells[0].metrics.n + 4)
    with pytest.raises(UserError, match="name the data they were computed on"):
        fill(replace(config, data=other, out=config.folder, collect=True))


def test_cells_of_other_data_of_the_same_size_are_not_collected(grid, tmp_path):
    config, found = grid
    other = write_toy(tmp_path / "toy", train=32, val=32, test=found.cells[0].metrics.n, seed=1)
    with pytest.raises(UserError, match="name the data they were computed on"):
        fill(replace(config, data=other, out=config.folder, collect=True))


def test_cells_are_computed_again_when_masks_change_but_not_their_size(toy, tmp_path, computed):
    shutil.copytree(toy / "masks", masks := tmp_path / "masks")
    for file in masks.rglob("*.png"):
        Image.open(file).convert("L").save(file, compress_level=0)
    config = settings_for(toy, tmp_path / "grid", where=(f"masks:{masks}",), what=WHATS[:1])
    (first,) = fill(config).cells
    once = len(computed)
    sizes = [file.stat().st_size for file in sorted(masks.rglob("*.png"))]
    for file in masks.rglob("*.png"):
        ImageOps.invert(Image.open(file)).save(file, compress_level=0)
    assert [file.stat().st_size for file in sorted(masks.rglob("*.png"))] == sizes
    (again,) = fill(config).cells
    assert again.key != first.key
    assert len(computed) == 2 * once
    assert not (predictions_of(config, again).probabilities == predictions_of(config, first).probabilities).all()


def test_the_masks_of_the_data_are_recognised_under_any_path(toy, tmp_path, computed):
    shutil.copytree(toy / "masks", tmp_path / "elsewhere")
    wheres = ("masks:data", f"masks:{toy / 'masks'}", f"masks:{tmp_path / 'elsewhere'}", "everything")
    found = fill(settings_for(toy, tmp_path / "grid", where=wheres, what=WHATS[:1]))
    assert [cell.uses_true_masks for cell in found.cells] == [True, True, True, False]
    assert len({cell.key for cell in found.cells}) == 2
    assert found.best is found.cells[-1]


def test_another_predictor_costs_only_its_own_work(grid, computed):
    config, found = grid
    more = fill(replace(config, what=(*WHATS, f"crop-dfr:{NANO}")))
    assert [cell for cell in more.cells if cell.what.kind != "crop-dfr"] == list(found.cells)
    assert computed == []  # the probe's features, and the way it chose, are there
    assert len(more.filled) == 16


def test_another_backbone_reuses_the_maps(grid, computed):
    config, _ = grid
    other = replace(config, where=WHERES[:1], what=("crop-probe:random:nano",), seed=0, crop_size=("1/2",))
    assert len(fill(other).filled) == 1
    assert "maps" not in computed


def test_a_cell_without_its_predictions_is_computed_again(toy, tmp_path):
    config = settings_for(toy, tmp_path, where=("everything",), what=WHATS[:1])
    (cell,) = fill(config).cells
    path = tmp_path / "cells" / cell.folder / "predictions" / "test.csv"
    before = path.read_bytes()
    path.unlink()
    fill(config)
    assert path.read_bytes() == before
