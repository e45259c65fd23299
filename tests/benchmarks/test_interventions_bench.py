"""The benchmark of interventions and ablations: its rows, what it measures, and its verdicts on made-up outcomes."""

import csv
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from sightline.config import Ifam
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.interventions.file import Intervention
from sightline.metrics.predictions import Predictions
from sightline.train import train

from .intervening import EACH, add

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import interventions_claims as claims
from claim_figures import Missing
from interventions_claims import claims_about, deciding_rows, less, rows_named
from interventions_evidence import Evidence, Term, contrast, outcomes_in, table_of
from interventions_kinds import Contrast, Costs, Faster, SilentOnNoise, TookTheObject
from interventions_measure import (
    FOUND,
    SIGHT,
    SIGHTS,
    TEST,
    PartSettings,
    is_measured,
    keypoints_of,
    measure,
    on_noise,
    remembered,
)
from interventions_rows import ABLATED, BUILDS, SETS, Row, rows_of
from waterbirds_rows import folder_of

import interventions
from claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, final_evaluation
from interventions import TURNS, Interventions, command_of, folder, lacks, turn_of, wanted

EVERY = [row for kind in SETS for row in rows_of(kind)]

# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETS)
def test_every_row_is_a_command_that_is_understood_and_has_a_folder_of_its_own(kind, tmp_path):
    data = dict.fromkeys(SETS, tmp_path)
    config = Interventions(backbone="random:nano", runs=tmp_path / "runs", **data)
    folders = set()
    for row in rows_of(kind):
        command = command_of(config, row)
        assert (command.seed, command.resume, command.folder) == (row.seed, True, folder(config, row))
        assert command.precision == ("fp32" if "fp32" in row.name else "bf16")
        folders.add(command.folder)
    assert len(folders) == len(rows_of(kind))


def test_the_ablations_are_those_of_the_papers_table(tmp_path):
    config = Interventions(cub=tmp_path, backbone="random:nano")
    told = {row.name: command_of(config, row) for row in rows_of("cub")}
    full = told["iFAM K=4"]
    assert (full.part_dropout, full.sight, full.shaping.entropy, full.classify_parts) == (0.3, "patches", 1, 1)
    assert told["iFAM K=4, soft masks"].soft
    shaping = told["iFAM K=4, no shaping"].shaping
    assert {value for value in vars(shaping).values() if isinstance(value, float | int)} == {0}
    assert told["iFAM K=4, no stage-1 classification"].classify_parts == 0
    assert told["iFAM K=4, frozen stage 2"].freeze_predictor
    assert {told[f"iFAM K=4, part dropout {share}"].part_dropout for share in ("0", "0.1", "0.5")} == {0, 0.1, 0.5}
    assert {f"iFAM K=4, {how}" for how in ABLATED} <= {row.name for row in rows_of("cub")}


def test_what_decides_comes_first_then_more_seeds_then_rows_beside_then_what_is_timed():
    decide = deciding_rows()
    turns = [turn_of(row, decide) for row in wanted(Interventions())]
    assert list(dict.fromkeys(turns)) == list(TURNS)
    assert turns == sorted(turns, key=TURNS.index)
    assert all((row.seed > 0) == (turn == "seeds") for row, turn in zip(wanted(Interventions()), turns, strict=True))
    assert {("cub", f"iFAM K=4, {how}") for how in ABLATED} < decide
    assert ("object", "ERM") not in decide
    some = wanted(Interventions(only=("object",), rows=("iFAM*",), turns=("beside", "deciding")))
    assert [row.name for row in some] == ["iFAM K=8, pixels", "iFAM K=8"]
    with pytest.raises(UserError, match="'astrology'"):
        wanted(Interventions(turns=("astrology",)))


def test_rows_are_asked_for_by_name_or_by_set_and_name():
    everywhere = wanted(Interventions(rows=("iFAM K=1",)))
    assert {row.set for row in everywhere} == {"cub", "pair"}
    assert [(row.set, row.name) for row in wanted(Interventions(rows=("pair: iFAM K=1",)))] == [("pair", "iFAM K=1")]


def test_a_row_is_estimated_from_its_pictures_and_epochs():
    assert Row("birds", "a", "ifam --parts 4 --sight patches").seconds == 40
    assert Row("birds", "a", "ifam").seconds == 75
    assert Row("birds", "a", "ifam --epochs 60").seconds == 150
    assert all(row.seconds >= 4 for row in EVERY)


# ---- claims ----------------------------------------------------------------------------------------------------------


