"""The relevance study on a handful of toy images: rows are run once, selected between stages, and put together."""

import csv
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.explain.stress_results import StressResults

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import claims
import lanes
import run
import selection
from claims_relevance import versus_row
from collect import relevance_results
from contrasts import WORST
from evidence import Evidence
from jobs import lacking, run_row, trained_as, weights_missing
from options import Benchmark
from packing import pack_all, unpack_all
from rows import Row, folder_of
from rows.relevance import (
    CURVES,
    HEADLINE,
    HEADLINES,
    MASKS,
    SETS,
    Masks,
    imagenet_lines,
    penalised,
    rate_rows,
    robustvit,
    selected_rows,
    starting_rows,
)
from stages import in_turn
from study import Context, command_of
from verdicts import NOT_RUN

ROWS = ("ERM", "RobustViT, rate 5e-5", "RobustViT, rate 2e-4", "RobustViT", "MaskTune")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=16, val=12, test=16)


@pytest.fixture(scope="module")
def asked(toy, tmp_path_factory) -> Benchmark:
    return Benchmark(
        "relevance", (f"birds={toy}",), ("TI=sightline-nano",), tmp_path_factory.mktemp("relevance") / "runs",
        rows=ROWS, seeds=(0,), val=8, limit=6, epochs=1, parallel=1, workers=0, device="cpu", precision="fp32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(asked) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "new_process", lambda: ThreadPoolExecutor(1))
        run.run(asked)
    return asked.runs


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETS)
def test_every_row_is_something_a_user_could_type_and_has_a_folder_of_its_own(kind, tmp_path):
    files = {"TI": "ti.safetensors", "SELF": "s.safetensors"}
    context = Context({kind: Path("home")}, files, tmp_path, Path("cache"))
    rows = [*starting_rows(kind), *rate_rows(kind), *selected_rows(kind)]
    for row in rows:
        command = command_of(context, replace(row, line=row.line.replace("RATE", "1e-5")))
        assert command.method == row.line.split()[0]
        assert command.data == (Path("home") if command.method == "erm" else Path("home/few.csv"))
        assert not {"TI", "SELF"} & set(str(vars(command)).replace("'", " ").split())
        if row.name.endswith(", S") and command.method == "robustvit":
            assert command.init_from == str(folder_of(tmp_path / kind, "ERM, S", row.seed))
    assert len({context.folder(row) for row in rows}) == len(rows)


def test_as_many_pictures_are_seen_however_few_masks_there_are():
    assert Masks(3, 2).epochs == 150  # at most
    assert Masks(300, 2).epochs == 9
    assert HEADLINE["cub"].words == "3 masks of 100 classes"
    assert HEADLINE["cub"].flags == "--masks-per-class 3 --mask-classes 100"


def test_a_row_that_needs_another_backbone_says_so(asked, tmp_path):
    context = Context({"birds": tmp_path}, {"TI": "x"}, tmp_path, Path("cache"))
    with pytest.raises(UserError, match="RobustViT, TokenCut: needs --backbones SELF=FILE"):
        command_of(context, Row("birds", "RobustViT, TokenCut", "robustvit --masks tokencut:SELF"))


def test_the_headline_rows_of_all_sets_come_first_and_the_sets_take_turns():
    rows = [row for kind in SETS for row in selected_rows(kind)]
    ordered = [row for row, _ in in_turn((row, {}) for row in rows)]
    assert sorted(map(str, ordered)) == sorted(map(str, rows))
    assert [(row.set, row.name, row.seed) for row in ordered[:4]] == [(kind, "RobustViT", 0) for kind in SETS]
    headline = [row.name in HEADLINES for row in ordered]
    assert headline == sorted(headline, reverse=True)
    for some in (True, False):
        seeds = [row.seed for row, is_one in zip(ordered, headline, strict=True) if is_one == some]
        assert seeds == sorted(seeds)


