"""The waterbirds study: its rows, and its table from run folders without weights."""

import contextlib
import json
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.metrics.predictions import Predictions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import claims
import lanes
import run
import stages
from evidence import predictions_of
from options import Benchmark
from packing import pack_all, unpack_all
from rows import folder_of, folders_of
from rows.waterbirds import (
    EXACT,
    HEADLINE,
    PAIRS,
    PAPERS_ROWS,
    PIXEL_ROWS,
    ROWS,
    SHIFT_ROWS,
    TRUE,
    TRUE_PIXELS,
    rows_of,
)
from study import Context, command_of
from tables import as_markdown, paired, result_of, show
from verdicts import HOLDS, NOT_RUN

# ---- rows ------------------------------------------------------------------------------------------------------------


def context(tmp_path: Path, **files: str) -> Context:
    return Context({"birds": tmp_path}, files, tmp_path / "runs", tmp_path / "cache")


@pytest.mark.parametrize("row", rows_of("birds", seeds=(2,), every=True), ids=lambda row: row.name)
def test_every_row_is_a_command_that_is_understood(row, tmp_path):
    here = context(tmp_path, TI="random:nano", SELF="a", U2NET="b")
    command = command_of(here, row)
    assert (command.seed, command.folder, command.resume) == (2, here.folder(row), True)
    assert command.backbone == "random:nano"


def test_rows_do_not_share_folders_and_tables_do_not_contradict_each_other(tmp_path):
    assert len({folder_of(tmp_path, row, 0) for row in ROWS}) == len(ROWS)
    assert all(PIXEL_ROWS[row] == PAPERS_ROWS[row] for row in PIXEL_ROWS.keys() & PAPERS_ROWS.keys())
    assert set(ROWS) >= HEADLINE | {row for pair in PAIRS for row in pair}


def test_every_first_seed_comes_before_any_second_one_and_the_probe_last(tmp_path):
    asked = Benchmark("waterbirds", rows=("probe", "ERM", "iFAM K=4", "iFAM K=4, soft"), seeds=(5, 7))
    every = [row for row, _ in stages.waterbirds_stage(asked, context(tmp_path)) if run.is_wanted(asked, row)]
    assert [(row.name, row.seed) for row in every] == [
        ("ERM", 5), ("iFAM K=4", 5), ("iFAM K=4, soft", 5), ("ERM", 7), ("iFAM K=4", 7), ("iFAM K=4, soft", 7),
        ("probe", 5),
    ]  # fmt: skip