def test_every_claim_from_f8_to_f23_has_deciding_tests_on_rows_that_are_run():
    known = {(row.set, row.name) for row in EVERY}
    every = claims_about()
    assert [claim.id for claim in every] == [*(f"F{n}" for n in range(8, 24)), "I1", "I2"]
    for claim in every:
        assert any(test.decides for test in claim.tests), claim.id
        assert rows_named(claim) <= known, claim.id
        command = shlex.split(claims.command_for(claim))
        assert set(command[command.index("--rows") + 1 :]) == {row for _, row in rows_named(claim)}


def test_without_runs_every_claim_is_not_run(tmp_path):
    assert {final_evaluation(claim, Evidence(tmp_path))[0] for claim in claims_about()} == {NOT_RUN}


def test_an_intervention_is_held_against_the_same_run_on_the_same_pictures(tmp_path):
    for seed in range(2):
        add(tmp_path, "cub", "iFAM K=4", seed, plain=(40, 120 + seed), better=(40, 80), alike=(40, 120 + seed))
    evidence = Evidence(tmp_path)

    def found(how: str, part: str, measure: str = "accuracy"):
        test = Contrast("cub", less("iFAM K=4", "iFAM K=4", part, (how, "plain")), measure)
        return test.find(evidence)

    gain = found("better", "swapped")
    assert (gain.verdict, gain.seeds) == (HOLDS, {"iFAM K=4": 2})
    assert gain.difference.value == pytest.approx((40 + 41) / 2 / EACH)
    assert found("better", "original").verdict == UNDECIDED
    assert found("better", "all", "worst group").verdict == HOLDS
    assert found("alike", "all", "worst group").verdict == UNDECIDED
    with pytest.raises(Missing, match="not measured under 'worse'"):
        found("worse", "all")


def test_gaps_are_counted_bird_by_bird(tmp_path):
    add(tmp_path, "mixed", "ERM", plain=(20, 100))
    add(tmp_path, "mixed", "iFAM K=4", plain=(20, 40))
    figures, difference = contrast(Evidence(tmp_path), "mixed", less("ERM", "iFAM K=4"), "gap")
    assert [one.value for one in figures.values()] == pytest.approx([80 / EACH, 20 / EACH])
    assert difference.value == pytest.approx(60 / EACH)
    assert 0 < difference.low < difference.value < difference.high
    assert Contrast("mixed", less("iFAM K=4", "ERM"), "gap").find(Evidence(tmp_path)).verdict == FAILS


def test_which_helps_more_is_a_difference_of_differences(tmp_path):
    add(tmp_path, "object", "ours", plain=(20, 200), parts=(20, 80))
    add(tmp_path, "object", "theirs", plain=(20, 200), parts=(20, 190))
    terms = (*less("ours", "ours", hows=("parts", "plain")), *less("theirs", "theirs", hows=("plain", "parts")))
    _, difference = contrast(Evidence(tmp_path), "object", terms, "worst group")
    assert difference.value == pytest.approx(110 / EACH)
    assert difference.low > 0


def search_said(drop: list[int], part: int, noise: int | None = None) -> str:
    groups = [{"a/x": {"value": gain}, "a/y": {"value": -0.2}} for gain in (0.1, 0.3, 0.2)]
    trials = [{"drop": [k], "score": 0.5 + 0.1 * (k in drop[:1]), "groups": groups[k]} for k in range(3)]
    found = {"searches": {"parts": {"drop": drop, "sentence": "So.", "trials": trials}}}
    found["objects"] = {"tag": {"share_of_the_object": [0.6 if k == part else 0.1 for k in range(3)]}}
    return json.dumps(found | ({} if noise is None else {"noise": {"searches": 40, "found_something": noise}}))


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        ([[1], [1]], HOLDS),
        ([[1], []], UNDECIDED),
        ([[1], [0]], FAILS),
        ([[], []], UNDECIDED),
        ([[1, 0], [0, 1]], FAILS),  # what it leaves out later does not count
    ],
)
def test_the_part_left_out_must_be_the_one_of_the_tag(dropped, expected, tmp_path):
    for seed, drop in enumerate(dropped):
        path = add(tmp_path, "object", "a", seed, plain=(1, 1))
        (path / FOUND).write_text(search_said(drop, 1))
    assert TookTheObject("object", "a").find(Evidence(tmp_path)).verdict == expected