def test_nobody_is_asked_for_neighbours_where_no_class_has_two_pictures():
    rows = [*starting_rows("imagenet"), *rate_rows("imagenet"), *selected_rows("imagenet")]
    assert not any({"neighbours", "masks"} & set(row.measures) for row in rows)
    assert all("curves" in row.measures for row in rows if row.name in ("before", "RobustViT"))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_few_pictures_validate_and_all_others_keep_their_names(asked, done):
    home = run.context_of(asked).data["birds"]
    every, few = read_rows(home), read_rows(home / "few.csv")
    assert [len(few.split_indices(split)) for split in ("train", "val", "test")] == [16, 8, 16]
    assert np.bincount(few.labels[few.split_indices("val")]).tolist() == [4, 4]
    assert [few.images[i] for i in few.split_indices("test")] == [every.images[i] for i in every.split_indices("test")]


def test_half_of_the_classes_teach_and_the_other_half_are_tested(tmp_path):
    with (tmp_path / "samples.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "wnid"], *([f"{i}.webp", f"n{i:08}"] for i in range(40))])
    lines = imagenet_lines(tmp_path, tmp_path / "home")
    assert [sum(line["split"] == split for line in lines) for split in ("train", "val", "test")] == [10, 10, 20]
    assert lines[3]["image"] == "../3.webp"


# ---- runs ------------------------------------------------------------------------------------------------------------


def facts_in(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_rows_are_run_and_measured_and_the_rate_is_the_one_that_validation_chose(done, asked):
    folders = {path.parents[1].name for path in (done / "birds").glob("*/stress/test.csv")}
    assert folders == {folder_of(done, name, 0).name for name in ROWS}
    facts = facts_in(folder_of(done / "birds", "RobustViT", 0))
    rate = facts["benchmark"]["rate"]
    assert facts["config"]["lr"] == float(rate["rate"])
    assert set(rate["tried"]) == {"5e-5", "2e-4"}
    assert "2 points" in rate["rule"]


def test_the_run_that_the_rate_was_chosen_by_is_not_trained_again(done):
    reported = facts_in(folder_of(done / "birds", "RobustViT", 0))["benchmark"]
    tried = f"RobustViT, rate {reported['rate']['rate']}"
    assert (reported["row"], reported["trained_as"]) == ("RobustViT", tried)
    assert "trained_as" not in facts_in(folder_of(done / "birds", tried, 0))["benchmark"]
    one, other = (folder_of(done / "birds", name, 0) for name in ("RobustViT", tried))
    assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
    tests = [StressResults.from_dict(json.loads((at / "stress" / "test.json").read_text())) for at in (one, other)]
    assert [bool(found.curves) for found in tests] == [True, False], "what it lacked was measured"
    assert all(found.neighbours and found.masks for found in tests)


def test_a_run_without_weights_stands_for_the_same_if_nothing_is_left_to_measure(done, asked, tmp_path):
    masks, rate = HEADLINE["birds"], {"rate": {"rate": "1e-5"}}
    context = replace(run.context_of(asked), runs=tmp_path)
    trained = folder_of(done / "birds", "RobustViT, rate 5e-5", 0)
    for name in ("RRR, rate 1e-5", "RobustViT, rate 5e-5"):
        shutil.copytree(trained, folder_of(tmp_path / "birds", name, 0), ignore=shutil.ignore_patterns("*.safetensors"))
    whole = Row("birds", "RRR", penalised("rrr", masks, "1e-5"), measures=MASKS)
    assert trained_as(context, whole, rate).name == "RRR, rate 1e-5"
    assert run_row(context, whole, rate, True, True)["row"] == "RRR"
    assert not lacking(context, whole)
    curves = Row("birds", "RobustViT", robustvit(masks, rate="5e-5"), measures=CURVES)
    assert trained_as(context, curves, rate) is None, "there are no weights to draw curves with"
    assert weights_missing(context, curves, rate).startswith("no weights of ERM seed 0")
    other = Row("birds", "RobustViT", robustvit(masks, rate="2e-4"), measures=CURVES)
    assert trained_as(context, other, rate) is None, "another rate is another run"


def test_what_is_finished_is_not_done_again(done, asked, monkeypatch):
    monkeypatch.setattr(lanes, "new_process", lambda: pytest.fail("there is nothing left to do"))
    run.run(asked)


def test_parcels_count_as_done_and_what_needs_their_weights_says_so(done, asked, tmp_path, monkeypatch, capsys):
    list(pack_all(done, tmp_path / "parcels"))
    unpack_all(tmp_path / "parcels", tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
    monkeypatch.setattr(lanes, "new_process", lambda: pytest.fail("nothing can be done"))
    cache = asked.runs.with_name(f"{asked.runs.name}-cache")
    config = replace(asked, runs=tmp_path / "runs", cache=cache)
    run.run(config)
    assert not capsys.readouterr().out
    run.run(replace(config, rows=("RobustViT, no classification loss",)))
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["row"], line["seed"]) == ("RobustViT, no classification loss", 0)
    assert line["skipped"].startswith("no weights of ERM seed 0: train it again")
    assert line["skipped"].endswith("or bring best.safetensors")
    folder_of(tmp_path / "runs" / "birds", "MaskTune", 0).joinpath("stress", "test.csv").unlink()
    run.run(config)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["skipped"].startswith("no weights of MaskTune seed 0")


def test_pictures_of_other_names_choose_no_rate(done, tmp_path):
    (tmp_path / "few.csv").write_text("image,split\nelsewhere/1.png,val\n")
    with pytest.raises(UserError, match="names them differently"):
        selection.balanced_on(folder_of(done / "birds", "ERM", 0), tmp_path / "few.csv")


def test_the_worst_group_is_compared_with_the_same_seed_alone(done, tmp_path):
    runs = shutil.copytree(done, tmp_path / "runs")
    asked_for = versus_row("birds", "RobustViT", "ERM", WORST)
    before = asked_for.find(Evidence(runs))
    shutil.copytree(folder_of(done / "birds", "MaskTune", 0), folder_of(runs / "birds", "ERM", 1))
    after = asked_for.find(Evidence(runs))
    assert after == before
    assert after.seeds == {"ERM": 1, "RobustViT": 1}


def test_results_are_put_together_and_packed(done, tmp_path):
    found = relevance_results(done)["birds"]
    rows = {row["row"]: row for row in found["rows"]}
    assert set(rows) == set(ROWS)
    assert {"accuracy", "worst group", "mass gae", "positive gae", "10 neighbours"} <= set(rows["RobustViT"])
    gains = {line["row"]: line for line in found["paired"]}
    difference = rows["RobustViT"]["accuracy"]["value"] - rows["ERM"]["accuracy"]["value"]
    assert gains["RobustViT"]["accuracy, all"]["value"] == pytest.approx(difference)
    assert next(pack_all(done, tmp_path))["packed"] == "birds.tar.xz"


def test_rows_that_went_on_with_another_training_of_their_beginning_are_named(done, tmp_path):
    assert relevance_results(done)["birds"]["warnings"] == []
    runs = shutil.copytree(done, tmp_path / "runs")
    path = folder_of(runs / "birds", "MaskTune", 0) / "run.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"began_with": {"weights": "another"}}))
    (warning,) = relevance_results(runs)["birds"]["warnings"]
    assert "seed 0 went on with the same weights of ERM" in warning
    assert warning.endswith("anothe: MaskTune") or "anothe: MaskTune;" in warning


def test_claims_without_runs_are_not_run(done, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["claims.py", "relevance", str(done), "--out", str(tmp_path / "claims.json")])
    claims.main()
    reported = {one["id"]: one["verdict"] for one in json.loads((tmp_path / "claims.json").read_text())["claims"]}
    assert list(reported) == [f"R{number}" for number in range(1, 13)]
    assert reported["R10"] == reported["R6"] == NOT_RUN


def test_of_rates_that_validate_alike_the_smaller_is_taken(tmp_path, monkeypatch):
    folder_of(tmp_path, "ERM", 0).mkdir()
    (folder_of(tmp_path, "ERM", 0) / "metrics.json").write_text("{}")
    scores = {"RRR, rate 1e-5": 0.975, "RRR, rate 5e-5": 0.9750000000000001}
    found = {folder_of(tmp_path, name, 0).name: {"balanced": score} for name, score in scores.items()}
    monkeypatch.setattr(selection, "balanced_on", lambda *_: 0.9)
    monkeypatch.setattr(selection, "best_epoch", lambda folder, _: found.get(folder.name))
    assert selection.selected_rates(tmp_path, tmp_path, "si")["rrr"]["rate"] == "1e-5"
