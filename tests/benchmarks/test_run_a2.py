"""The A² study on a handful of toy images: rows are run once, selected between stages, and put together."""

import csv
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import lanes
import run
from collect import a2_results, short, with_looks_once
from evidence import arrays_in, benchmark_rows, mean_of
from options import Benchmark
from oracle import ShiftedMasks, shifted_masks
from record import record
from rows import Row
from rows.a2 import RULE, Backbone, Look, first_rows, second_rows
from study import Context, command_of

ROWS = (
    "full, N", "centre, N", "DFR train, N", "A2 N>N", "A2 N>N, DFR train", "A2 N>N, block -1, mean",
    "A2 N>N, block -1, head 2", "A2 N>N, 2 crops", "oracle 0.8, N", "oracle 0.4, N",
)  # fmt: skip
OTHERS = ("attention N", "distances")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=24, val=12, test=16)


@pytest.fixture(scope="module")
def displaced(toy) -> Path:
    """The same test images; every other bird counts as moved."""
    with (toy / "rows.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"]
    with (toy / "displaced.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], "group_position"])
        writer.writeheader()
        for number, line in enumerate(lines):
            writer.writerow(line | {"group_position": ("displaced", "centred")[number // 2 % 2]})
    return toy / "displaced.csv"


@pytest.fixture(scope="module")
def asked(toy, displaced, tmp_path_factory) -> Benchmark:
    runs = tmp_path_factory.mktemp("a2") / "runs"
    return Benchmark(
        "a2", (f"birds={toy}", f"displaced={displaced}"), ("N=sightline-nano",), runs, rows=(*ROWS, *OTHERS),
        sets=("birds", "turned"), parallel=1, workers=0, device="cpu", precision="fp32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(asked) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "new_process", lambda: ThreadPoolExecutor(1))
        run.run(asked)
    return asked.runs


# ---- rows ------------------------------------------------------------------------------------------------------------

TWO = [Backbone("S", "s.safetensors", 6, 12, 224), Backbone("Ti", "ti.safetensors", 3, 12, 224)]


def test_every_pair_is_tried_with_the_plain_rule_and_with_the_look_that_was_chosen():
    first = {row.name for row in first_rows("birds", TWO)}
    by = {"S": Look(heads="1"), "Ti": Look(layer=-3)}
    second = {row.name: row for row in second_rows("birds", TWO, by)}
    for pair in ("S>S", "S>Ti", "Ti>S", "Ti>Ti"):
        assert f"A2 {pair}, block -1, mean" in first
        assert {f"A2 {pair}", f"A2 {pair}, DFR val", f"A2 {pair}, DFR train"} <= set(second)
    assert second["A2 S>Ti"].line == "a2 --where @S --layer -1 --heads 1 --crop-size 2/7 --backbone @Ti"
    assert second["A2 Ti>S"].line == "a2 --where @Ti --layer -3 --heads mean --crop-size 2/7 --backbone @S"


def test_rows_are_kept_apart_on_disk():
    rows = [*first_rows("birds", TWO), *second_rows("birds", TWO, {"S": Look(), "Ti": Look()})]
    context = Context({}, {}, Path("runs"), Path("cache"))
    assert len({context.folder(row) for row in rows}) == len({(row.name, row.seed) for row in rows}) == len(rows)


@pytest.mark.parametrize("kind", ["birds", "o2o", "m2m", "disjoint", "turned", "toy"])
def test_every_row_is_something_a_user_could_type(kind):
    looks = {"S": Look(heads="1"), "Ti": Look(-3)}
    files = {one.name: one.file for one in TWO}
    context = Context({kind: Path("data")}, files, Path("runs"), Path("cache"), "--batch 512")
    own = ("oracle", "attention", "distances")
    rows = [*first_rows(kind, TWO), *second_rows(kind, TWO, looks, Look(heads="1"))]
    for row in (row for row in rows if not row.line.startswith(own)):
        command = command_of(context, row)
        assert command.method == row.line.split()[0]
        assert command.backbone in ("s.safetensors", "ti.safetensors")
    if kind == "turned":
        assert [row.seed for row in rows if row.name == "adapter S, look at birds"] == [0, 1, 2]


def test_only_rows_that_are_compared_there_answer_displaced_birds():
    rows = [*first_rows("birds", TWO), *second_rows("birds", TWO, {"S": Look(), "Ti": Look()})]
    moved = {row.name for row in rows if row.measures == ("displaced",)}
    assert {"full, S", "centre, Ti", "centre 2/7, S", "random, S", "A2 S>Ti"} <= moved
    assert not {"full, S, plain", "A2 S>Ti, 2 crops", "oracle 0.8, S", "S2, S"} & moved


# ---- true masks, moved -----------------------------------------------------------------------------------------------


def test_a_moved_mask_keeps_as_much_of_itself_as_asked_and_the_crop_follows():
    masks = torch.zeros(2, 64, 64, dtype=torch.bool)
    masks[0, 8:28, 8:28] = masks[1, 30:50, 34:58] = True
    assert torch.equal(shifted_masks(masks, 1.0), masks)
    shares, on_bird = [], []
    for mass in (0.8, 0.6, 0.4):
        moved = shifted_masks(masks, mass)
        assert moved.any(dim=2).any(dim=1).all()
        shares.append((moved & masks).sum((1, 2)) / moved.sum((1, 2)))
        sight = ShiftedMasks(0.25, mass).look_at(torch.zeros(2, 3, 64, 64), masks)
        seen = sight.visible((64, 64))
        on_bird.append((seen & masks).sum((1, 2)) / seen.sum((1, 2)))
        assert (shares[-1] <= mass).all()
        assert (shares[-1] > mass - 0.1).all()
    assert (on_bird[0] > on_bird[2]).all()


# ---- the whole of it -------------------------------------------------------------------------------------------------


def test_everything_asked_for_is_there_and_is_not_done_again(asked, done, monkeypatch):
    lines = benchmark_rows(done / "birds")
    assert set(lines) == set(ROWS)
    assert set(benchmark_rows(done / "turned")) == {"full, N", "A2 N>N, block -1, mean"}
    assert not list(done.rglob("*.safetensors"))

    def again() -> None:
        raise AssertionError("a finished row was begun again")

    monkeypatch.setattr(lanes, "new_process", again)
    run.run(asked)


def test_a_result_file_says_once_what_was_tried_and_intervals_in_one_line(done, tmp_path):
    found = a2_results(done)
    sets = {name: with_looks_once(short(one)) for name, one in found.items()}
    record(tmp_path / "a2.json", "cpu", {"looks_chosen_by": RULE, "sets": sets})
    text = (tmp_path / "a2.json").read_text()
    birds = json.loads(text)["sets"]["birds"]
    assert birds["looks_tried"]["N"] == next(row for row in found["birds"]["rows"] if "look" in row)["look"]["tried"]
    assert {tuple(row["look"]) for row in birds["rows"] if "look" in row} == {("chosen",)}
    assert '"interval": [ 0' in text


def test_the_look_is_chosen_by_validation_data_and_the_row_says_so(done):
    look = benchmark_rows(done / "birds")["A2 N>N"]["look"]
    assert set(look["tried"]) == {"block -1, mean", "block -1, head 2"}
    assert look["tried"][look["chosen"]] == max(look["tried"].values())
    assert "without group labels or masks" in look["rule"]


def test_oracles_look_worse_and_worse(done):
    mass = {m: arrays_in(done / "birds" / f"oracle-0-{m}--n-0")["mass"].mean() for m in (8, 4)}
    assert mass[4] < 0.4 < mass[8] < 0.8


def test_the_task_turned_round_asks_for_the_place(done, toy):
    facts = json.loads((done / "turned" / "full--n-0" / "run.json").read_text())
    birds = read_rows(toy)
    assert facts["data"]["classes"] == ["meadow", "water"]
    assert set(facts["data"]["group_names"]) == {f"{p}/{b}" for p in ("meadow", "water") for b in birds.classes}


def test_results_have_strata_displaced_birds_and_attention(done, asked, capsys):
    found = a2_results(done)["birds"]
    row = next(one for one in found["rows"] if one["row"] == "A2 N>N")
    assert set(row["parts"]) == {"farthest 1 %", "farthest 10 %", "the rest", "nearest 10 %", "displaced", "centred"}
    assert row["parts"]["farthest 10 %"]["accuracy"]["n"] == 2  # of 16, rounded up
    assert row["parts"]["displaced"]["accuracy"]["n"] + row["parts"]["centred"]["accuracy"]["n"] == 16
    assert {"5 mean pixels mass", "5 2 pixels hit", "0 registers"} <= set(found["attention"]["attention-n"])
    assert {one["row"]: one["against"] for one in found["paired"]}["A2 N>N, DFR train"] == "DFR train, N"
    out = asked.runs.parent / "a2.json"
    run.main(["a2", "--collect", "--runs", str(done), "--out", str(out), "--pack", str(out.with_name("parcels"))])
    assert str(done.parent) not in out.read_text()
    assert {path.name for path in out.with_name("parcels").iterdir()} == {"birds.tar.xz", "turned.tar.xz"}
    assert "A2 N>N, 2 crops" in capsys.readouterr().out


def test_a_row_that_fails_does_not_take_the_others_with_it(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lanes, "new_process", lambda: ThreadPoolExecutor(1))
    context = replace(run.context_of(asked), runs=tmp_path / "runs")
    rows = [Row("birds", "odd", "probe --size 7 --backbone @N"), Row("birds", "distances", "distances")]
    run.run_stage(asked, context, [(row, {"look": None}) for row in rows], None)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["failed" in line for line in printed] == [True, False]
    assert len(arrays_in(tmp_path / "runs" / "birds" / "distances-0")["distance"]) == 16


def test_means_have_intervals_over_pictures():
    found = mean_of(np.random.default_rng(0).normal(0.1, 0.05, 400), difference=True)
    assert 0.09 < found.low < found.value < found.high < 0.11