def test_the_part_without_which_a_group_gains_most_is_found_though_the_worst_group_does_not_gain(tmp_path):
    path = add(tmp_path, "object", "a", plain=(1, 1))
    for part, expected in ((1, HOLDS), (2, FAILS)):
        (path / FOUND).write_text(search_said([], part))
        assert TookTheObject("object", "a", "helps a group most").find(Evidence(tmp_path)).verdict == expected
    found = json.loads(search_said([], 1))
    found["objects"]["tag"]["share_of_the_object"] = [0.3, 0.4, 0.3]
    (path / FOUND).write_text(json.dumps(found))
    said = TookTheObject("object", "a").find(Evidence(tmp_path))
    assert (said.verdict, said.note) == (UNDECIDED, "in no run has a part most of an object")


@pytest.mark.parametrize(("gains", "expected"), [(0, HOLDS), (2, HOLDS), (4, UNDECIDED), (20, FAILS)])
def test_a_search_that_finds_gains_in_noise_is_caught(gains, expected, tmp_path):
    (add(tmp_path, "object", "a", plain=(1, 1)) / FOUND).write_text(search_said([], 0, gains))
    assert SilentOnNoise("object", "a").find(Evidence(tmp_path)).verdict == expected


def test_costs_and_speeds_are_ratios(tmp_path):
    for row in ("a", "b"):
        add(tmp_path, "birds", row, plain=(1, 1))
    assert Costs("birds", "a", "b").find(Evidence(tmp_path)).verdict == HOLDS
    assert Costs("birds", "a", "b", most=0.9).find(Evidence(tmp_path)).verdict == FAILS
    same = Faster("a", "b").find(Evidence(tmp_path))
    assert (same.verdict, same.note) == (UNDECIDED, "1.00 times as fast")
    add(tmp_path, "birds", "c", plain=(1, 1))
    (folder_of(tmp_path / "birds", "c", 0) / "run.json").write_text('{"speed": {"images_per_second": 120}}')
    assert Faster("c", "a").find(Evidence(tmp_path)).verdict == HOLDS
    assert Faster("a", "c").find(Evidence(tmp_path)).verdict == FAILS


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_run_is_measured_under_every_intervention_once(tmp_path):
    data = write_toy(tmp_path / "toy", train=24, val=12, test=16, size=32)
    told = {"size": 32, "epochs": 1, "batch": 12, "workers": 0, "device": "cpu", "sight": "patches", "parts": 2}
    path = folder_of(tmp_path / "runs" / "birds", "iFAM K=4", 0)
    train(Ifam(data, out=path, backbone="random:nano", **told))
    config, row = Interventions(runs=tmp_path / "runs"), Row("birds", "iFAM K=4", "ifam", interventions=True)
    assert lacks(config, row) == ["interventions"]
    how = PartSettings("birds", noise=1, batch=16, workers=0, device="cpu")
    measure(path, how)
    assert is_measured(path)
    assert lacks(config, row) == []
    found = json.loads((path / FOUND).read_text())
    assert set(found["searches"]) == {"parts", "quantile", "both"}
    assert found["searches"]["quantile"]["drop"] == []
    assert found["objects"] is None
    assert found["noise"]["searches"] == 1
    known = outcomes_in(path)
    assert list(known.right) == ["plain", "q0.99", "q0.97", "parts", "quantile", "both", "parts, q0.99"]
    answers = Predictions.load_csv(path / "predictions" / "test.csv", split="test")
    assert list(known.right["plain"].values()) == answers.correct.astype(float).tolist()
    figures = json.loads((path / SIGHT).read_text())["all"]
    assert list(figures) == ["plain", "q0.99", "q0.97"]
    assert figures["q0.97"]["coverage"]["value"] <= figures["plain"]["coverage"]["value"]
    table = table_of(Evidence(tmp_path / "runs"), "birds", "iFAM K=4")
    assert {"all", "worst group", "pixel_iou", "coverage"} <= set(table["figures"]["q0.99"])
    times = [(path / name).stat().st_mtime_ns for name in (FOUND, TEST, SIGHT, SIGHTS)]
    measure(path, how)
    assert times == [(path / name).stat().st_mtime_ns for name in (FOUND, TEST, SIGHT, SIGHTS)]


