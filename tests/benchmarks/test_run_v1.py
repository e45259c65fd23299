"""The study of Waterbirds v1.0: its rows, its archives as a dataset, and one object for each run."""

import csv
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from sightline.data.images import Preprocess, decode
from sightline.data.rows import read_rows

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import run
from jobs import weights_missing
from packs import Packs, write_rows
from rows import Row, folder_of
from rows.waterbirds_v1 import (
    ALL,
    FIVE_SEEDS,
    FROM_TRAIN,
    GRIDS,
    HEADLINE,
    SLOW,
    first_rows,
    method_and_recipe,
    next_rows,
    row,
    selected_of_grids,
)
from study import Context, command_of


def context(tmp_path: Path) -> Context:
    return Context(
        {"birds": tmp_path}, {"TI": "random:nano", "SELF": "b", "U2NET": "c"}, tmp_path / "runs", tmp_path / "cache"
    )


@pytest.mark.parametrize("row", [row("birds", name) for name in ALL], ids=lambda row: row.name)
def test_every_row_is_a_command_that_is_understood(row, tmp_path):
    here = context(tmp_path)
    command = command_of(here, row)
    assert (command.seed, command.folder, command.resume) == (0, here.folder(row), True)
    assert (command.select_on == "train-split") is row.name.endswith(FROM_TRAIN)
    if row.method in ("erm", "ifam", "early-mask", "groupdro", "irm", "lff"):
        assert command.epochs == 10


def test_first_comes_one_seed_of_every_row_and_then_the_headline():
    names = [row.name for row in first_rows("birds")]
    assert sorted(names) == sorted(set(ALL) - set(SLOW))
    assert names.index("ERM") < names.index("MaskTune")
    later = next_rows("birds", ["JTT, 5 copies"])
    assert [row.name for row in later[: len(HEADLINE) + 1]] == [*HEADLINE, "JTT, 5 copies"]
    assert {row.seed for row in later if row.name in FIVE_SEEDS} == {1, 2, 3, 4}
    assert {(row.name, row.seed) for row in later[-3 * len(SLOW) :]} == {
        (name, seed) for name in SLOW for seed in (0, 1, 2)
    }
    assert len({(row.name, row.seed) for row in later}) == len(later)


def test_of_every_grid_the_row_with_the_best_validation_score_is_selected():
    scores = {f"JTT, {how}": 0.1 * k for k, how in enumerate(GRIDS["JTT"])} | {"IRM, penalty 1": 0.9}
    assert selected_of_grids(scores.get) == [f"JTT, {list(GRIDS['JTT'])[-1]}"]  # of IRM not all are trained


def test_names_say_method_and_recipe():
    assert method_and_recipe("iFAM K=4, papers") == ("iFAM K=4", "papers")
    assert method_and_recipe("ERM, our recipe, selected on train") == ("ERM", "our recipe")
    assert method_and_recipe("probe") == ("probe", "default")


def test_a_row_may_start_from_a_run_that_comes_before_it(tmp_path):
    here, row = context(tmp_path), Row("birds", "MaskTune", ALL["MaskTune"])
    assert weights_missing(here, row, {}).startswith("no weights of ERM seed 0")
    assert weights_missing(here, row, {}, [Row("birds", "ERM", ALL["ERM"])]) == ""
    assert weights_missing(here, row, {}, [Row("birds", "ERM", ALL["ERM"], 1)]) != ""


def test_the_archives_are_a_dataset_with_masks(tmp_path):
    def put(archive: str, files: dict[str, bytes]) -> None:
        with zipfile.ZipFile(tmp_path / archive, "w") as file:
            for name, content in files.items():
                file.writestr(name, content)

    def image(mode: str, colour) -> bytes:
        held = io.BytesIO()
        Image.new(mode, (8, 8), colour).save(held, "PNG")
        return held.getvalue()

    lines = ["img_id,img_filename,y,split,place,place_filename"]
    lines += [f"{k},a/{k}.png,{k % 2},{k % 3},{k // 6},x" for k in range(12)]
    put("waterbirds.zip", {"metadata.csv": "\n".join(lines).encode()} | {
        f"a/{k}.png": image("RGB", (k, 0, 0)) for k in range(12)
    })  # fmt: skip
    put("cub224.zip", {f"masks/a/{k}.png": image("1", k % 2) for k in range(12)})
    path = write_rows(Packs(tmp_path, tmp_path / "out"))
    rows = read_rows(path)
    assert (rows.classes, rows.group_names[:2]) == (("landbird", "waterbird"), ("landbird/land", "landbird/water"))
    assert [len(rows.split_indices(split)) for split in ("train", "val", "test")] == [4, 4, 4]
    found = decode(rows, 3, Preprocess((8, 8)))
    assert (int(found.image[0, 0, 0]), bool(found.mask.all())) == (3, True)
    assert len(read_rows(write_rows(Packs(tmp_path, tmp_path / "few", limit=1)))) == 12


def test_runs_become_one_object_each_and_come_back_from_an_archive(toy, tmp_path, capsys):
    given = ["--backbones", "TI=random:nano", "SELF=random:nano", "--runs", str(tmp_path / "runs"), "--epochs", "1"]
    given += ["--precision", "fp32", "--workers", "0", "--device", "cpu", "--parallel", "1"]
    rows = ["--rows", "probe", "early mask, true", "--seeds", "0"]
    run.main(["v1", "--data", f"birds={toy}", *given, *rows, "--out", str(tmp_path / "a.json")])
    assert "failed" not in capsys.readouterr().out
    run.main(["v1", "--collect", "--runs", str(tmp_path / "runs"), "--pack", str(tmp_path / "packed")])
    run.main(["v1", "--collect", "--unpack", str(tmp_path / "packed"), "--runs", str(tmp_path / "back"), "--out",
              str(tmp_path / "b.json")])  # fmt: skip
    first, second = (json.loads((tmp_path / name).read_text())["runs"] for name in ("a.json", "b.json"))
    assert first == second
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["row"], row["seeds"]) for row in rows] == [("early mask, true", [0]), ("probe", [0])]
    for one, record in zip(rows, first, strict=True):
        found = one["worst_group"]
        assert found["low"] <= found["value"] <= found["high"]
        assert round(found["value"], 4) == record["worst_group"]
    masked, probe = first
    assert (masked["row"], masked["blind"], probe["blind"]) == ("early mask, true", True, False)
    assert (probe["coverage"], probe["selection"]) == (1.0, "balanced on val")
    assert 0 < masked["coverage"] < 0.5 < masked["pixel_iou"] + masked["coverage"]
    assert set(masked["groups"].values()) <= {value / 12 for value in range(13)} | {round(v / 12, 4) for v in range(13)}
    assert masked["worst_group"] == min(masked["groups"].values())
    wanted = "method recipe seed selection accuracy adjusted worst_group groups pixel_iou coverage blind commit"
    assert all({*wanted.split()} <= record.keys() for record in first)
    with (folder_of(tmp_path / "back" / "birds", "probe", 0) / "predictions" / "test.csv").open(newline="") as file:
        assert all(len(line["p_duck"]) <= 6 for line in csv.DictReader(file))