def test_what_is_not_understood_or_not_given_is_a_users_error(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(
        json.dumps({"odd": "erm --nonsense 3", "none": "astrology", "found": "early-mask --masks found:SELF"})
    )
    errors = ("not understood", "no method 'astrology'", "needs --backbones SELF=FILE")
    for row, why in zip(rows_of("birds", seeds=(0,), file=file), errors, strict=True):
        with pytest.raises(UserError, match=why):
            command_of(context(tmp_path, TI="random:nano"), row)
    with pytest.raises(UserError, match="NAME=PATH"):
        run.context_of(Benchmark("a2", backbones=("sightline-nano",)))
    with pytest.raises(UserError, match="the sets of relevance are birds"):
        run.context_of(Benchmark("relevance", data=("waterbirds=there",)))
    with pytest.raises(UserError, match="--table astrology"):
        rows_of("birds", "astrology")


def test_of_shifts_there_is_one_seed_and_every_row_trains_as_long(tmp_path):
    assert [(row.name, row.seed) for row in rows_of("o2o", "shifts")] == [(row, 0) for row in SHIFT_ROWS]
    more = [(row.name, row.seed) for row in rows_of("birds", "shifts", seeds=(0, 3))]
    assert more[len(SHIFT_ROWS) :] == [(row, 3) for row in SHIFT_ROWS if row in HEADLINE] != []
    here = context(tmp_path, TI="random:nano")
    assert {command_of(here, row).epochs for row in rows_of("birds", "shifts")} == {30}


# ---- a whole table ---------------------------------------------------------------------------------------------------

BRIEF = "--epochs 1 --batch 16"
TINY = {
    "ERM": f"erm {BRIEF}",
    "early mask, true": f"early-mask {BRIEF}",
    "early mask, true, pixels": f"early-mask {BRIEF} {EXACT}",
    "late mask, true": f"late-mask {BRIEF}",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run folders of a tiny table, trained by one call and measured by another; and copies, packed and unpacked."""
    home = tmp_path_factory.mktemp("wb")
    write_toy(home / "toy", train=32, val=16, test=32, size=32)
    (home / "rows.json").write_text(json.dumps(TINY))
    common = ["--parallel", 1, "--workers", 0, "--device", "cpu", "--splits", "test", "--seeds", 0]
    data = ["--data", f"birds={home / 'toy'}", "--cache", home / "cache"]
    with (
        pytest.MonkeyPatch.context() as patch,
        (home / "log").open("w") as log,
        contextlib.redirect_stdout(log),
    ):
        patch.setattr(lanes, "new_process", lambda: ThreadPoolExecutor(1))
        script(home, *data, "--backbones", "TI=random:nano", "--precision", "fp32", "--no-measure", *common)
        script(home, *data, "--no-train", *common)
        script(home, "--collect", "--pack", home / "parcels", *common)
    unpack_all(home / "parcels", home / "copy")
    return home


def script(home: Path, *arguments, runs: str = "runs") -> None:
    given = ["waterbirds", *arguments, "--runs", home / runs, "--rows-file", home / "rows.json"]
    run.main([*map(str, given)])


def test_every_run_is_trained_measured_and_certified(made):
    for row in TINY:
        (folder,) = folders_of(made / "runs" / "birds", row, ("val", "test")).values()
        looks = row != "ERM"
        for name in ("localization.json", "localization/test.csv", "shape/test.csv", "certificate.json"):
            assert (folder / name).exists() == looks, (row, name)


def test_training_and_measuring_say_how_long_each_step_took_and_share_the_decoded_pictures(made):
    lines = [json.loads(line) for line in (made / "log").read_text().splitlines() if line.startswith('{"set"')]
    assert [(line["row"], list(line["seconds"])) for line in lines] == [
        *((row, ["training"]) for row in TINY),
        *((row, ["localize", "shape", "certify"]) for row in TINY if row != "ERM"),
    ]
    decoded = (made / "cache").glob("decoded-*.bin")
    assert len(list(decoded)) == 4  # train as it is augmented, and every split as it is measured


def test_parcels_hold_whole_runs_without_weights_and_no_more_than_they_may(made, tmp_path):
    folders = [folder_of(made / "runs" / "birds", row, 0) for row in TINY]
    (whole,) = pack_all(made / "runs", tmp_path)
    most = int(0.6 * (tmp_path / whole["packed"]).stat().st_size)
    parcels = [tmp_path / one["packed"] for one in pack_all(made / "runs", tmp_path, most=most)]
    assert sorted(tmp_path.iterdir()) == sorted(parcels)
    assert len(parcels) > 1
    assert all(parcel.stat().st_size <= most for parcel in parcels)
    held = []
    for parcel in parcels:
        with tarfile.open(parcel) as file:
            held += file.getnames()
    assert len(held) == len(set(held))
    assert {name.split("/")[0] for name in held} == {folder.name for folder in folders}
    assert {Path(name).suffix for name in held} == {".json", ".jsonl", ".csv"}
    (one,) = pack_all(made / "runs", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / one["packed"]]


def test_the_table_is_made_from_copies_without_weights_or_data(made, capsys, tmp_path):
    out = tmp_path / "table.json"
    script(made, "--splits", "test", "--collect", "--markdown", "--out", out, runs="copy")
    printed, content = capsys.readouterr().out, json.loads(out.read_text())
    assert "| early mask, true, pixels | 1 |" in printed
    assert [found["row"] for found in content["rows"]] == list(TINY)
    assert set(content["rows"][1]["sight"]["test"]) >= {"grid_iou", "pixel_iou", "coverage"}
    assert len(content["rows"][0]["metrics"]["test"]["groups"]) == 4
    assert {(pair["row"], pair["against"]) for pair in content["paired"]} == {
        ("early mask, true", "late mask, true"), ("early mask, true, pixels", "early mask, true"),
    }  # fmt: skip
    assert content["missing"] == {f"{row}, seed {seed}": ["training"] for seed in (1, 2) for row in TINY}
    assert str(made) not in out.read_text()


@pytest.fixture
def many_kinds(tmp_path):
    """Of images of 20 kinds, each original and swapped: one row is wrong on the first kind and half of what is swapped,
    the other on the first kind only."""
    kinds = tuple(f"kind {k}" for k in range(20))
    groups = tuple(f"{kind}/{how}" for kind in kinds for how in ("original", "swapped"))
    of = np.repeat(np.arange(40), 4)
    facts = {"data": {"group_names": groups, "counts": {"train": dict.fromkeys(groups[::2], 4)}}}
    for row in (TRUE, TRUE_PIXELS):
        wrong = (of < 2) | ((of % 2 == 1) & (np.arange(160) % 2 == 1) & (row == TRUE))
        logits = np.random.default_rng(0).normal(size=(160, 20))
        logits[np.arange(160), (of // 2 + wrong) % 20] += 20
        folder = folder_of(tmp_path / "runs" / "cub", row, 0)
        (folder / "predictions").mkdir(parents=True)
        images = [f"{name}.jpg" for name in range(160)]
        predicted = Predictions.from_logits(images, of // 2, logits, kinds, of, groups)
        predicted.save_csv(folder / "predictions" / "test.csv")
        (folder / "run.json").write_text(json.dumps(facts))
        (folder / "metrics.json").write_text("{}")
    return tmp_path / "runs" / "cub"


def test_of_many_groups_the_table_and_the_differences_are_of_attributes(many_kinds, capsys):
    results = [result_of(many_kinds, row, "", ("test",), (0,)) for row in (TRUE, TRUE_PIXELS)]
    (pair,) = pairs = paired(many_kinds, ROWS, "test", (0,))
    show([found for found in results if found], pairs, "test", markdown=True)
    printed = capsys.readouterr().out
    assert "|  | seeds | accuracy | original | swapped | grid IoU |" in printed
    assert "| early mask, true | 1 | 71.2 [63.8, 77.7] | 95.0 [87.8, 98.0] | 47.5 [36.9, 58.3] |" in printed
    assert "|  | against | seeds | original |  | swapped |  | accuracy |  |" in printed
    assert pair["original"]["value"] == 0
    assert pair["swapped"]["value"] == pytest.approx(0.475)
    assert (pair["original"]["verdict"], pair["swapped"]["verdict"]) == ("undecided", "better")
    assert "worst_group" not in pair


def test_parcels_of_many_classes_round_probabilities_and_nothing_else(many_kinds, tmp_path):
    folder = folder_of(many_kinds, "early mask, true", 0)
    list(pack_all(many_kinds.parent, tmp_path / "parcels"))
    unpack_all(tmp_path / "parcels", tmp_path / "copy")
    whole, short = (predictions_of([at], "test")[0] for at in (folder, tmp_path / "copy" / "cub" / folder.name))
    assert (short.images, short.predicted.tolist()) == (whole.images, whole.predicted.tolist())
    np.testing.assert_allclose(short.probabilities, whole.probabilities, atol=5e-4)
    assert (short.probabilities != whole.probabilities).any()


def test_claims_are_held_against_copies_without_weights_or_data(made, monkeypatch, tmp_path):
    out = tmp_path / "claims.json"
    given = ["waterbirds", made / "copy", "--read-only", "--only", "F1", "F2", "B1", "B3", "--out", out]
    monkeypatch.setattr(sys, "argv", ["claims.py", *map(str, given)])
    claims.main()
    verdicts = {
        test["test"]: test["verdict"]
        for claim in json.loads(out.read_text())["claims"]
        for test in claim["tests"]
        if test["verdict"] != NOT_RUN
    }
    assert verdicts["verify says 'blind' of trained runs"] == HOLDS
    assert verdicts["verify says 'leaks' of trained runs"] == HOLDS
    for test in (
        "worst group: early mask, true − late mask, true",
        "worst group: early mask, true, pixels − early mask, true",
        "label from shape: early mask, true − chance",
    ):
        assert test in verdicts


def test_what_is_finished_is_not_done_again_and_what_is_lacking_is(made, capsys, monkeypatch):
    begun = []
    monkeypatch.setattr(run, "run_row", lambda _, row, *__: begun.append(row.name) or row.about)
    monkeypatch.setattr(lanes, "new_process", lambda: ThreadPoolExecutor(1))
    shape = folder_of(made / "runs" / "birds", "early mask, true", 0) / "shape" / "test.csv"
    shape.rename(shape.with_suffix(".away"))
    data = ("--data", f"birds={made / 'toy'}", "--backbones", "TI=random:nano")
    script(made, *data, "--splits", "test", "--seeds", 0, "--parallel", 1)
    shape.with_suffix(".away").rename(shape)
    assert begun == ["early mask, true"]
    assert "missing: early mask, true, seed 0: shape/test.csv" in capsys.readouterr().out


def test_markdown_puts_numbers_to_the_right():
    assert as_markdown(["", "n"], [["a", "+1.0"], ["b", ""]])[1] == "| --- | --: |"