def test_of_every_drawn_thing_it_is_measured_how_much_each_part_has(tmp_path):
    """Here the things are the birds themselves, by their place."""
    data = write_toy(tmp_path / "toy", train=24, val=12, test=16, size=32)
    with (data / "rows.csv").open(newline="") as file:
        lines = [line | {"object_mask": line["mask"]} for line in csv.DictReader(file)]
    with (data / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    told = {"size": 32, "epochs": 1, "batch": 12, "workers": 0, "device": "cpu", "sight": "patches", "parts": 2}
    path = folder_of(tmp_path / "runs" / "object", "iFAM K=8", 0)
    train(Ifam(data, out=path, backbone="random:nano", **told))
    measure(path, PartSettings("object", batch=16, workers=0, device="cpu"))
    found = json.loads((path / FOUND).read_text())["objects"]
    places = {line["group_place"] for line in lines}
    assert {*found} == places
    assert sum(one["n"] for one in found.values()) == 12
    for one in found.values():
        assert one["part"] == int(np.argmax(one["share_of_the_object"]))
        assert 0 <= sum(one["share_of_the_object"]) <= 1 + 1e-6
    assert max(max(one["share_of_the_object"]) for one in found.values()) > 0


def answers_of(right: np.ndarray) -> Predictions:
    labels, groups = np.arange(len(right)) % 2, np.arange(len(right)) % 4
    logits = 4.0 * np.eye(2)[np.where(right, labels, 1 - labels)]
    names = ("a/x", "b/x", "a/y", "b/y")
    return Predictions.from_logits([f"{i}.png" for i in range(len(right))], labels, logits, ("a", "b"), groups, names)


def test_the_same_intervention_is_asked_about_once_and_shuffled_labels_show_no_gain():
    asked = []

    def looked(some):
        asked.extend((one.drop, one.quantile) for one in some)
        # Without part 1 all is right, which shuffling must make worthless.
        return [answers_of(np.full(200, 1 in one.drop) | (np.arange(200) % 3 > 0)) for one in some]

    answers = remembered(looked)
    answers([Intervention(), Intervention(drop=(1,))])
    noise = on_noise(answers, 3, {0.99: (1.0, 1.0, 1.0)}, 3)
    assert noise == {"searches": 3, "found_something": 0}
    assert len(asked) == len(set(asked)) == 5


def test_key_points_of_birds_are_joined_by_number(tmp_path):
    (tmp_path / "cub224").mkdir()
    header = "id,path,split,x,y,w,h"
    (tmp_path / "cub224" / "cub.csv").write_text(f"{header}\n7,images/001.Tern/a.webp,train,1,1,5,5\n")
    points = ["id,part_id,part_name,x,y,visible", "7,1,back,3,4,1", "7,2,beak,0,0,0"]
    (tmp_path / "cub224" / "parts.csv").write_text("\n".join(points) + "\n")
    lines = ["image,label,split,bird", "original/a.jpg,001.Tern,train,7", "swapped/a.jpg,001.Tern,test,7"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    found = keypoints_of(read_rows(tmp_path / "rows.csv"), tmp_path)
    assert found["keypoint_names"] == ("back", "beak")
    assert found["keypoints"].tolist() == [[[3, 4, 1], [0, 0, 0]]] * 2


def test_what_is_timed_has_the_gpu_for_itself(tmp_path, monkeypatch):
    goes, ablated = [], {row.name for row in rows_of("birds") if "," in row.name}
    monkeypatch.setattr(interventions, "side_by_side", lambda jobs, lanes, end: goes.append((len(jobs), lanes, end)))
    rows = [row for row in rows_of("birds") if row.timed or (row.seed == 0 and row.name not in ablated)]
    config = Interventions(birds=tmp_path, backbone="random:nano", runs=tmp_path, parallel=3, compile=True)
    interventions.do_all(config, rows, None)
    assert goes == [(3, 3, None), (4, 1, None)]
    interventions.do_all(config, rows, 1000.0)
    assert goes[2:] == [(3, 3, 1000 - sum(row.seconds for row in rows if row.timed)), (4, 1, 1000)]
    assert {command_of(config, row).compile for row in rows if row.timed} == {False}
    assert {command_of(config, row).compile for row in rows if not row.timed} == {True}
    assert set(BUILDS) == set(SETS)
    assert Term(1, "a", "q0.99").words == "a (q0.99)"


def test_a_comparison_of_a_run_with_itself_says_so(tmp_path):
    add(tmp_path, "object", "a", plain=(20, 200), parts=(20, 200), both=(20, 80))
    terms = less("a", "a", hows=("parts", "plain"))
    assert "nothing was left out" in Contrast("object", terms, "worst group").find(Evidence(tmp_path)).note
    terms = less("a", "a", hows=("both", "plain"))
    assert Contrast("object", terms, "worst group").find(Evidence(tmp_path)).note == ""
