"""What the benchmark of interventions keeps of runs: parcels, earlier figures, and how far runs of a row come apart."""

import csv
import json
import sys
from pathlib import Path

import pytest

from sightline.errors import UserError
from sightline.metrics.estimates import Estimate

from .intervening import EACH, add

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from interventions_claims import claims_about, less
from interventions_evidence import Evidence, Spread, mark_of, outcomes_in, pack_all, unpack_all, unpacked
from interventions_kinds import Contrast
from interventions_measure import TEST
from interventions_rows import Row, rows_of

import interventions
from claims import HOLDS, UNDECIDED, final_evaluation
from interventions import Interventions, lacks

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

# ---- parcels ---------------------------------------------------------------------------------------------------------


def test_runs_without_parts_are_read_from_their_answers_and_packed_without_probabilities(tmp_path):
    path = add(tmp_path / "runs", "cub", "ERM", plain=(3, 5))
    before = outcomes_in(path).right["plain"]
    (path / TEST).unlink()
    outcomes_in.cache_clear()
    (path / "predictions").mkdir()
    with (path / "predictions" / "test.csv").open("w", newline="") as file:
        lines = [(image, "a", "tern/x", "a" if right else "b", 0.5) for image, right in before.items()]
        csv.writer(file).writerows([("image", "label", "group", "predicted", "p_a"), *lines])
    assert outcomes_in(path).right == {"plain": before}
    (packed,) = pack_all(tmp_path / "runs", tmp_path / "parcels")
    assert packed["packed"] == "cub.tar.xz"
    unpack_all(tmp_path / "parcels", tmp_path / "there")
    assert outcomes_in(tmp_path / "there" / "cub" / path.name).right == {"plain": before}


def test_what_was_packed_elsewhere_is_finished_here_and_takes_nothing_from_what_is_here(tmp_path):
    for seed in range(2):
        add(tmp_path / "away", "mixed", "ERM", seed, plain=(3, 5))
    list(pack_all(tmp_path / "away", tmp_path / "parcels"))
    here = add(tmp_path / "here", "mixed", "ERM", plain=(7, 9))
    config, before = Interventions(runs=tmp_path / "here"), (here / TEST).read_text()
    unpack_all(tmp_path / "parcels", config.runs)
    assert (here / TEST).read_text() == before
    assert [lacks(config, row) for row in rows_of("mixed") if row.name == "ERM"] == [[], [], ["training"]]
    with unpacked(tmp_path / "parcels") as runs:
        assert list(Evidence(runs).folders("mixed", "ERM")) == [0, 1]
    assert not runs.exists()
    with unpacked(tmp_path / "here") as runs:
        assert runs == tmp_path / "here"
    with pytest.raises(UserError, match="--pack"):
        unpack_all(tmp_path / "here", tmp_path / "elsewhere")


def test_committed_verdicts_are_those_of_the_committed_runs():
    known = json.loads((RESULTS / "claims_interventions.json").read_text())["claims"]
    some = [claim for claim in claims_about() if claim.id in ("F9", "F14", "F17")]
    with unpacked(RESULTS / "interventions") as runs:
        found = {one.id: final_evaluation(one, Evidence(runs, RESULTS / "interventions_h200.json"))[0] for one in some}
    assert found == {one["id"]: one["verdict"] for one in known if one["id"] in found}


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
    found = interventions.with_rows_of(tmp_path / "old.json", {"cub": {"ERM": row(0.6, (0, 1))}})
    assert list(found["cub"]) == ["ERM", "probe"]
    assert found["cub"]["probe"] == {"commit": "abc"} | row(0.3)
    assert found["mixed"] == {"ERM": {"commit": "abc"} | row(0.4)}
    assert found["cub"]["ERM"] == row(0.6, (0, 1)) | {"again": [again(0.5) | {"commit": "abc"}]}
    assert interventions.is_in(found, Row("cub", "ERM", "erm", 1))
    assert not interventions.is_in(found, Row("cub", "ERM", "erm", 2))
    assert not interventions.is_in(found, Row("cub", "ERM", "erm", 1, interventions=True))


