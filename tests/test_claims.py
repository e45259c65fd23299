"""The verdicts on claims: one rule, on runs whose answers are made up here."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sightline.answers import Answers
from sightline.errors import UserError
from sightline.metrics import Estimate

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import claims
import waterbirds
from claim_figures import Runs, balanced_gain, mean_over_seeds
from claims import CLAIMS, FAILS, HOLDS, NOT_RUN, NOT_TESTABLE, UNDECIDED, Beats, Certified, Claim, Proved, TellsLabel
from waterbirds import ROWS, Waterbirds, folder_of

GROUPS = ("duck/meadow", "duck/water", "stork/meadow", "stork/water")
EACH = 500


def answers_with(mistakes: int) -> Answers:
    """Every group of 500 has so many mistakes: the first ones, so that runs are wrong about the same pictures."""
    groups = np.repeat(np.arange(4), EACH)
    labels = groups // 2
    wrong = np.tile(np.arange(EACH) < mistakes, 4)
    logits = 4.0 * np.eye(2)[np.where(wrong, 1 - labels, labels)]
    return Answers.from_logits([f"{i}.png" for i in range(4 * EACH)], labels, logits, ("duck", "stork"), groups, GROUPS)


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path, proof=tmp_path / "proof.json", read_only=True)


def add(runs: Runs, row: str, mistakes: int = 50, seed: int = 0, *, backbone: str = "tiny") -> Path:
    folder = folder_of(Waterbirds(Path(), "", runs.folder), row, seed)
    (folder / "predictions").mkdir(parents=True)
    data = {"group_names": GROUPS, "fingerprint": "f", "path": "somewhere"}
    facts = {"data": data, "backbone": {"file": f"somewhere/{backbone}"}, "selection": {"metric": "balanced"}}
    (folder / "run.json").write_text(json.dumps(facts))
    answers_with(mistakes).save_csv(folder / "predictions" / "test.csv")
    return folder


def add_shape(folder: Path, mistakes: int) -> None:
    (folder / "shape").mkdir()
    answers_with(mistakes).save_csv(folder / "shape" / "test.csv")


def add_iou(folder: Path, value: float) -> None:
    figure = {"value": value, "low": value - 0.01, "high": value + 0.01, "n": 2000, "how": "made up"}
    (folder / "localization.json").write_text(json.dumps({"splits": {"test": {"figures": {"grid_iou": figure}}}}))


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
    assert claims.verdict(difference, margin) == expected


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([HOLDS, FAILS, NOT_RUN], FAILS),
        ([HOLDS, NOT_RUN], UNDECIDED),
        ([NOT_RUN, NOT_RUN], NOT_RUN),
        ([], NOT_RUN),
    ],
)
def test_one_failure_refutes_and_only_all_together_confirm(verdicts, expected):
    assert claims.together(verdicts) == expected


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(20, 80, HOLDS), (80, 20, FAILS), (50, 50, UNDECIDED)])
def test_a_row_beats_another_on_the_same_pictures(runs, ours, theirs, expected):
    add(runs, "iFAM K=8", ours)
    add(runs, "ERM", theirs)
    found = Beats("iFAM K=8", "ERM").find(runs)
    assert found.verdict == expected
    assert found.difference.value == pytest.approx((theirs - ours) / EACH)
    assert found.figures["ERM"].value == pytest.approx(1 - theirs / EACH)
    assert found.seeds == {"iFAM K=8": 1, "ERM": 1}


def test_within_a_point_is_not_the_same_as_better(runs):
    add(runs, "iFAM K=8", 51)
    add(runs, "early mask, true", 50)
    assert Beats("iFAM K=8", "early mask, true", margin=-0.06).find(runs).verdict == HOLDS
    assert Beats("iFAM K=8", "early mask, true").find(runs).verdict == UNDECIDED


def test_tests_beside_the_claim_do_not_decide_it(runs):
    for row, mistakes in (("iFAM K=8", 20), ("iFAM K=1", 150), ("ERM", 60)):
        add(runs, row, mistakes)
    claim = Claim("X", "", "", (Beats("iFAM K=8", "ERM"), Beats("iFAM K=1", "ERM", decides=False)))
    conclusion, findings = claims.conclude(claim, runs)
    assert (conclusion, [finding.verdict for finding in findings]) == (HOLDS, [HOLDS, FAILS])


# ---- masks, shapes, certificates -------------------------------------------------------------------------------------


def test_better_masks_are_seen_in_their_iou(runs):
    for row, value in (("iFAM K=4", 0.75), ("iFAM K=4, no mask gradient", 0.70)):
        add_iou(add(runs, row), value)
    test = Beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU")
    found = test.find(runs)
    assert found.verdict == HOLDS
    assert (found.difference.low, found.difference.high) == pytest.approx((0.05 - 0.01 * 2**0.5, 0.05 + 0.01 * 2**0.5))
    add_iou(add(runs, "iFAM K=4", seed=1), 0.62)
    assert test.find(runs).verdict == UNDECIDED


def test_seeds_do_not_make_the_same_pictures_more():
    one = Estimate(0.7, 0.68, 0.72, 100, "made up")
    assert mean_over_seeds([one] * 3).high == pytest.approx(0.72)


@pytest.mark.parametrize(("mistakes", "expected"), [(150, HOLDS), (250, UNDECIDED), (350, FAILS)])
def test_what_the_shape_tells_is_held_against_chance(runs, mistakes, expected):
    add_shape(add(runs, "iFAM K=4"), mistakes)
    found = TellsLabel("iFAM K=4").find(runs)
    assert found.verdict == expected
    assert found.difference.value == pytest.approx(0.5 - mistakes / EACH)


def test_shapes_are_compared_picture_by_picture():
    ours, theirs = [answers_with(100)], [answers_with(110)]
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
    tests = Certified("blind", ("iFAM K=1", "iFAM K=4")), Certified("leaks", ("late mask, true",))
    assert tuple(test.find(runs).verdict for test in tests) == expected


def test_one_unexpected_case_of_the_proof_refutes_it(runs):
    names = ("weights", "dtype", "masking", "verdict", "largest_change")
    case = dict.fromkeys(names, "blind") | {"images": 1, "trials": 5, "changed": 0, "as_claimed": True}
    for as_claimed, expected in ((True, HOLDS), (False, FAILS)):
        runs.proof.write_text(json.dumps({"rows": [case, case | {"as_claimed": as_claimed}]}))
        assert Proved().find(runs).verdict == expected


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_the_seeds_of_a_row_are_its_own(runs):
    for row, seed in (("iFAM K=4", 0), ("iFAM K=4", 10), ("iFAM K=4", 2), ("iFAM K=4, no mask gradient", 0)):
        add(runs, row, seed=seed)
    assert [folder.name for folder in runs.of("iFAM K=4")] == ["ifam-k-4-0", "ifam-k-4-2", "ifam-k-4-10"]
    assert [folder.name for folder in runs.of("iFAM K=4, no mask gradient")] == ["ifam-k-4--no-mask-gradient-0"]


def test_runs_of_different_backbones_are_not_compared(runs):
    add(runs, "ERM")
    assert runs.facts()["backbone"] == {"file": "tiny"}
    add(runs, "probe", backbone="huge")
    with pytest.raises(UserError, match="cannot be compared"):
        runs.facts()


def test_what_is_not_measured_says_what_to_type(runs):
    add(runs, "iFAM K=4")
    add(runs, "iFAM K=4, no mask gradient")
    for test, command in (
        (TellsLabel("iFAM K=4"), "sightline shape ifam-k-4-0"),
        (Certified("blind", ("iFAM K=4",)), "sightline verify ifam-k-4-0"),
        (Beats("iFAM K=4", "iFAM K=4, no mask gradient", "grid IoU"), "sightline localize ifam-k-4-0"),
    ):
        found = claims.find(test, runs)
        assert found.verdict == NOT_RUN
        assert command in found.note


def test_a_claim_that_cannot_be_tested_says_so(runs):
    assert claims.conclude(Claim("X", "", "", lacks="CLIP's weights"), runs) == (NOT_TESTABLE, [])


def test_every_claim_is_about_rows_that_the_benchmark_trains():
    assert {row for claim in CLAIMS for test in claim.tests for row in test.rows} <= set(ROWS)
    numbers = {"F": 23, "A": 15, "R": 12, "B": 3}
    known = [f"{kind}{number + 1}" for kind, count in numbers.items() for number in range(count)]
    assert [claim.id for claim in CLAIMS] == known
    assert all(claim.says.endswith(".") and claim.paper for claim in CLAIMS)


def test_the_script_lists_every_claim_run_or_not(runs, monkeypatch, capsys):
    add(runs, "early mask, true", 20)
    add(runs, "late mask, true", 80)
    out = runs.folder / "claims.json"
    monkeypatch.setenv("COLUMNS", "250")
    given = [str(runs.folder), "--read-only", "--proof", str(runs.proof), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["claims.py", *given])
    claims.main()
    found = {claim["id"]: claim for claim in json.loads(out.read_text())["claims"]}
    assert {name: claim["verdict"] for name, claim in found.items()} == {
        claim.id: {"F2": HOLDS, "A15": NOT_TESTABLE}.get(claim.id, NOT_RUN) for claim in CLAIMS
    }
    assert found["A15"]["lacks"] == "no CLIP weights"
    assert found["F8"]["runs_made_by"] == ""
    assert found["F2"]["recipes"]["late mask, true"] == "late-mask --epochs 14 --lr 5e-5"
    assert "--only 'early mask, true' 'late mask, true'" in found["F2"]["runs_made_by"]
    assert "--u2net" in found["F6"]["runs_made_by"]
    assert str(runs.folder) not in out.read_text()
    said = capsys.readouterr().out
    assert "+12.0 points" in said
    assert "late mask, true: late-mask --epochs 14 --lr 5e-5" in said
    assert "compare methods with their recipes" in " ".join(said.split())


def test_a_failing_first_row_does_not_take_the_others_with_it(tmp_path, monkeypatch, capsys):
    """And the first is one that makes the cache, not the probe."""
    begun = []

    def one(_, row, seed):
        begun.append(row)
        if row == "ERM":
            raise UserError("no")
        return {"row": row, "seed": seed}

    monkeypatch.setattr(waterbirds, "one", one)
    monkeypatch.setattr(waterbirds, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    config = Waterbirds(tmp_path, "", tmp_path, parallel=1)
    waterbirds.train_all(config, [("probe", 0), ("ERM", 0), ("iFAM K=1", 0)])
    assert begun == ["ERM", "iFAM K=1", "probe"]
    assert "UserError: no" in capsys.readouterr().out


def test_an_unknown_claim_is_refused(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["claims.py", str(runs.folder), "--only", "F99"])
    with pytest.raises(UserError, match="F99"):
        claims.main()
