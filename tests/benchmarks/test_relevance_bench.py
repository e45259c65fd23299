"""The relevance benchmark on a handful of toy pictures: rows are run, gone on with, put together and judged."""

import csv
import json
import shutil
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.explain.stress_results import Stressed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import relevance
import relevance_claims
from claim_figures import Missing
from relevance_claims import CLAIMS, AsMuch, BeyondChance, Reaches, Versus
from relevance_evidence import WORST, Evidence, versus
from relevance_results import collect, draw_all, pack_all
from relevance_rows import CURVES, HEADLINE, HEADLINES, Masks, Row, beginnings, chosen, penalised, rates, robustvit
from waterbirds_rows import folder_of

import lanes
from claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, final_evaluation

ROWS = ("ERM", "RobustViT, rate 5e-5", "RobustViT, rate 2e-4", "RobustViT", "MaskTune")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=16, val=12, test=16)


@pytest.fixture(scope="module")
def asked(toy, tmp_path_factory) -> relevance.RelevanceBenchmark:
    return relevance.RelevanceBenchmark(
        birds=toy, backbone="sightline-nano", runs=tmp_path_factory.mktemp("relevance") / "runs", rows=ROWS, seeds=(0,),
        val=8, limit=6, epochs=1, parallel=1, workers=0, device="cpu", precision="fp32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(asked) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "one_process", lambda: ThreadPoolExecutor(1))
        relevance.run(asked)
    return asked.runs


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", relevance.SETS)
def test_every_row_is_something_a_user_could_type_and_has_a_folder_of_its_own(kind, tmp_path):
    config = relevance.RelevanceBenchmark(backbone="ti.safetensors", self_supervised="s.safetensors")
    setting = relevance.Setting(Path("rows.csv"), Path("few.csv"), tmp_path, Path("cache"), config)
    rows = [*beginnings(kind), *rates(kind), *chosen(kind)]
    for row in rows:
        command = relevance.command_of(setting, replace(row, line=row.line.replace("RATE", "1e-5")))
        assert command.method == row.line.split()[0]
        assert command.data == (setting.data if command.method == "erm" else setting.few)
        assert not {"TI", "SELF"} & set(str(vars(command)).replace("'", " ").split())
        if row.name.endswith(", S") and command.method == "robustvit":
            assert command.start == str(folder_of(tmp_path, "ERM, S", row.seed))
    assert len({setting.folder(row) for row in rows}) == len(rows)


def test_what_is_claimed_is_run():
    known = {(kind, row.name) for kind in relevance.SETS for row in (*beginnings(kind), *chosen(kind))}
    for claim in CLAIMS:
        for test in claim.tests:
            for row in (getattr(test, name, None) for name in ("ours", "theirs", "row")):
                if row is not None and not is_of_birds_alone(test):
                    assert (test.kind, row) in known, (claim.id, test.words)


def is_of_birds_alone(test) -> bool:
    """Ablations that are too dear for both sets are run on one, and are never what decides on the other."""
    return test.kind == "cub" and not test.decides


def test_as_many_pictures_are_seen_however_few_masks_there_are():
    assert Masks(3, 2).epochs == 150  # at most
    assert Masks(300, 2).epochs == 9
    assert HEADLINE["cub"].words == "3 masks of 100 classes"
    assert HEADLINE["cub"].flags == "--per-class 3 --classes 100"


def test_a_row_that_needs_another_backbone_says_so(asked, tmp_path):
    setting = relevance.Setting(Path("rows.csv"), Path("few.csv"), tmp_path, Path("cache"), asked)
    with pytest.raises(UserError, match="RobustViT, TokenCut: needs --self-supervised"):
        relevance.command_of(setting, Row("birds", "RobustViT, TokenCut", "robustvit --masks tokencut:SELF"))


def test_the_headline_rows_of_all_sets_come_first_and_the_sets_take_turns():
    rows = [row for kind in relevance.SETS for row in chosen(kind)]
    ordered = [row for _, row, _ in relevance.in_turn((None, row, None) for row in rows)]
    assert sorted(map(str, ordered)) == sorted(map(str, rows))
    assert [(row.set, row.name, row.seed) for row in ordered[:4]] == [(kind, "RobustViT", 0) for kind in relevance.SETS]
    headline = [row.name in HEADLINES for row in ordered]
    assert headline == sorted(headline, reverse=True)
    for some in (True, False):
        seeds = [row.seed for row, is_one in zip(ordered, headline, strict=True) if is_one == some]
        assert seeds == sorted(seeds)


def test_nobody_is_asked_for_neighbours_where_no_class_has_two_pictures():
    rows = [*beginnings("imagenet"), *rates("imagenet"), *chosen("imagenet")]
    assert not any({"neighbours", "masks"} & set(row.tests) for row in rows)
    assert all("curves" in row.tests for row in rows if row.name in ("before", "RobustViT"))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_few_pictures_validate_and_all_others_keep_their_names(asked, done):
    home = relevance.settings_of(asked)["birds"]
    every, few = read_rows(home.data), read_rows(home.few)
    assert [len(few.where(split)) for split in ("train", "val", "test")] == [16, 8, 16]
    assert np.bincount(few.labels[few.where("val")]).tolist() == [4, 4]
    assert [few.images[i] for i in few.where("test")] == [every.images[i] for i in every.where("test")]


def test_half_of_the_classes_teach_and_the_other_half_are_tested(tmp_path):
    with (tmp_path / "samples.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "wnid"], *([f"{i}.webp", f"n{i:08}"] for i in range(40))])
    lines = relevance.imagenet_lines(tmp_path, tmp_path / "home")
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
    said = facts_in(folder_of(done / "birds", "RobustViT", 0))["benchmark"]
    tried = f"RobustViT, rate {said['rate']['rate']}"
    assert (said["row"], said["trained_as"]) == ("RobustViT", tried)
    assert "trained_as" not in facts_in(folder_of(done / "birds", tried, 0))["benchmark"]
    one, other = (folder_of(done / "birds", name, 0) for name in ("RobustViT", tried))
    assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
    tests = [Stressed.from_dict(json.loads((at / "stress" / "test.json").read_text())) for at in (one, other)]
    assert [bool(found.curves) for found in tests] == [True, False], "what it lacked was measured"
    assert all(found.neighbours and found.masks for found in tests)


def test_a_run_without_weights_stands_for_the_same_if_nothing_is_left_to_measure(done, asked, tmp_path):
    masks, config = HEADLINE["birds"], replace(asked, runs=tmp_path)
    setting = relevance.Setting(Path("rows.csv"), Path("few.csv"), tmp_path, Path("cache"), config)
    trained = folder_of(done / "birds", "RobustViT, rate 5e-5", 0)
    for name in ("RRR, rate 1e-5", "RobustViT, rate 5e-5"):
        shutil.copytree(trained, folder_of(tmp_path, name, 0), ignore=shutil.ignore_patterns("*.safetensors"))
    whole = Row("birds", "RRR", penalised("rrr", masks, "1e-5"))
    assert setting.trained_as(whole).name == "RRR, rate 1e-5"
    assert relevance.do(setting, whole)["row"] == "RRR"
    assert not setting.lacks(whole)
    lacking = Row("birds", "RobustViT", robustvit(masks, rate="5e-5"), tests=CURVES)
    assert setting.trained_as(lacking) is None, "there are no weights to draw curves with"
    assert [row.name for row in setting.needed_by(lacking)] == ["ERM"]
    other = Row("birds", "RobustViT", robustvit(masks, rate="2e-4"), tests=CURVES)
    assert setting.trained_as(other) is None, "another rate is another run"


def test_what_is_finished_is_not_done_again(done, asked, monkeypatch):
    monkeypatch.setattr(lanes, "one_process", lambda: pytest.fail("there is nothing left to do"))
    relevance.run(asked)


def test_parcels_count_as_done_and_what_needs_their_weights_says_so(done, asked, tmp_path, monkeypatch, capsys):
    for _ in pack_all(done, tmp_path / "parcels"):
        with tarfile.open(tmp_path / "parcels" / "birds" / "runs-1.tgz") as parcel:
            parcel.extractall(tmp_path / "runs" / "birds", filter="data")
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
    monkeypatch.setattr(lanes, "one_process", lambda: pytest.fail("nothing can be done"))
    cache = asked.runs.with_name(f"{asked.runs.name}-cache")
    config = replace(asked, runs=tmp_path / "runs", cache=cache)
    relevance.run(config)
    assert not capsys.readouterr().out
    relevance.run(replace(config, rows=("RobustViT, no answer",)))
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["row"], line["seed"]) == ("RobustViT, no answer", 0)
    assert line["skipped"].startswith("no weights of ERM seed 0: train it again")
    assert line["skipped"].endswith("or bring best.safetensors")
    folder_of(tmp_path / "runs" / "birds", "MaskTune", 0).joinpath("stress", "test.csv").unlink()
    relevance.run(config)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["skipped"].startswith("no weights of MaskTune seed 0")


def test_pictures_of_other_names_choose_no_rate(done, tmp_path):
    (tmp_path / "few.csv").write_text("image,split\nelsewhere/1.png,val\n")
    with pytest.raises(UserError, match="calls them by other names"):
        relevance.balanced_on(folder_of(done / "birds", "ERM", 0), tmp_path / "few.csv")


def test_the_worst_group_is_compared_with_the_same_seed_alone(done, tmp_path):
    runs = shutil.copytree(done, tmp_path / "runs")
    asked_for = Versus("birds", "RobustViT", "ERM", WORST)
    before = asked_for.find(Evidence(runs))
    shutil.copytree(folder_of(done / "birds", "MaskTune", 0), folder_of(runs / "birds", "ERM", 1))
    after = asked_for.find(Evidence(runs))
    assert after == before
    assert after.seeds == {"ERM": 1, "RobustViT": 1}


def test_results_are_put_together_drawn_and_packed(done, tmp_path):
    found = collect(done)["birds"]
    rows = {row["row"]: row for row in found["rows"]}
    assert set(rows) == set(ROWS)
    assert {"accuracy", "worst group", "mass gae", "positive gae", "10 neighbours"} <= set(rows["RobustViT"])
    gains = {line["row"]: line for line in found["paired"]}
    difference = rows["RobustViT"]["accuracy"]["value"] - rows["ERM"]["accuracy"]["value"]
    assert gains["RobustViT"]["accuracy, all"]["value"] == pytest.approx(difference)
    draw_all(done, "cpu")
    assert (done / "birds" / "classes.png").exists()
    assert next(pack_all(done, tmp_path))["packed"] == "birds/runs-1.tgz"


def test_rows_that_went_on_with_another_training_of_their_beginning_are_named(done, tmp_path):
    assert collect(done)["birds"]["warnings"] == []
    runs = shutil.copytree(done, tmp_path / "runs")
    path = folder_of(runs / "birds", "MaskTune", 0) / "run.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"began_with": {"weights": "another"}}))
    (warning,) = collect(runs)["birds"]["warnings"]
    assert "seed 0 went on with the same weights of ERM" in warning
    assert warning.endswith("anothe: MaskTune") or "anothe: MaskTune;" in warning


def test_claims_without_runs_are_not_run(done, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["relevance_claims.py", str(done), "--out", str(tmp_path / "claims.json")])
    relevance_claims.main()
    said = {one["id"]: one["verdict"] for one in json.loads((tmp_path / "claims.json").read_text())["claims"]}
    assert list(said) == [f"R{number}" for number in range(1, 13)]
    assert said["R10"] == said["R6"] == NOT_RUN


# ---- verdicts, on answers that are made up ---------------------------------------------------------------------------

SPECIES, EACH = ("a", "b", "c", "d"), 60


def add(
    runs: Path, kind: str, row: str, mistakes: dict[str, int], column: dict[str, float] | None = None, seed: int = 0
) -> None:
    """Of 60 swapped pictures of each of four classes so many are wrong; and a column of what was measured."""
    folder = folder_of(runs / kind, row, seed)
    (folder / "predictions").mkdir(parents=True)
    (folder / "stress").mkdir()
    facts = {"data": {"group_names": []}, "learnt_from": {"classes": ["a", "b"] if seed != 1 else ["b", "c"]}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.json").write_text("{}")
    images = [(f"{label}{i}.png", label, i) for label in SPECIES for i in range(EACH)]
    lines = [[image, label, "x" if i < mistakes[label] else label, f"{label}/swapped"] for image, label, i in images]
    tables = {"predictions": [["image", "label", "predicted", "group"], *lines]}
    tables["stress"] = [["image", *(column or {})], *([image, *(column or {}).values()] for image, _, _ in images)]
    for name, table in tables.items():
        with (folder / name / "test.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table)


def same(count: int) -> dict[str, int]:
    return dict.fromkeys(SPECIES, count)


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(5, 25, HOLDS), (25, 5, FAILS), (10, 10, UNDECIDED)])
def test_a_row_beats_another_under_shift(tmp_path, ours, theirs, expected):
    add(tmp_path, "cub", "RobustViT", same(ours))
    add(tmp_path, "cub", "ERM", same(theirs))
    found = Versus("cub", "RobustViT", "ERM", part="shifted").find(Evidence(tmp_path))
    assert found.verdict == expected
    assert found.difference.value == pytest.approx((theirs - ours) / EACH)


def test_only_seeds_that_both_have_are_compared(tmp_path):
    add(tmp_path, "cub", "RobustViT", same(5))
    add(tmp_path, "cub", "RobustViT", same(5), seed=2)
    for seed, mistakes in enumerate((25, 0, 15)):
        add(tmp_path, "cub", "ERM", same(mistakes), seed=seed)
    test, evidence = Versus("cub", "RobustViT", "ERM", part="shifted"), Evidence(tmp_path)
    found = test.find(evidence)
    assert found.difference.value == pytest.approx(15 / EACH)  # the mean of 20 and 10
    assert found.figures["ERM"].value == pytest.approx(1 - 20 / EACH)
    assert found.seeds == {"RobustViT": 2, "ERM": 2}
    add(tmp_path, "cub", "RobustViT, label", same(5), seed=1)
    with pytest.raises(Missing, match="no seed in common"):
        Versus("cub", "RobustViT", "RobustViT, label").find(evidence)


def test_weights_as_they_were_stand_beside_every_seed(tmp_path):
    add(tmp_path, "imagenet", "before", same(20))
    for seed, mistakes in enumerate((10, 0)):
        add(tmp_path, "imagenet", "RobustViT", same(mistakes), seed=seed)
    found = Versus("imagenet", "RobustViT", "before").find(Evidence(tmp_path))
    assert found.difference.value == pytest.approx(15 / EACH)
    assert found.seeds == {"RobustViT": 2, "before": 1}
    assert "seeds" not in found.figures["before"].how


def test_the_classes_that_were_learnt_from_are_those_of_the_seed_that_both_have(tmp_path):
    add(tmp_path, "cub", "RobustViT", same(2), seed=1)
    for seed, mistakes in enumerate((50, 30)):
        add(tmp_path, "cub", "ERM", same(mistakes), seed=seed)
    found = AsMuch("cub", "RobustViT", "ERM", "shifted", margin=-0.2).find(Evidence(tmp_path))
    assert found.verdict == HOLDS
    assert [one.value for one in found.figures.values()] == [pytest.approx(28 / EACH)] * 2


def test_classes_that_were_not_learnt_from_gain_as_much_or_do_not(tmp_path):
    add(tmp_path / "yes", "cub", "RobustViT", same(2))
    add(tmp_path / "no", "cub", "RobustViT", {"a": 2, "b": 2, "c": 30, "d": 30})
    for place in ("yes", "no"):
        add(tmp_path / place, "cub", "ERM", same(30))
    test = AsMuch("cub", "RobustViT", "ERM", "shifted", margin=-0.2)
    assert test.find(Evidence(tmp_path / "yes")).verdict == HOLDS
    found = test.find(Evidence(tmp_path / "no"))
    assert found.verdict == FAILS
    assert found.figures["gain, not learnt"].value == 0


def test_every_seed_has_classes_of_its_own_that_it_did_not_learn_from(tmp_path):
    """Seed 0 learnt from a and b, seed 1 from b and c."""
    for seed in (0, 1):
        add(tmp_path, "cub", "ERM", same(30), seed=seed)
    add(tmp_path, "cub", "RobustViT", {"a": 0, "b": 0, "c": 20, "d": 20})
    add(tmp_path, "cub", "RobustViT", {"a": 10, "b": 0, "c": 0, "d": 10}, seed=1)
    _, gained, seeds = versus(
        Evidence(tmp_path), "cub", ("RobustViT", "accuracy"), ("ERM", "accuracy"), "shifted, not learnt"
    )
    assert gained.value == pytest.approx((10 + 20) / 2 / EACH)
    assert gained.low < 12 / EACH < 18 / EACH < gained.high
    assert (gained.n, seeds) == (3 * EACH, {"RobustViT": 2, "ERM": 2})


def test_of_rates_that_validate_alike_the_smaller_is_taken(tmp_path, monkeypatch):
    setting = SimpleNamespace(folder=lambda row: tmp_path / row.name, few=tmp_path)
    (tmp_path / "ERM").mkdir()
    (tmp_path / "ERM" / "metrics.json").write_text("{}")
    scores = {"RRR, rate 1e-5": 0.975, "RRR, rate 5e-5": 0.9750000000000001}
    found = {name: {"balanced": score} for name, score in scores.items()}
    monkeypatch.setattr(relevance, "balanced_on", lambda *_: 0.9)
    monkeypatch.setattr(relevance, "best_line", lambda folder, _: found.get(folder.name))
    assert relevance.chosen_rates(setting, "si")["rrr"]["rate"] == "1e-5"


def test_a_map_that_turns_worse_than_before_or_than_chance_is_not_faithful(tmp_path):
    good = {"positive gae": 0.2, "negative gae": 0.8, "positive random": 0.5, "negative random": 0.5}
    add(tmp_path, "cub", "ERM", same(5), good)
    add(tmp_path, "cub", "RobustViT", same(5), good | {"positive gae": 0.6})
    evidence = Evidence(tmp_path)
    positive = Versus("cub", "RobustViT", "ERM", "positive gae", margin=-0.02, lower_is_better=True)
    assert positive.find(evidence).verdict == FAILS
    assert Versus("cub", "RobustViT", "ERM", "negative gae", margin=-0.02).find(evidence).verdict == HOLDS
    verdicts = {way: BeyondChance("cub", "RobustViT", way).find(evidence).verdict for way in ("positive", "negative")}
    assert verdicts == {"positive": FAILS, "negative": HOLDS}


def test_any_label_is_reached_or_not(tmp_path):
    add(tmp_path, "imagenet", "before", same(5))
    path = folder_of(tmp_path / "imagenet", "before", 0) / "stress" / "test.json"
    ends = {"value": 0.97, "low": 0.93, "high": 0.99, "n": 32, "how": ""}
    said = {"reached": ends, "size": None, "own_size": None, "confidence": 0.9, "labels": 3, "n": 32}
    path.write_text(json.dumps({"subsets": said}))
    evidence = Evidence(tmp_path)
    assert Reaches("imagenet", "before", 0.9).find(evidence).verdict == HOLDS
    assert Reaches("imagenet", "before", 0.95).find(evidence).verdict == UNDECIDED
    (claim,) = (claim for claim in CLAIMS if claim.id == "R10")
    assert final_evaluation(claim, evidence)[0] == HOLDS
