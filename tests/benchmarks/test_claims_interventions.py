"""Claims about interventions and ablations: on made-up outcomes, and the committed verdicts from committed runs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sightline.metrics.estimates import Estimate

from .intervening import EACH, add

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from claims_interventions import (
    all_claims,
    contrast,
    costs,
    faster,
    less,
    silent_on_noise,
    took_the_object,
)
from collect import fingerprint_of, is_in, with_rows_of
from contrasts import Spread, contrast_of_terms, spread
from evidence import FOUND, Evidence, Missing
from packing import unpacked
from rows import Row, folder_of
from rows.interventions import SETS, rows_of
from verdicts import FAILS, HOLDS, NOT_RUN, UNDECIDED, decide

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EVERY = [row for kind in SETS for row in rows_of(kind)]


def test_committed_verdicts_and_figures_are_those_of_the_committed_runs():
    """Test by test, with intervals; the whole file is made by `claims.py interventions`."""
    known = {one["id"]: one for one in json.loads((RESULTS / "claims_interventions.json").read_text())["claims"]}
    with unpacked(RESULTS / "interventions") as runs:
        evidence = Evidence(runs, retrained=RESULTS / "interventions_h200.json")
        for claim in [claim for claim in all_claims() if claim.id in ("F9", "F14", "F17", "F21", "F22", "I1", "I2")]:
            verdict, findings = decide(claim, evidence)
            assert verdict == known[claim.id]["verdict"]
            shown = [asdict(one) for one in findings if one.verdict != NOT_RUN or one.decides]
            assert json.loads(json.dumps(shown)) == known[claim.id]["tests"], claim.id


# ---- claims ----------------------------------------------------------------------------------------------------------


def test_every_claim_from_f8_to_f23_has_deciding_tests_on_rows_that_are_run():
    known = {(row.set, row.name) for row in EVERY}
    every = all_claims()
    assert [claim.id for claim in every] == [*(f"F{n}" for n in range(8, 24)), "I1", "I2"]
    for claim in every:
        assert any(test.decides for test in claim.tests), claim.id
        assert set(claim.rows()) <= known, claim.id


def test_without_runs_every_claim_is_not_run(tmp_path):
    assert {decide(claim, Evidence(tmp_path))[0] for claim in all_claims()} == {NOT_RUN}


def test_an_intervention_is_held_against_the_same_run_on_the_same_pictures(tmp_path):
    for seed in range(2):
        add(tmp_path, "cub", "iFAM K=4", seed, plain=(40, 120 + seed), better=(40, 80), alike=(40, 120 + seed))
    evidence = Evidence(tmp_path)

    def found(how: str, part: str, measure: str = "accuracy"):
        test = contrast("cub", less("iFAM K=4", "iFAM K=4", part, (how, "plain")), measure)
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
    figures, difference = contrast_of_terms(Evidence(tmp_path), "mixed", less("ERM", "iFAM K=4"), "gap")
    assert [one.value for one in figures.values()] == pytest.approx([80 / EACH, 20 / EACH])
    assert difference.value == pytest.approx(60 / EACH)
    assert 0 < difference.low < difference.value < difference.high
    assert contrast("mixed", less("iFAM K=4", "ERM"), "gap").find(Evidence(tmp_path)).verdict == FAILS


def test_which_helps_more_is_a_difference_of_differences(tmp_path):
    add(tmp_path, "object", "ours", plain=(20, 200), parts=(20, 80))
    add(tmp_path, "object", "theirs", plain=(20, 200), parts=(20, 190))
    terms = (*less("ours", "ours", hows=("parts", "plain")), *less("theirs", "theirs", hows=("plain", "parts")))
    _, difference = contrast_of_terms(Evidence(tmp_path), "object", terms, "worst group")
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
    assert took_the_object("object", "a").find(Evidence(tmp_path)).verdict == expected


def test_the_part_without_which_a_group_gains_most_is_found_though_the_worst_group_does_not_gain(tmp_path):
    path = add(tmp_path, "object", "a", plain=(1, 1))
    for part, expected in ((1, HOLDS), (2, FAILS)):
        (path / FOUND).write_text(search_said([], part))
        assert took_the_object("object", "a", "helps a group most").find(Evidence(tmp_path)).verdict == expected
    found = json.loads(search_said([], 1))
    found["objects"]["tag"]["share_of_the_object"] = [0.3, 0.4, 0.3]
    (path / FOUND).write_text(json.dumps(found))
    reported = took_the_object("object", "a").find(Evidence(tmp_path))
    assert (reported.verdict, reported.note) == (UNDECIDED, "in no run has a part most of an object")


@pytest.mark.parametrize(("gains", "expected"), [(0, HOLDS), (2, HOLDS), (4, UNDECIDED), (20, FAILS)])
def test_a_search_that_finds_gains_in_noise_is_caught(gains, expected, tmp_path):
    (add(tmp_path, "object", "a", plain=(1, 1)) / FOUND).write_text(search_said([], 0, gains))
    assert silent_on_noise("object", "a").find(Evidence(tmp_path)).verdict == expected


def test_costs_and_speeds_are_ratios(tmp_path):
    for row in ("a", "b"):
        add(tmp_path, "birds", row, plain=(1, 1))
    assert costs("birds", "a", "b").find(Evidence(tmp_path)).verdict == HOLDS
    assert costs("birds", "a", "b", most=0.9).find(Evidence(tmp_path)).verdict == FAILS
    same = faster("a", "b").find(Evidence(tmp_path))
    assert (same.verdict, same.note) == (UNDECIDED, "1.00 times as fast")
    add(tmp_path, "birds", "c", plain=(1, 1))
    (folder_of(tmp_path / "birds", "c", 0) / "run.json").write_text('{"speed": {"images_per_second": 120}}')
    assert faster("c", "a").find(Evidence(tmp_path)).verdict == HOLDS
    assert faster("a", "c").find(Evidence(tmp_path)).verdict == FAILS


def test_a_comparison_of_a_run_with_itself_says_so(tmp_path):
    add(tmp_path, "object", "a", plain=(20, 200), parts=(20, 200), both=(20, 80))
    terms = less("a", "a", hows=("parts", "plain"))
    assert "nothing was left out" in contrast("object", terms, "worst group").find(Evidence(tmp_path)).note
    terms = less("a", "a", hows=("both", "plain"))
    assert contrast("object", terms, "worst group").find(Evidence(tmp_path)).note == ""


# ---- trained again ---------------------------------------------------------------------------------------------------


def row(right: float, seeds: tuple[int, ...] = (0,), hows: tuple[str, ...] = ("plain",), line: str = "ifam"):
    figures = {part: {"value": right} for part in ("all", "swapped", "worst group")}
    runs = [f"{right}, {seed}" for seed in seeds]
    return {"line": line, "seeds": list(seeds), "runs": runs, "figures": dict.fromkeys(hows, figures)}


def again(right: float, seeds: tuple[int, ...] = (0,)):
    return {key: value for key, value in row(right, seeds).items() if key != "line"}


def test_rows_of_an_earlier_file_stay_and_name_its_commit(tmp_path):
    old = {"commit": "abc", "sets": {"cub": {"ERM": row(0.5), "probe": row(0.3)}, "mixed": {"ERM": row(0.4)}}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    found = with_rows_of(tmp_path / "old.json", {"cub": {"ERM": row(0.6, (0, 1))}})
    assert list(found["cub"]) == ["ERM", "probe"]
    assert found["cub"]["probe"] == {"commit": "abc"} | row(0.3)
    assert found["mixed"] == {"ERM": {"commit": "abc"} | row(0.4)}
    assert found["cub"]["ERM"] == row(0.6, (0, 1)) | {"again": [again(0.5) | {"commit": "abc"}]}
    assert is_in(found, Row("cub", "ERM", "erm", 1))
    assert not is_in(found, Row("cub", "ERM", "erm", 2))
    assert not is_in(found, Row("cub", "ERM", "erm", 1, measures=("interventions",)))


def test_more_seeds_of_the_same_runs_are_not_trained_again(tmp_path):
    other = [again(0.7)]
    (tmp_path / "old.json").write_text(
        json.dumps({"commit": "abc", "sets": {"cub": {"a": row(0.6), "b": row(0.6) | {"again": other}}}})
    )
    found = with_rows_of(tmp_path / "old.json", {"cub": {"a": row(0.6, (0, 1)), "b": row(0.6)}})["cub"]
    assert found == {"a": row(0.6, (0, 1)), "b": row(0.6) | {"again": other}}
    runs = [add(tmp_path, "cub", "ERM", seed, plain=(3, wrong)) for seed, wrong in ((0, 5), (1, 5), (2, 6))]
    marks = [fingerprint_of(path) for path in runs]
    assert (marks[0] == marks[1], marks[0] == marks[2]) == (True, False)


def test_what_was_measured_before_is_not_given_up_for_a_run_that_was_not(tmp_path):
    measured = row(0.5, hows=("plain", "q0.99"))
    (tmp_path / "old.json").write_text(json.dumps({"commit": "abc", "sets": {"object": {"a": measured}}}))
    found = with_rows_of(tmp_path / "old.json", {"object": {"a": row(0.6)}})["object"]["a"]
    assert found["figures"] == measured["figures"]
    assert found["again"] == [again(0.6)]


def test_the_spread_between_runs_is_that_of_rows_trained_again(tmp_path):
    """Two runs that are .02 apart, and a run that is .04 from the mean of three; a probe's fit is always the same."""
    rows = {
        "a": row(0.62) | {"again": [again(0.6)]},
        "b": row(0.56) | {"again": [again(0.6, (0, 1, 2))]},
        "c": row(0.9),
        "probe": row(0.6, line="probe") | {"again": [again(0.6)]},
    }
    (tmp_path / "twice.json").write_text(json.dumps({"sets": {"cub": rows}}))
    found = spread(Evidence(tmp_path, retrained=tmp_path / "twice.json"), "cub", "swapped", "accuracy")
    assert found.deviation == pytest.approx(((0.02**2 / 2 + 0.04**2 / (4 / 3)) / 2) ** 0.5)
    assert found.rows == 2
    assert spread(Evidence(tmp_path, retrained=tmp_path / "twice.json"), "mixed", "all", "gap") is None
    assert spread(Evidence(tmp_path), "cub", "swapped", "accuracy") is None


