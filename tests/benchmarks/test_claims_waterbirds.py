"""The verdicts on claims: one rule, on runs whose predictions are made up here."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from sightline.metrics.predictions import Predictions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import claims
import verdicts
from claims_waterbirds import CLAIMS, SET, beats, certified, common_facts, proved, tells_label
from contrasts import balanced_gain
from evidence import Evidence, mean_over_seeds
from rows import folder_of
from rows.waterbirds import CONTROLS, OTHER_FILLS, ROWS, TRUE, TRUE_PIXELS
from verdicts import FAILS, HOLDS, NOT_RUN, NOT_TESTABLE, UNDECIDED, Claim

GROUPS = ("duck/meadow", "duck/water", "stork/meadow", "stork/water")
EACH = 500


def predictions_with(mistakes: int) -> Predictions:
    """Every group of 500 has so many mistakes: the first ones, so that runs are wrong about the same images."""
    groups = np.repeat(np.arange(4), EACH)
    labels = groups // 2
    wrong = np.tile(np.arange(EACH) < mistakes, 4)
    logits = 4.0 * np.eye(2)[np.where(wrong, 1 - labels, labels)]
    return Predictions.from_logits(
        [f"{i}.png" for i in range(4 * EACH)], labels, logits, ("duck", "stork"), groups, GROUPS
    )


@pytest.fixture
def runs(tmp_path) -> Evidence:
    return Evidence(tmp_path, proof=tmp_path / "proof.json", read_only=True)


def add(runs: Evidence, row: str, mistakes: int = 50, seed: int = 0, *, backbone: str = "tiny") -> Path:
    folder = folder_of(runs.runs / SET, row, seed)
    (folder / "predictions").mkdir(parents=True)
    data = {"group_names": GROUPS, "fingerprint": "f", "path": "somewhere"}
    facts = {"data": data, "backbone": {"file": f"somewhere/{backbone}"}, "selection": {"metric": "balanced"}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.json").write_text("{}")
    predictions_with(mistakes).save_csv(folder / "predictions" / "test.csv")
    return folder


def add_shape(folder: Path, mistakes: int) -> None:
    (folder / "shape").mkdir()
    predictions_with(mistakes).save_csv(folder / "shape" / "test.csv")


def add_iou(folder: Path, values: np.ndarray) -> None:
    """Of 2,000 images."""
    figure = {"value": values.mean(), "low": values.mean() - 0.01, "high": values.mean() + 0.01, "n": 2000, "how": "so"}
    (folder / "localization.json").write_text(json.dumps({"splits": {"test": {"figures": {"grid_iou": figure}}}}))
    (folder / "localization").mkdir()
    with (folder / "localization" / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "grid_iou"), *((f"{i}.png", value) for i, value in enumerate(values))])


def add_certificate(folder: Path, verdict: str) -> None:
    tried = [{"trials": 10, "changed": 10 * (verdict == "leaks")}]
    content = {"verdict": verdict, "sentence": "As it is.", "images": 2, "tried": tried}
    (folder / "certificate.json").write_text(json.dumps(content))


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.01, 0.05, 0.0, HOLDS),
        (-0.05, -0.01, 0.0, FAILS),
        (-0.01, 0.05, 0.0, UNDECIDED),
        (0.0, 0.05, 0.0, UNDECIDED),
        (-0.009, 0.002, -0.01, HOLDS),
        (0.01, 0.05, -0.01, HOLDS),
        (-0.05, -0.02, -0.01, FAILS),
        (-0.02, 0.0, -0.01, UNDECIDED),
    ],
)
def test_the_interval_of_the_difference_decides(low, high, margin, expected):
    difference = Estimate((low + high) / 2, low, high, 100, "made up", difference=True)
    assert verdicts.verdict(difference, margin) == expected


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([HOLDS, FAILS, NOT_RUN], FAILS),
        ([HOLDS, NOT_RUN], UNDECIDED),
        ([NOT_RUN, NOT_RUN], NOT_RUN),
        ([], NOT_RUN),
    ],
)
def test_one_failure_refutes_and_only_all_together_confirm(each, expected):
    assert verdicts.together(each) == expected


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(20, 80, HOLDS), (80, 20, FAILS), (50, 50, UNDECIDED)])
def test_a_row_beats_another_on_the_same_pictures(runs, ours, theirs, expected):
    add(runs, "iFAM K=8", ours)
    add(runs, "ERM", theirs)
    found = beats("iFAM K=8", "ERM").find(runs)
    assert found.verdict == expected
    assert found.difference.value == pytest.approx((theirs - ours) / EACH)
    assert found.figures["ERM"].value == pytest.approx(1 - theirs / EACH)
    assert found.seeds == {"iFAM K=8": 1, "ERM": 1}


def test_within_a_point_is_not_the_same_as_better(runs):
    add(runs, "iFAM K=8", 51)
    add(runs, "early mask, true", 50)
    assert beats("iFAM K=8", "early mask, true", margin=-0.06).find(runs).verdict == HOLDS
    assert beats("iFAM K=8", "early mask, true").find(runs).verdict == UNDECIDED


def test_tests_beside_the_claim_do_not_decide_it(runs):
    for row, mistakes in (("iFAM K=8", 20), ("iFAM K=1", 150), ("ERM", 60)):
        add(runs, row, mistakes)
    claim = Claim("X", "", "", (beats("iFAM K=8", "ERM"), beats("iFAM K=1", "ERM", decides=False)))
    conclusion, findings = verdicts.decide(claim, runs)
    assert (conclusion, [finding.verdict for finding in findings]) == (HOLDS, [HOLDS, FAILS])


# ---- masks, shapes, certificates -------------------------------------------------------------------------------------


def test_better_masks_are_seen_in_their_iou_picture_by_picture(runs):
    """Images differ far more than the rows do, so that without pairs nothing could be said."""
    without = np.random.default_rng(0).uniform(0.1, 0.9, 2000)
    for row, values in (("iFAM K=4", without + 0.01), ("iFAM K=4, no mask gradient", without)):
        add_iou(add(runs, row), values)
    test = beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU")
    found = test.find(runs)
    assert found.verdict == HOLDS
    assert found.difference.value == pytest.approx(0.01)
    assert found.difference.high < 0.012
    assert found.figures["iFAM K=4"].value == pytest.approx(without.mean() + 0.01)
    for row, values in (("iFAM K=4", without - 0.05), ("iFAM K=4, no mask gradient", without)):
        add_iou(add(runs, row, seed=1), values)
    assert test.find(runs).verdict == UNDECIDED


def test_seeds_that_differ_alike_in_both_rows_do_not_blur_the_difference(runs):
    values = np.random.default_rng(0).uniform(0.3, 0.7, 2000)
    for seed, shift in enumerate((0.0, 0.2, -0.2)):
        add_iou(add(runs, "iFAM K=4", seed=seed), values + shift + 0.01)
        add_iou(add(runs, "iFAM K=4, no mask gradient", seed=seed), values + shift)
    test = beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU")
    assert test.find(runs).verdict == HOLDS
    add_iou(add(runs, "iFAM K=4", seed=3), values)
    assert test.find(runs).verdict == UNDECIDED


def test_pictures_that_do_not_count_for_one_count_for_none(runs):
    for row, first in (("iFAM K=4", ""), ("iFAM K=4, no mask gradient", "1.0")):
        folder = add(runs, row)
        add_iou(folder, np.full(2000, 0.5))
        path = folder / "localization" / "test.csv"
        path.write_text(path.read_text().replace("0.png,0.5", f"0.png,{first}", 1))
    found = beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU").find(runs)
    assert (found.difference.value, found.difference.n) == (0, 1999)


def test_seeds_do_not_make_the_same_pictures_more():
    one = Estimate(0.7, 0.68, 0.72, 100, "made up")
    assert mean_over_seeds([one] * 3).high == pytest.approx(0.72)


@pytest.mark.parametrize(("mistakes", "expected"), [(150, HOLDS), (250, UNDECIDED), (350, FAILS)])
def test_what_the_shape_tells_is_held_against_chance(runs, mistakes, expected):
    add_shape(add(runs, "iFAM K=4"), mistakes)
    found = tells_label("iFAM K=4").find(runs)
    assert found.verdict == expected
    assert found.difference.value == pytest.approx(0.5 - mistakes / EACH)


def test_shapes_are_compared_picture_by_picture():
    ours, theirs = [predictions_with(100)], [predictions_with(110)]
    paired = balanced_gain(ours, theirs)
    assert paired.value == pytest.approx(0.02)
    assert 0 < paired.low < 0.02 < paired.high < 0.04


@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [
        ("blind", "leaks", (HOLDS, HOLDS)),
        ("leaks", "blind", (FAILS, FAILS)),
        ("refused", "refused", (UNDECIDED, UNDECIDED)),
    ],
)
def test_certificates_must_say_what_is_claimed(runs, early, late, expected):
    add_certificate(add(runs, "iFAM K=1"), early)
    add_certificate(add(runs, "late mask, true"), late)
    tests = certified("blind", ("iFAM K=1", "iFAM K=4")), certified("leaks", ("late mask, true",))
    assert tuple(test.find(runs).verdict for test in tests) == expected


def test_one_unexpected_case_of_the_proof_refutes_it(runs):
    names = ("weights", "dtype", "masking", "verdict", "largest_change")
    case = dict.fromkeys(names, "blind") | {"images": 1, "trials": 5, "changed": 0, "as_claimed": True}
    for as_claimed, expected in ((True, HOLDS), (False, FAILS)):
        runs.proof.write_text(json.dumps({"rows": [case, case | {"as_claimed": as_claimed}]}))
        assert proved().find(runs).verdict == expected


def test_pixel_exact_sight_must_beat_every_control(runs):
    claim = next(claim for claim in CLAIMS if claim.id == "B3")
    for row in (TRUE, *CONTROLS):
        add(runs, row, 80)
    for row in (TRUE_PIXELS, *OTHER_FILLS[:-1]):
        add(runs, row, 20)
    assert verdicts.decide(claim, runs)[0] == UNDECIDED  # one of its tests was not run
    noise = add(runs, OTHER_FILLS[-1], 20)
    assert verdicts.decide(claim, runs)[0] == HOLDS
    predictions_with(150).save_csv(noise / "predictions" / "test.csv")
    assert verdicts.decide(claim, runs)[0] == FAILS


def test_a_certificate_beside_the_claim_does_not_decide_it(runs):
    add_certificate(add(runs, "iFAM K=4, soft"), "blind")
    found = certified("refused", ("iFAM K=4, soft",), decides=False).find(runs)
    assert (found.verdict, found.decides) == (FAILS, False)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_the_seeds_of_a_row_are_its_own(runs):
    for row, seed in (("iFAM K=4", 0), ("iFAM K=4", 10), ("iFAM K=4", 2), ("iFAM K=4, no mask gradient", 0)):
        add(runs, row, seed=seed)
    assert [folder.name for folder in runs.folders(SET, "iFAM K=4").values()] == [
        "ifam-k-4-0",
        "ifam-k-4-2",
        "ifam-k-4-10",
    ]
    assert [folder.name for folder in runs.folders(SET, "iFAM K=4, no mask gradient").values()] == [
        "ifam-k-4--no-mask-gradient-0"
    ]


def test_runs_of_different_backbones_are_not_compared(runs):
    add(runs, "ERM")
    assert common_facts(runs)["backbone"] == {"file": "tiny"}
    add(runs, "probe", backbone="huge")
    with pytest.raises(UserError, match="cannot be compared"):
        common_facts(runs)


def test_what_is_not_measured_says_what_to_type(runs):
    add(runs, "iFAM K=4")
    add(runs, "iFAM K=4, no mask gradient")
    for test, command in (
        (tells_label("iFAM K=4"), "sightline shape ifam-k-4-0"),
        (certified("blind", ("iFAM K=4",)), "sightline verify ifam-k-4-0"),
        (beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU"), "sightline localize ifam-k-4-0"),
    ):
        found = verdicts.find(test, runs)
        assert found.verdict == NOT_RUN
        assert command in found.note


def test_a_claim_that_cannot_be_tested_says_so(runs):
    assert verdicts.decide(Claim("X", "", "", lacks="CLIP's weights"), runs) == (NOT_TESTABLE, [])


def test_every_claim_is_about_rows_that_the_benchmark_trains():
    assert {row for claim in CLAIMS for _, row in claim.rows()} <= set(ROWS)
    numbers = {"F": 23, "A": 15, "R": 12, "B": 3}
    known = [f"{kind}{number + 1}" for kind, count in numbers.items() for number in range(count)]
    assert [claim.id for claim in CLAIMS] == known
    assert all(claim.says.endswith(".") and claim.paper for claim in CLAIMS)


def test_the_script_lists_every_claim_run_or_not(runs, monkeypatch, capsys):
    add(runs, "early mask, true", 20)
    add(runs, "late mask, true", 80)
    out = runs.runs / "claims.json"
    monkeypatch.setenv("COLUMNS", "250")
    given = ["waterbirds", str(runs.runs), "--read-only", "--proof", str(runs.proof), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["claims.py", *given])
    claims.main()
    found = {claim["id"]: claim for claim in json.loads(out.read_text())["claims"]}
    assert {name: claim["verdict"] for name, claim in found.items()} == {
        claim.id: {"F2": HOLDS, "A15": NOT_TESTABLE}.get(claim.id, NOT_RUN) for claim in CLAIMS
    }
    assert found["A15"]["lacks"] == "no CLIP weights"
    assert found["F2"]["recipes"]["late mask, true"] == "late-mask --epochs 14 --lr 5e-5"
    assert str(runs.runs) not in out.read_text()
    printed = capsys.readouterr().out
    assert "+12.0 points" in printed
    assert "compare methods with their recipes" in " ".join(printed.split())


def test_an_unknown_claim_is_refused(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["claims.py", "waterbirds", str(runs.runs), "--only", "F99"])
    with pytest.raises(UserError, match="F99"):
        claims.main()
