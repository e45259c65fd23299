"""Pairs of every kind, those that cannot be, and the command."""

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
from .test_matrix_fill import NANO, asked, toy  # noqa: F401 (a fixture)


def test_fine_tuning_goes_through_the_training_loop_with_any_where(toy, tmp_path):  # noqa: F811
    parts = Pdiscoformer(toy, backbone=NANO, out=tmp_path / "parts", epochs=1, batch=16, workers=0, device="cpu")
    wheres = (f"attention:{NANO}", f"parts:{sightline.train(parts)}", "everything")
    found = fill(
        asked(toy, tmp_path, where=wheres, what=(f"fine-tune:{NANO}",), attention_mass=(0.5,), crop_size=("1/2",))
    )
    assert [cell.empty for cell in found.cells] == [None] * 3
    assert [cell.published for cell in found.cells] == [None, "iFAM", "ERM"]
    configs = [json.loads((Path(cell.facts["run"]) / "run.json").read_text())["config"] for cell in found.cells]
    assert ["masks" in config for config in configs] == [True, True, False]
    assert all(config["pixels"] for config in configs[:2])


def test_what_a_run_relies_on_can_be_seen_by_another(toy, tmp_path):  # noqa: F811
    run = sightline.train(Probe(toy, backbone=NANO, out=tmp_path / "probe", workers=0, device="cpu"))
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(asked(toy, tmp_path / "grid", where=(f"relevance:{run}", f"relevance:{tmp_path}"), what=whats))
    assert [cell.empty is None for cell in found.cells] == [True, True, False, False]
    assert {cell.published for cell in found.cells} == {None}
    assert not any("other data" in note for note in found.notes)


def test_runs_that_learnt_on_other_data_are_noted(toy, tmp_path):  # noqa: F811
    other = write_toy(tmp_path / "other", train=16, val=16, test=8, seed=1)
    told = {"backbone": NANO, "workers": 0, "device": "cpu"}
    probe = sightline.train(Probe(other, out=tmp_path / "probe", **told))
    parts = sightline.train(Pdiscoformer(other, out=tmp_path / "parts", epochs=1, batch=16, **told))
    config = asked(toy, tmp_path / "grid", where=(f"relevance:{probe}", f"parts:{parts}"), what=(f"mask-probe:{NANO}",))
    for found in (fill(config), fill(config)):
        assert [cell.note for cell in found.cells] == [
            "it was learnt on other data, other", "its parts were learnt on other data, other",
        ]  # fmt: skip


def test_clip_answers_from_one_crop_or_with_the_rest_hidden(toy, tmp_path, clip_folder):  # noqa: F811
    whats = tuple(f"{sees}-zero-shot:{clip_folder}" for sees in ("crop", "mask"))
    found = fill(asked(toy, tmp_path, where=("masks:data", "everything"), what=whats))
    assert [cell.empty for cell in found.cells] == [None] * 4
    assert set(found.cells[0].tried) == {"crops 1/2", "the window around it, enlarged"}
    assert [cell.published for cell in found.cells] == [None, None, "zero-shot", "zero-shot"]


def test_a_picture_of_which_nothing_is_visible_is_answered_all_the_same(toy, tmp_path):  # noqa: F811
    rows = read_rows(toy)
    for image in rows.images:
        path = (tmp_path / "masks" / image).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64)).save(path)
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(asked(toy, tmp_path / "grid", where=(f"masks:{tmp_path / 'masks'}",), what=whats))
    assert len(found.filled) == 2
    assert found.cells[0].metrics.balanced.value == 0.5  # nothing to tell classes by


def test_a_row_without_any_way_is_empty_and_the_others_go_on(toy, tmp_path):  # noqa: F811
    whats = (f"mask-probe:{NANO}", f"crop-probe:{NANO}")
    found = fill(asked(toy, tmp_path, where=("centre", "random"), what=whats, crop_size=("1/4+1/4",)))
    assert [cell.empty and cell.empty.partition(";")[0] for cell in found.cells] == [
        *["--crop-size: there is only one crop in the centre"] * 2, None, None,
    ]  # fmt: skip


def test_masks_are_found_by_a_backbone_that_answers_in_another_size(toy, tmp_path):  # noqa: F811
    wheres = ("tokencut:random:nano", "found:sightline-nano")
    found = fill(asked(toy, tmp_path, where=wheres, what=(f"mask-probe:{NANO}",), size=40))
    assert [cell.empty for cell in found.cells] == [None, None]


def test_cells_that_cannot_be_are_empty_and_say_why(tmp_path):
    data = table(tmp_path / "plain", ("cat", "dog"))
    config = asked(
        data, tmp_path / "grid", where=("everything", "masks:data", "found:nowhere.safetensors"),
        what=(f"crop-probe:{NANO}", f"crop-dfr:{NANO}", "crop-zero-shot:nowhere"),
    )  # fmt: skip
    told = []
    found = fill(config, told.append)
    assert told == list(found.cells)
    assert [cell.empty is None for cell in found.cells] == [True] + [False] * 8
    probe, dfr, clip, masks, *_, saliency_masks = found.cells
    assert probe.figure == probe.metrics.accuracy
    assert "DFR needs groups" in dfr.empty
    assert "nowhere" in clip.empty
    assert "has no masks" in masks.empty
    assert "nowhere.safetensors" in saliency_masks.empty
    assert found.metric == "accuracy"
    assert found.comparisons == ()


def test_what_is_wrong_with_all_of_it_is_said_at_once(toy, tmp_path):  # noqa: F811
    for changes, complaint in (
        ({"where": ("sideways",)}, "no 'sideways'"),
        ({"what": ()}, "--what: name at least one"),
        ({"crop_size": ("0",)}, "--crop-size 0"),
        ({"batch": 0}, "--batch 0"),
    ):
        with pytest.raises(UserError, match=complaint):
            fill(asked(toy, tmp_path / "none", **changes))
    assert not (tmp_path / "none").exists()


def test_the_command_prints_a_table_and_draws_pictures(toy, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    code, said, _ = typed(
        "matrix", toy, "--where", f"attention:{NANO}", "centre", "--what", f"crop-probe:{NANO}",
        "crop-probe:sightline-nano", f"mask-probe:{NANO}", "--crop-size", "1/2", "--attention-mass", 0.5, "--out", tmp_path, *QUICK,
    )  # fmt: skip
    assert code == 0
    assert "worst group of 24 test pictures" in said
    assert "the best published one" in said
    assert "no curve of how A² scales with the where" in said
    for name in ("matrix.png", "scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    (curve,) = json.loads((tmp_path / "matrix.json").read_text())["scaling"]
    assert (curve["grows"], len(curve["points"])) == ("what", 2)