def test_more_seeds_of_the_same_runs_are_not_trained_again(tmp_path):
    other = [again(0.7)]
    (tmp_path / "old.json").write_text(
        json.dumps({"commit": "abc", "sets": {"cub": {"a": row(0.6), "b": row(0.6) | {"again": other}}}})
    )
    found = interventions.with_rows_of(tmp_path / "old.json", {"cub": {"a": row(0.6, (0, 1)), "b": row(0.6)}})["cub"]
    assert found == {"a": row(0.6, (0, 1)), "b": row(0.6) | {"again": other}}
    runs = [add(tmp_path, "cub", "ERM", seed, plain=(3, wrong)) for seed, wrong in ((0, 5), (1, 5), (2, 6))]
    marks = [mark_of(path) for path in runs]
    assert (marks[0] == marks[1], marks[0] == marks[2]) == (True, False)


def test_what_was_measured_before_is_not_given_up_for_a_run_that_was_not(tmp_path):
    measured = row(0.5, hows=("plain", "q0.99"))
    (tmp_path / "old.json").write_text(json.dumps({"commit": "abc", "sets": {"object": {"a": measured}}}))
    found = interventions.with_rows_of(tmp_path / "old.json", {"object": {"a": row(0.6)}})["object"]["a"]
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
    found = Evidence(tmp_path, tmp_path / "twice.json").spread("cub", "swapped", "accuracy")
    assert found.deviation == pytest.approx(((0.02**2 / 2 + 0.04**2 / (4 / 3)) / 2) ** 0.5)
    assert found.rows == 2
    assert Evidence(tmp_path, tmp_path / "twice.json").spread("mixed", "all", "gap") is None
    assert Evidence(tmp_path).spread("cub", "swapped", "accuracy") is None


def test_one_run_against_another_allows_for_training_again(tmp_path):
    difference = Estimate(0.1, 0.07, 0.13, 400, "pictures", difference=True)
    spread = Spread(0.02, 1000)  # so many rows that Student's t is normal
    alone = spread.widened(difference, less("a", "b"), {"a": 1, "b": 1})
    assert alone.low == pytest.approx(0.1 - (0.03**2 + 1.962**2 * 2 * 0.02**2) ** 0.5, abs=1e-4)
    assert alone.high - alone.value == pytest.approx(alone.value - alone.low)
    thrice = spread.widened(difference, less("a", "b"), {"a": 1, "b": 3})
    assert thrice.low == pytest.approx(0.1 - (0.03**2 + 1.962**2 * 0.02**2) ** 0.5, abs=1e-4)
    assert Spread(0.02, 2).widened(difference, less("a", "b"), {"a": 1, "b": 1}).low < alone.low
    itself = less("a", "a", hows=("parts", "plain"))
    assert spread.widened(difference, itself, {"a": 1}) == difference
    assert spread.widened(difference, less("a", "b"), {"a": 2, "b": 3}) == difference


def test_a_verdict_between_single_runs_needs_more_than_the_spread(tmp_path):
    for name, wrong in (("iFAM K=4", 100), ("iFAM K=4, soft masks", 140)):
        add(tmp_path, "cub", name, plain=(40, wrong))
    test = Contrast("cub", less("iFAM K=4", "iFAM K=4, soft masks", "swapped"))
    assert (test.find(Evidence(tmp_path)).verdict, EACH) == (HOLDS, 400)
    apart = row(0.7) | {"again": [again(0.6)]}
    (tmp_path / "twice.json").write_text(json.dumps({"sets": {"cub": {"a": apart}}}))
    found = test.find(Evidence(tmp_path, tmp_path / "twice.json"))
    assert (found.verdict, found.difference.value) == (UNDECIDED, pytest.approx(0.1))
    assert "training again (1 rows)" in found.difference.how
