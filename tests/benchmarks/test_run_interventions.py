"""The interventions study: its rows and their order, packed results, and what is timed alone."""

import csv
import sys
from pathlib import Path

import pytest

from sightline.errors import UserError

from .intervening import add

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import run
from claims_interventions import deciding_rows
from contrasts import Term
from evidence import TEST, Evidence, outcomes_in
from jobs import lacking
from options import Benchmark, is_wanted
from packing import pack_all, unpack_all, unpacked
from rows.interventions import ABLATED, SETS, rows_of
from stages import interventions_rows
from study import Context, command_of


def context(tmp_path: Path, **options) -> Context:
    data = dict.fromkeys(SETS, tmp_path)
    return Context(data, {"TI": "random:nano"}, tmp_path / "runs", tmp_path / "cache", **options)


@pytest.mark.parametrize("kind", SETS)
def test_every_row_is_a_command_that_is_understood_and_has_a_folder_of_its_own(kind, tmp_path):
    here, folders = context(tmp_path), set()
    for row in rows_of(kind):
        command = command_of(here, row)
        assert (command.seed, command.resume, command.folder) == (row.seed, True, here.folder(row))
        assert command.precision == ("fp32" if "fp32" in row.name else "bf16")
        folders.add(command.folder)
    assert len(folders) == len(rows_of(kind))


def test_the_ablations_are_those_of_the_papers_table(tmp_path):
    commands = {row.name: command_of(context(tmp_path), row) for row in rows_of("cub")}
    full = commands["iFAM K=4"]
    assert (full.part_dropout, full.sight, full.shaping.entropy, full.classify_parts) == (0.3, "patches", 1, 1)
    assert commands["iFAM K=4, soft masks"].soft_mask
    shaping = commands["iFAM K=4, no shaping"].shaping
    assert {value for value in vars(shaping).values() if isinstance(value, float | int)} == {0}
    assert commands["iFAM K=4, no stage-1 classification"].classify_parts == 0
    assert commands["iFAM K=4, frozen stage 2"].freeze_predictor
    assert {commands[f"iFAM K=4, part dropout {share}"].part_dropout for share in ("0", "0.1", "0.5")} == {0, 0.1, 0.5}
    assert {f"iFAM K=4, {how}" for how in ABLATED} <= {row.name for row in rows_of("cub")}


def test_what_decides_comes_first_then_more_seeds_then_rows_beside_then_what_is_timed():
    decide = deciding_rows()
    turns = [
        "timed" if row.timed else "seeds" if row.seed else "deciding" if (row.set, row.name) in decide else "beside"
        for row in interventions_rows()
    ]
    assert list(dict.fromkeys(turns)) == ["deciding", "seeds", "beside", "timed"]
    assert turns == sorted(turns, key=["deciding", "seeds", "beside", "timed"].index)
    assert {("cub", f"iFAM K=4, {how}") for how in ABLATED} < decide
    assert ("object", "ERM") not in decide


def test_rows_are_asked_for_by_name_or_by_set_and_name():
    def wanted(*names: str) -> set[tuple[str, str]]:
        asked = Benchmark("interventions", rows=names)
        return {(row.set, row.name) for row in interventions_rows() if is_wanted(asked, row)}

    assert wanted("iFAM K=1") == {("cub", "iFAM K=1"), ("pair", "iFAM K=1")}
    assert wanted("pair: iFAM K=1") == {("pair", "iFAM K=1")}
    assert wanted("object: iFAM*") == {("object", "iFAM K=8"), ("object", "iFAM K=8, pixels")}


def test_what_is_timed_has_the_gpu_for_itself(tmp_path, monkeypatch):
    goes, here = [], context(tmp_path, compile=True)
    monkeypatch.setattr(run, "run_parallel", lambda jobs, lanes, end: goes.append((len(jobs), lanes, end)))
    rows = [row for row in rows_of("birds") if row.timed or (row.seed == 0 and "," not in row.name)]
    run.run_stage(Benchmark("interventions", parallel=3), here, [(row, {}) for row in rows], 1000.0)
    assert goes == [(3, 3, 1000.0), (4, 1, 1000.0)]
    assert {command_of(here, row).compile for row in rows if row.timed} == {False}
    assert {command_of(here, row).compile for row in rows if not row.timed} == {True}
    assert Term(1, "a", "q0.99").words == "a (q0.99)"


# ---- parcels ---------------------------------------------------------------------------------------------------------


def test_runs_without_parts_are_read_from_their_answers_and_packed_without_probabilities(tmp_path):
    path = add(tmp_path / "runs", "cub", "ERM", plain=(3, 5))
    before = outcomes_in(path).correct["plain"]
    (path / TEST).unlink()
    (path / "predictions").mkdir()
    with (path / "predictions" / "test.csv").open("w", newline="") as file:
        lines = [(image, "a", "tern/x", "a" if right else "b", 0.5) for image, right in before.items()]
        csv.writer(file).writerows([("image", "label", "group", "predicted", "p_a"), *lines])
    assert outcomes_in(path).correct == {"plain": before}
    (packed,) = pack_all(tmp_path / "runs", tmp_path / "parcels", outcomes=True)
    assert packed["packed"] == "cub.tar.xz"
    unpack_all(tmp_path / "parcels", tmp_path / "there")
    assert outcomes_in(tmp_path / "there" / "cub" / path.name).correct == {"plain": before}


def test_what_was_packed_elsewhere_is_finished_here_and_takes_nothing_from_what_is_here(tmp_path):
    for seed in range(2):
        add(tmp_path / "away", "mixed", "ERM", seed, plain=(3, 5))
    list(pack_all(tmp_path / "away", tmp_path / "parcels", outcomes=True))
    here = add(tmp_path / "here", "mixed", "ERM", plain=(7, 9))
    there, before = Context({}, {}, tmp_path / "here", tmp_path), (here / TEST).read_text()
    unpack_all(tmp_path / "parcels", there.runs)
    assert (here / TEST).read_text() == before
    assert [lacking(there, row) for row in rows_of("mixed") if row.name == "ERM"] == [[], [], ["training"]]
    with unpacked(tmp_path / "parcels") as runs:
        assert list(Evidence(runs).folders("mixed", "ERM")) == [0, 1]
    assert not runs.exists()
    with unpacked(tmp_path / "here") as runs:
        assert runs == tmp_path / "here"
    with pytest.raises(UserError, match="--pack"):
        unpack_all(tmp_path / "here", tmp_path / "elsewhere")
