"""The verdicts on claims about A²: on predictions and measurements that are made up here."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sightline.metrics.estimates import Estimate
from sightline.metrics.predictions import Predictions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import claims
from claims_a2 import (
    PHOTOGRAPHS,
    all_claims,
    attention_test,
    contrast,
    duel,
    gains_more,
    less,
    localises,
    supervised,
)
from contrasts_a2 import Column, weighted_contrast
from evidence import Evidence, stratum
from rows import folder_of
from rows.a2 import Family
from selection import knn, matched_states
from verdicts import FAILS, HOLDS, NOT_RUN, NOT_TESTABLE, UNDECIDED, Claim, decide, find, inside

GROUPS = ("duck/meadow", "duck/water", "stork/meadow", "stork/water")
EACH = 300


def predictions(mistakes: int, from_the_end: bool = False) -> Predictions:
    """Every group of 300 has so many mistakes: the first ones, or the last."""
    groups = np.repeat(np.arange(4), EACH)
    labels, place = groups // 2, np.tile(np.arange(EACH), 4)
    wrong = place >= EACH - mistakes if from_the_end else place < mistakes
    logits = 4.0 * np.eye(2)[np.where(wrong, 1 - labels, labels)]
    return Predictions.from_logits(
        [f"{i}.png" for i in range(4 * EACH)], labels, logits, ("duck", "stork"), groups, GROUPS
    )


@pytest.fixture
def evidence(tmp_path) -> Evidence:
    return Evidence(tmp_path)


def add(evidence: Evidence, row: str, mistakes: int, kind: str = "birds", seed: int = 0, **how) -> Path:
    folder = folder_of(evidence.runs / kind, row, seed)
    (folder / "predictions").mkdir(parents=True)
    facts = {"data": {"group_names": GROUPS}, "benchmark": {"row": row, "line": "", "look": None}}
    (folder / "run.json").write_text(json.dumps(facts | {"backbone": {"file": f"somewhere/{row[-1]}.safetensors"}}))
    (folder / "metrics.json").write_text("{}")
    predictions(mistakes, **how).save_csv(folder / "predictions" / "test.csv")
    return folder


def add_pictures(evidence: Evidence, kind: str, row: str, columns: dict[str, np.ndarray], split: str = "test") -> None:
    path = folder_of(evidence.runs / kind, row, 0) / "localization" / f"{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        n = len(next(iter(columns.values())))
        writer = csv.writer(file)
        writer.writerows([["image", *columns], *zip((f"{i}.png" for i in range(n)), *columns.values(), strict=True)])


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(20, 80, HOLDS), (80, 20, FAILS), (50, 50, UNDECIDED)])
@pytest.mark.parametrize("measure", ["worst group", "accuracy", "mean of groups"])
def test_a_row_beats_another_on_the_same_pictures(evidence, ours, theirs, expected, measure):
    add(evidence, "A2 S>S", ours)
    add(evidence, "full, S", theirs)
    found = contrast("birds", less("A2 S>S", "full, S"), measure).find(evidence)
    assert found.verdict == expected
    assert found.difference.value == pytest.approx((theirs - ours) / EACH)
    assert found.figures["full, S"].value == pytest.approx(1 - theirs / EACH)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.01, 0.01, HOLDS),
        (0.03, 0.05, FAILS),
        (-0.05, -0.03, FAILS),
        (-0.01, 0.03, UNDECIDED),
        (-0.1, 0.1, UNDECIDED),
    ],
)
def test_no_difference_must_be_shown_not_just_not_refuted(low, high, expected):
    assert inside(Estimate((low + high) / 2, low, high, 9, "made up", difference=True), 0.02) == expected


def add_margins(evidence: Evidence, kind: str, tuned: int) -> None:
    """Untuned it is 60 mistakes of 300 in each group; tuned it is what `tuned` leaves of them."""
    for row, mistakes in (("A2 S>S, plain", 40), ("full, S, plain", 100), ("A2 S>S", 40), ("full, S", tuned)):
        add(evidence, row, mistakes, kind)


def claim(evidence: Evidence, name: str) -> Claim:
    return next(one for one in all_claims(evidence) if one.id == name)


@pytest.mark.parametrize(("tuned", "expected"), [(40, HOLDS), (100, UNDECIDED), (160, FAILS)])
def test_a_margin_is_compared_with_a_margin(evidence, tuned, expected):
    for kind in PHOTOGRAPHS:
        add_margins(evidence, kind, tuned)
    assert decide(claim(evidence, "A14"), evidence)[0] == expected


@pytest.mark.parametrize(("elsewhere", "expected"), [(None, UNDECIDED), (160, FAILS)])
def test_a_margin_on_one_set_is_not_the_margin_on_all(evidence, elsewhere, expected):
    add_margins(evidence, "birds", 40)
    for kind in PHOTOGRAPHS[1:] if elsewhere else ():
        add_margins(evidence, kind, elsewhere)
    assert decide(claim(evidence, "A14"), evidence)[0] == expected


@pytest.mark.parametrize(("fewest", "expected"), [(90, HOLDS), (30, UNDECIDED), (10, FAILS)])
def test_fewer_crops_must_gain_more_where_the_scene_says_more(evidence, fewest, expected):
    """Four crops cost 20 mistakes of 300 where scenes say nothing; where they do, `fewest` less ten."""
    for row, o2o, disjoint in (("A2 S>S", 10, 10), ("A2 S>S, 4 crops", fewest, 30)):
        add(evidence, row, o2o, "o2o", from_the_end=True)
        add(evidence, row, disjoint, "disjoint", from_the_end=True)
    found = decide(claim(evidence, "A8"), evidence)
    assert found[0] == expected
    (deciding,) = [one for one in found[1] if one.decides]
    assert deciding.difference.value == pytest.approx((fewest - 30) / EACH)
    assert {name: one.value for name, one in deciding.figures.items()} == pytest.approx(
        {"gain, o2o": (fewest - 10) / EACH, "gain, disjoint": 20 / EACH}
    )


def test_gains_on_two_sets_are_drawn_apart(evidence):
    """Were the same draws taken for both, sets that are answered alike would differ by nothing."""
    for kind in ("o2o", "disjoint"):
        add(evidence, "one crop", 50, kind)
        add(evidence, "four crops", 100, kind)
    test = gains_more(("o2o", "disjoint"), "one crop", "four crops")
    alone = weighted_contrast(evidence, "o2o", less("one crop", "four crops"), "accuracy")[1]
    difference = test.find(evidence).difference
    assert difference.value == 0
    assert difference.high - difference.low == pytest.approx(2**0.5 * (alone.high - alone.low), rel=0.2)


def test_strata_are_of_the_farthest_and_the_nearest_rounded_up():
    distances = {f"{i}.png": i / 10_000 for i in range(4 * EACH)}
    everything = predictions(0)
    assert stratum(everything, distances, "farthest 1 %").tolist() == list(range(1188, 1200))
    assert stratum(everything, distances, "nearest 10 %").tolist() == list(range(120))
    assert len(stratum(everything, distances, "the rest")) == 1080


@pytest.mark.parametrize(("ifam", "expected"), [(True, HOLDS), (False, UNDECIDED)])
def test_who_loses_more_far_from_the_centre_leans_on_it(tmp_path, ifam, expected):
    """Distances grow with the place in the group; mistakes are near the centre, or, of iFAM, far from it."""
    evidence = Evidence(tmp_path, ifam=(tmp_path / "birds" / "ifam-0",))
    add(evidence, "iFAM", 20, from_the_end=ifam)
    add(evidence, "A2 S>S", 20)
    add(evidence, "full, S", 30)
    add_pictures(evidence, "birds", "distances", {"distance": np.tile(np.arange(EACH) / 1000, 4)})
    conclusion, (accuracy, _) = decide(claim(evidence, "A7"), evidence)
    assert (conclusion, accuracy.verdict) == (expected, expected)


def test_ifam_is_held_against_crops_with_its_own_backbone(tmp_path):
    evidence = Evidence(tmp_path, ifam=(tmp_path / "birds" / "ifam-0",))
    folder = add(evidence, "iFAM", 20)
    (folder / "run.json").write_text(
        json.dumps({"data": {"group_names": GROUPS}, "backbone": {"file": "T.safetensors"}})
    )
    for row, mistakes in (("full, S", 50), ("full, T", 50), ("A2 S>S, 2 crops", 9), ("A2 S>S", 1), ("A2 S>T", 60)):
        add(evidence, row, mistakes)
    found = [one for one in decide(claim(evidence, "A12"), evidence)[1] if one.decides]
    assert [one.verdict for one in found] == [HOLDS, NOT_RUN]
    assert "A2 S>T" in found[0].test


def add_member(
    evidence: Evidence, name: str, mass: float, right: float, registers: tuple[float, ...] = (0.1, 0.2), n: int = 400
) -> None:
    """As many blocks as there are shares of registers; each localises by a point better than the one before."""
    noise = np.random.default_rng(0).normal(0, 0.1, n)
    columns = {f"{block} mean pixels mass": mass + 0.01 * block + noise for block in range(len(registers))}
    columns |= {f"{block} mean pixels hit": (noise > 0.1 - mass) * 1.0 for block in range(len(registers))}
    columns |= {f"{block} registers": np.full(n, share) for block, share in enumerate(registers)}
    for split in ("val", "test"):
        add_pictures(
            evidence, "family", f"attention {name}", columns | {"knn": 1.0 * (np.arange(n) < right * n)}, split
        )


@pytest.mark.parametrize(("early", "expected"), [(0.3, HOLDS), (0.7, FAILS)])
def test_sizes_are_compared_after_equal_steps_and_when_they_know_equally_much(evidence, early, expected):
    for name, mass, right in (("nano", 0.6, 0.7), ("ti", 0.5, 0.8), ("ti@5", early, 0.71), ("ti@1", 0.9, 0.5)):
        add_member(evidence, name, mass, right)
    assert knn(evidence.runs / "family", "ti@1") == 0.5
    members = Family([("nano", ""), ("ti", "")], [("ti", 1, ""), ("ti", 5, "")])
    assert matched_states(evidence.runs / "family", members) == {"ti": "ti@5"}
    conclusion, findings = decide(claim(evidence, "A1"), evidence)
    assert conclusion == expected
    assert [one.verdict for one in findings if one.decides] == [HOLDS, expected]


def test_a_size_without_a_matched_state_is_told_of(evidence):
    for name, right in (("nano", 0.7), ("ti", 0.8), ("s", 0.9), ("s@2", 0.7)):
        add_member(evidence, name, 0.5, right)
    for name in ("A1", "A13"):
        every = [one for one in decide(claim(evidence, name), evidence)[1] if one.test.startswith("family")]
        missing = [one for one in every if one.verdict == NOT_RUN]
        assert {one.decides for one in missing if "mass" in one.test} == {True}
        assert all("ti@matched" in one.test for one in missing)
        assert all("only the last state of ti" in one.note and "nano 70.0 %, ti 80.0 %" in one.note for one in missing)


@pytest.mark.parametrize(("early", "expected"), [(0.5, HOLDS), (0.2, FAILS)])
def test_registers_must_take_over_when_sizes_know_equally_much_too(evidence, early, expected):
    for name, right, last in (("nano", 0.7, 0.3), ("ti", 0.9, 0.5), ("ti@2", 0.7, early)):
        add_member(evidence, name, 0.5, right, (0.1, 0.1, last))
    found = [one for one in decide(claim(evidence, "A13"), evidence)[1] if one.test.startswith("family: registers")]
    assert [one.verdict for one in found] == [HOLDS, expected]
    assert ["ti@2" in one.test for one in found] == [False, True]


def test_the_best_block_is_of_the_last_half_and_chosen_on_other_pictures(evidence):
    add_member(evidence, "nano", 0.5, 0.7, (0.1,) * 4)
    val = {f"{block} mean pixels mass": np.full(4, 0.9 - 0.1 * block) for block in range(4)}
    add_pictures(evidence, "family", "attention nano", val, "val")
    found = attention_test("family", Column("nano", "mass", less="best")).find(evidence)
    assert found.verdict == HOLDS
    assert found.difference.value == pytest.approx(0.01)  # block 3 less block 2, not less block 0
    assert "last half" in found.test


@pytest.mark.parametrize(("mass", "expected"), [(0.2, HOLDS), (0.1, UNDECIDED), (0.05, UNDECIDED)])
def test_where_nobody_looks_at_the_thing_sizes_are_not_compared(evidence, tmp_path, mass, expected):
    figure = {"value": mass, "interval": [mass - 0.003, mass + 0.003], "n": 9}
    family = [{"size": size, "supervised": {"mass": figure}} for size in ("nano", "ti", "s")]
    even = {"value": 0.1, "interval": [0.099, 0.101], "n": 9}
    path = tmp_path / "family.json"
    path.write_text(json.dumps({"family": family, "mass_of_even": even}))
    with_family = replace(evidence, pretrained=path)
    conclusion, findings = decide(claim(with_family, "A2"), with_family)
    assert conclusion == expected
    assert [one.verdict for one in findings] == [expected] * 3 + [HOLDS] * 2
    assert ("does not localise" in findings[0].note) == (expected == UNDECIDED)
    assert find(localises("b"), with_family).verdict == NOT_RUN


@pytest.mark.parametrize(("low", "expected"), [(0.01, HOLDS), (-0.05, FAILS)])
def test_a_new_pairing_must_beat_the_best_published_one(evidence, tmp_path, low, expected):
    gain = {"value": low + 0.01, "low": low, "high": low + 0.02, "n": 9, "how": "so", "difference": True}
    test = {"value": 0.9, "low": 0.8, "high": 0.95, "n": 9, "how": "so"}
    sides = {name: {"where": name, "what": "probe", "test": test} for name in ("new", "published")}
    reported = sides | {"gain": gain | {"low": -1, "high": 1}, "rule": "", "among": "all"}
    path = tmp_path / "matrix.json"
    path.write_text(
        json.dumps({"data": "birds", "best_new_against_best_published": [reported, reported | {"gain": gain}]})
    )
    assert duel(path).find(evidence).verdict == expected
    assert find(duel(None), evidence).verdict == NOT_RUN


@pytest.mark.parametrize(("mass", "expected"), [(0.12, HOLDS), (0.05, FAILS), (0.095, UNDECIDED)])
def test_sizes_trained_with_labels_are_held_against_both_intervals(evidence, tmp_path, mass, expected):
    figure = {"value": 0.1, "interval": [0.097, 0.103], "n": 9}
    other = {"value": mass, "interval": [mass - 0.004, mass + 0.004], "n": 9}
    family = [{"size": "nano", "supervised": {"mass": figure}}, {"size": "ti", "supervised": {"mass": other}}]
    path = tmp_path / "family.json"
    path.write_text(json.dumps({"family": family}))
    with_family = replace(evidence, pretrained=path)
    found = supervised("ti", "nano", margin=-0.008).find(with_family)
    assert found.verdict == expected
    assert found.difference.low == pytest.approx(mass - 0.1 - 0.005)
    assert find(supervised("s", "nano"), with_family).note == "nobody has measured where supervised s looks"
    assert find(supervised("ti", "nano"), evidence).verdict == NOT_RUN


def test_contrasts_draw_the_same_pictures_for_all_rows(evidence):
    """Rows that are wrong about the same images differ by nothing."""
    for row in ("a", "b", "c", "d"):
        add(evidence, row, 100)
    terms = ((1.0, "a", "all"), (-1.0, "b", "all"), (-1.0, "c", "all"), (1.0, "d", "all"))
    difference = weighted_contrast(evidence, "birds", terms, "accuracy")[1]
    assert difference.value == 0
    assert -0.01 < difference.low <= difference.high < 0.01


def test_the_script_lists_every_claim_run_or_not(evidence, monkeypatch, capsys, tmp_path):
    add(evidence, "full, S", 60)
    add(evidence, "full, S, plain", 60)
    add(evidence, "A2 S>S", 20)
    add(evidence, "A2 S>S, plain", 20)
    out = tmp_path / "claims.json"
    monkeypatch.setattr(sys, "argv", ["claims.py", "a2", str(evidence.runs), "--out", str(out)])
    claims.main()
    found = {one["id"]: one for one in json.loads(out.read_text())["claims"]}
    assert list(found) == [*(f"A{number}" for number in range(1, 16)), "B2"]
    assert {name: found[name]["verdict"] for name in ("A3", "A5", "A15")} == {
        "A3": HOLDS, "A5": NOT_RUN, "A15": NOT_TESTABLE
    }  # fmt: skip
    assert found["A15"]["lacks"] == "no CLIP weights"
    assert str(tmp_path) not in out.read_text()
    assert "Crops at attention peaks" in capsys.readouterr().out
