"""Pairs of every kind, impossible ones, and the command."""

import json
from pathlib import Path

import pytest
from PIL import Image

import sightline
from sightline.config import Pdiscoformer, Probe
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.matrix.matrix import fill

from ..commands import QUICK, typed
from ..methods.test_zeroshot import folder as clip_folder  # noqa: F401 (a fixture)
from ..small_runs import table
from .test_matrix_fill import NANO, settings_for, toy  # noqa: F401 (a fixture)


def test_fine_tuning_uses_the_training_loop_with_any_selector(toy, tmp_path):  # noqa: F811
    parts = Pdiscoformer(toy, backbone=NANO, out=tmp_path / "parts", epochs=1, batch=16, workers=0, device="cpu")
    wheres = (f"attention:{NANO}", f"parts:{sightline.train(parts)}", "everything")
    found = fill(
        settings_for(
            toy, tmp_path, where=wheres, what=(f"fine-tune:{NANO}",), attention_mass=(0.5,), crop_size=("1/2",)
        )
    )
    assert [cell.empty for cell in found.cells] == [None] * 3
    assert [cell.published for cell in found.cells] == [None, "iFAM", "ERM"]
    configs = [json.loads((Path(cell.facts["run"]) / "run.json").read_text())["config"] for cell in found.cells]
    assert ["masks" in config for config in configs] == [True, True, False]
    assert all(config["sight"] == "pixels" for config in configs[:2])


def test_the_relevance_of_a_run_is_a_selector(toy, tmp_path):  # noqa: F811
    run = sightline.train(Probe(toy, backbone=NANO, out=tmp_path / "probe", workers=0, device="cpu"))
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(settings_for(toy, tmp_path / "grid", where=(f"relevance:{run}", f"relevance:{tmp_path}"), what=whats))
    assert [cell.empty is None for cell in found.cells] == [True, True, False, False]
    assert {cell.published for cell in found.cells} == {None}
    assert not any("other data" in note for note in found.notes)


def test_runs_trained_on_other_data_are_noted(toy, tmp_path):  # noqa: F811
    other = write_toy(tmp_path / "other", train=16, val=16, test=8, seed=1)
    shared = {"backbone": NANO, "workers": 0, "device": "cpu"}
    probe = sightline.train(Probe(other, out=tmp_path / "probe", **shared))
    parts = sightline.train(Pdiscoformer(other, out=tmp_path / "parts", epochs=1, batch=16, **shared))
    config = settings_for(
        toy, tmp_path / "grid", where=(f"relevance:{probe}", f"parts:{parts}"), what=(f"mask-probe:{NANO}",)
    )
    for found in (fill(config), fill(config)):
        assert [cell.note for cell in found.cells] == [
            "it was trained on other data, other", "its parts were trained on other data, other",
        ]  # fmt: skip


def test_clip_predicts_from_one_crop_or_with_the_rest_hidden(toy, tmp_path, clip_folder):  # noqa: F811
    whats = tuple(f"{sees}-zero-shot:{clip_folder}" for sees in ("crop", "mask"))
    found = fill(settings_for(toy, tmp_path, where=("masks:data", "everything"), what=whats))
    assert [cell.empty for cell in found.cells] == [None] * 4
    assert set(found.cells[0].tried) == {"crops 1/2", "the window around it, enlarged"}
    assert [cell.published for cell in found.cells] == [None, None, "zero-shot", "zero-shot"]


def test_an_image_without_any_visible_pixel_gets_a_prediction(toy, tmp_path):  # noqa: F811
    rows = read_rows(toy)
    for image in rows.images:
        path = (tmp_path / "masks" / image).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64)).save(path)
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(settings_for(toy, tmp_path / "grid", where=(f"masks:{tmp_path / 'masks'}",), what=whats))
    assert len(found.filled) == 2
    assert found.cells[0].metrics.balanced.value == 0.5  # no information about the class


def test_a_row_without_any_way_is_empty_and_the_others_are_computed(toy, tmp_path):  # noqa: F811
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(settings_for(toy, tmp_path, where=("centre", "random"), what=whats, crop_size=("1/4+1/4",)))
    assert [cell.empty and cell.empty.partition(";")[0] for cell in found.cells] == [
        *["--crop-size: `centre` takes a single crop"] * 2, None, None,
    ]  # fmt: skip


def test_masks_come_from_a_backbone_with_another_input_size(toy, tmp_path):  # noqa: F811
    wheres = ("tokencut:random:nano", "found:sightline-nano")
    found = fill(settings_for(toy, tmp_path, where=wheres, what=(f"mask-probe:{NANO}",), size=40))
    assert [cell.empty for cell in found.cells] == [None, None]


def test_impossible_cells_are_empty_with_a_reason(tmp_path):
    data = table(tmp_path / "plain", ("cat", "dog"))
    config = settings_for(
        data, tmp_path / "grid", where=("everything", "masks:data", "found:nowhere.safetensors"),
        what=(f"crop-probe:{NANO}", f"crop-dfr:{NANO}", "crop-zero-shot:nowhere"),
    )  # fmt: skip
    reported = []
    found = fill(config, reported.append)
    assert reported == list(found.cells)
    assert [cell.empty is None for cell in found.cells] == [True] + [False] * 8
    probe, dfr, clip, masks, *_, saliency_masks = found.cells
    assert probe.figure == probe.metrics.accuracy
    assert "DFR needs group labels" in dfr.empty
    assert "nowhere" in clip.empty
    assert "has no masks" in masks.empty
    assert "nowhere.safetensors" in saliency_masks.empty
    assert found.metric == "accuracy"
    assert found.comparisons == ()


def test_invalid_settings_are_refused_before_the_work(toy, tmp_path):  # noqa: F811
    for changes, complaint in (
        ({"where": ("sideways",)}, "unknown kind 'sideways'"),
        ({"what": ()}, "--what: name at least one"),
        ({"crop_size": ("0",)}, "--crop-size 0"),
        ({"batch": 0}, "--batch 0"),
    ):
        with pytest.raises(UserError, match=complaint):
            fill(settings_for(toy, tmp_path / "none", **changes))
    assert not (tmp_path / "none").exists()


def test_the_command_prints_a_table_and_draws_figures(toy, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    code, text, _ = typed(
        "matrix", toy, "--where", f"attention:{NANO}", "centre", "--what", f"crop-probe:{NANO}",
        "crop-probe:sightline-nano", f"mask-probe:{NANO}", "--crop-size", "1/2", "--attention-mass", 0.5,
        "--out", tmp_path, *QUICK,
    )  # fmt: skip
    assert code == 0
    assert "Worst-group accuracy in % on 24 test images" in " ".join(text.split())
    assert "best published pair" in text
    assert "no scaling curve of A² over the where" in text
    for name in ("matrix.png", "scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    (curve,) = json.loads((tmp_path / "matrix.json").read_text())["scaling"]
    assert (curve["grows"], len(curve["points"])) == ("what", 2)