def test_one_run_against_another_allows_for_training_again(tmp_path):
    difference = Estimate(0.1, 0.07, 0.13, 400, "pictures", difference=True)
    between = Spread(0.02, 1000)  # so many rows that Student's t is normal
    alone = between.widened(difference, less("a", "b"), {"a": 1, "b": 1})
    assert alone.low == pytest.approx(0.1 - (0.03**2 + 1.962**2 * 2 * 0.02**2) ** 0.5, abs=1e-4)
    assert alone.high - alone.value == pytest.approx(alone.value - alone.low)
    thrice = between.widened(difference, less("a", "b"), {"a": 1, "b": 3})
    assert thrice.low == pytest.approx(0.1 - (0.03**2 + 1.962**2 * 0.02**2) ** 0.5, abs=1e-4)
    assert Spread(0.02, 2).widened(difference, less("a", "b"), {"a": 1, "b": 1}).low < alone.low
    itself = less("a", "a", hows=("parts", "plain"))
    assert between.widened(difference, itself, {"a": 1}) == difference
    assert between.widened(difference, less("a", "b"), {"a": 2, "b": 3}) == difference


def test_a_verdict_between_single_runs_needs_more_than_the_spread(tmp_path):
    for name, wrong in (("iFAM K=4", 100), ("iFAM K=4, soft masks", 140)):
        add(tmp_path, "cub", name, plain=(40, wrong))
    test = contrast("cub", less("iFAM K=4", "iFAM K=4, soft masks", "swapped"))
    assert (test.find(Evidence(tmp_path)).verdict, EACH) == (HOLDS, 400)
    apart = row(0.7) | {"again": [again(0.6)]}
    (tmp_path / "twice.json").write_text(json.dumps({"sets": {"cub": {"a": apart}}}))
    found = test.find(Evidence(tmp_path, retrained=tmp_path / "twice.json"))
    assert (found.verdict, found.difference.value) == (UNDECIDED, pytest.approx(0.1))
    assert "training again (1 rows)" in found.difference.how
