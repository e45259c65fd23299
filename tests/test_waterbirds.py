"""The Waterbirds benchmark: its rows, what becomes of failures, and its table from run folders without weights."""

import contextlib
import json
import sys
import tarfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from pathlib import Path

import pytest

from sightline.config import Ifam
from sightline.data.toyset import write_toy
from sightline.errors import UserError

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import claims
import waterbirds
from waterbirds import Waterbirds, command_of, jobs_of, train_all
from waterbirds_results import as_markdown, pack
from waterbirds_rows import HEADLINE, PAIRS, PAPERS_ROWS, PIXEL_ROWS, ROWS, folder_of, folders_of

# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_a_command_that_is_understood(row, tmp_path):
    if "--sight" in ROWS[row] and "sight" not in {field.name for field in fields(Ifam)}:
        pytest.skip("ifam cannot choose how far its sight goes yet")
    config = Waterbirds(tmp_path, "random:nano", tmp_path / "runs", only=(row,), self_supervised="a", u2net="b")
    command = command_of(config, row, 2)
    assert (command.seed, command.folder, command.resume) == (2, folder_of(config.runs, row, 2), True)


def test_rows_do_not_share_folders_and_tables_do_not_contradict_each_other(tmp_path):
    assert len({folder_of(tmp_path, row, 0) for row in ROWS}) == len(ROWS)
    assert all(PIXEL_ROWS[row] == PAPERS_ROWS[row] for row in PIXEL_ROWS.keys() & PAPERS_ROWS.keys())
    assert set(ROWS) >= HEADLINE | {row for pair in PAIRS for row in pair}


def test_every_first_seed_comes_before_any_second_one_and_the_probe_last(tmp_path):
    jobs = jobs_of(Waterbirds(tmp_path, seeds=(5, 7), only=("probe", "ERM", "iFAM K=4", "iFAM K=4, soft")))
    assert jobs == [("ERM", 5), ("iFAM K=4", 5), ("iFAM K=4, soft", 5), ("ERM", 7), ("iFAM K=4", 7), ("probe", 5)]


def test_what_is_not_understood_or_not_given_is_a_users_error(tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text(
        json.dumps({"odd": "erm --nonsense 3", "none": "astrology", "found": "early-mask --masks found:SELF"})
    )
    config = Waterbirds(tmp_path, "random:nano", tmp_path / "runs", rows=rows)
    for row, why in (("odd", "not understood"), ("none", "no method 'astrology'"), ("found", "--self-supervised")):
        with pytest.raises(UserError, match=why):
            command_of(config, row, 0)
    with pytest.raises(UserError, match="'iFAM K=5'"):
        jobs_of(Waterbirds(tmp_path, only=("iFAM K=5",)))


# ---- failures --------------------------------------------------------------------------------------------------------


class Processes:
    """In place of real ones: notes what is begun in which, and fails as told."""

    def __init__(self, failures: dict[str, list[BaseException]]):
        self.failures, self.begun, self.count = failures, [], 0

    def __call__(self):
        self.count += 1
        return self

    def submit(self, _, __, ___, row, seed):
        self.begun.append(row)
        future: Future = Future()
        if self.failures.get(row):
            future.set_exception(self.failures[row].pop(0))
        else:
            future.set_result({"row": row, "seed": seed})
        return future

    def shutdown(self):
        pass


def trained(tmp_path, monkeypatch, capsys, failures, **settings) -> tuple[Processes, list[dict]]:
    processes = Processes(failures)
    monkeypatch.setattr(waterbirds, "one_process", processes)
    train_all(Waterbirds(tmp_path, "", tmp_path, parallel=1, **settings), [("ERM", 0), ("iFAM K=1", 0), ("probe", 0)])
    return processes, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_failing_row_does_not_take_the_others_with_it(tmp_path, monkeypatch, capsys):
    processes, said = trained(tmp_path, monkeypatch, capsys, {"ERM": [UserError("no")]})
    assert processes.begun == ["ERM", "iFAM K=1", "probe"]
    assert said[0]["failed"] == "UserError: no"


def test_a_process_that_dies_is_replaced_and_its_run_tried_once_more(tmp_path, monkeypatch, capsys):
    processes, said = trained(tmp_path, monkeypatch, capsys, {"ERM": [BrokenProcessPool("gone")] * 5})
    assert processes.begun == ["ERM", "iFAM K=1", "probe", "ERM"]
    assert [line["tried_again"] for line in said if "failed" in line] == [True, False]
    assert processes.count == 2


def test_after_the_deadline_nothing_is_begun(tmp_path, monkeypatch, capsys):
    processes, said = trained(tmp_path, monkeypatch, capsys, {}, minutes=-1.0)
    assert processes.begun == []
    assert {line["skipped"] for line in said} == {"no time left"}


def test_what_is_interrupted_at_the_deadline_ends_the_work(tmp_path, monkeypatch, capsys):
    processes, _ = trained(tmp_path, monkeypatch, capsys, {"ERM": [KeyboardInterrupt()]}, minutes=5.0)
    assert processes.begun == ["ERM"]
    with pytest.raises(KeyboardInterrupt), waterbirds.interrupted_at(time.time() + 0.05):
        time.sleep(5)
    with waterbirds.interrupted_at(time.time() + 0.05):
        pass
    time.sleep(0.1)


# ---- a whole table ---------------------------------------------------------------------------------------------------

BRIEF = "--epochs 1 --batch 16"
TINY = {
    "ERM": f"erm {BRIEF}",
    "early mask, true": f"early-mask {BRIEF}",
    "early mask, true, pixels": f"early-mask {BRIEF} --pixels --at-least 0.1",
    "late mask, true": f"late-mask {BRIEF}",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run folders of a tiny table, trained by one call and measured by another; and copies, packed and unpacked."""
    home = tmp_path_factory.mktemp("wb")
    write_toy(home / "toy", train=32, val=16, test=32, size=32)
    (home / "rows.json").write_text(json.dumps(TINY))
    common = ["--parallel", 1, "--workers", 0, "--device", "cpu", "--splits", "test", "--seeds", 0]
    with pytest.MonkeyPatch.context() as patch, (home / "said").open("w") as said, contextlib.redirect_stdout(said):
        patch.setattr(waterbirds, "one_process", lambda: ThreadPoolExecutor(1))
        script(home, home / "toy", "--backbone", "random:nano", "--precision", "fp32", "--no-measure", *common)
        script(home, home / "toy", "--no-train", *common)
        script(home, "nowhere", "--collect", "--pack", home / "parcels", *common)
    for parcel in (home / "parcels").iterdir():
        with tarfile.open(parcel) as file:
            file.extractall(home / "copy", filter="data")
    return home


def script(home: Path, *arguments, runs: str = "runs") -> None:
    given = [*arguments, "--runs", home / runs, "--rows", home / "rows.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["waterbirds.py", *map(str, given)])
        waterbirds.main()


def test_every_run_is_trained_measured_and_certified(made):
    for row in TINY:
        (folder,) = folders_of(made / "runs", row, ("val", "test")).values()
        looks = row != "ERM"
        for name in ("localization.json", "localization/test.csv", "shape/test.csv", "certificate.json"):
            assert (folder / name).exists() == looks, (row, name)


def test_training_and_measuring_say_how_long_each_step_took_and_share_the_decoded_pictures(made):
    said = [json.loads(line) for line in (made / "said").read_text().splitlines() if line.startswith('{"row"')]
    assert [(line["row"], list(line["seconds"])) for line in said] == [
        *((row, ["training"]) for row in TINY),
        *((row, ["localize", "shape", "certify"]) for row in TINY if row != "ERM"),
    ]
    decoded = (made / "runs" / "cache").glob("decoded-*.bin")
    assert len(list(decoded)) == 4  # train as it is augmented, and every split as it is measured


def test_parcels_hold_whole_runs_without_weights_and_no_more_than_they_may(made, tmp_path):
    folders = [folder_of(made / "runs", row, 0) for row in TINY]
    (whole,) = pack(folders, tmp_path)
    most = int(0.6 * whole.stat().st_size)
    parcels = pack(folders, tmp_path, most)
    assert sorted(tmp_path.iterdir()) == parcels
    assert len(parcels) > 1
    assert all(parcel.stat().st_size <= most for parcel in parcels)
    held = []
    for parcel in parcels:
        with tarfile.open(parcel) as file:
            held += file.getnames()
    assert len(held) == len(set(held))
    assert {name.split("/")[0] for name in held} == {folder.name for folder in folders}
    assert {Path(name).suffix for name in held} == {".json", ".jsonl", ".csv"}
    (one,) = pack(folders[:1], tmp_path)
    assert list(tmp_path.iterdir()) == [one]


def test_the_table_is_made_from_copies_without_weights_or_data(made, capsys, tmp_path):
    out = tmp_path / "table.json"
    script(made, "nowhere", "--splits", "test", "--collect", "--markdown", "--out", out, runs="copy")
    said, content = capsys.readouterr().out, json.loads(out.read_text())
    assert "| early mask, true, pixels | 1 |" in said
    assert [found["row"] for found in content["rows"]] == list(TINY)
    assert set(content["rows"][1]["sight"]["test"]) >= {"grid_iou", "pixel_iou", "coverage"}
    assert len(content["rows"][0]["metrics"]["test"]["groups"]) == 4
    assert {(pair["row"], pair["against"]) for pair in content["paired"]} == {
        ("early mask, true", "late mask, true"), ("early mask, true, pixels", "early mask, true"),
    }  # fmt: skip
    assert content["missing"] == {f"{row}, seed {seed}": ["training"] for seed in (1, 2) for row in TINY}
    assert str(made) not in out.read_text()


def test_claims_are_held_against_copies_without_weights_or_data(made, monkeypatch, tmp_path):
    out = tmp_path / "claims.json"
    given = [made / "copy", "--read-only", "--only", "F1", "F2", "B1", "B3", "--out", out]
    monkeypatch.setattr(sys, "argv", ["claims.py", *map(str, given)])
    claims.main()
    verdicts = {
        test["test"]: test["verdict"]
        for claim in json.loads(out.read_text())["claims"]
        for test in claim["tests"]
        if test["verdict"] != claims.NOT_RUN
    }
    assert verdicts["verify says 'blind' of trained runs"] == claims.HOLDS
    assert verdicts["verify says 'leaks' of trained runs"] == claims.HOLDS
    for test in (
        "worst group: early mask, true − late mask, true",
        "worst group: early mask, true, pixels − early mask, true",
        "label from shape: early mask, true − chance",
    ):
        assert test in verdicts


def test_what_is_finished_is_not_done_again_and_what_is_lacking_is(made, capsys, monkeypatch):
    begun = []
    monkeypatch.setattr(waterbirds, "one", lambda _, row, seed: begun.append(row) or {"row": row})
    monkeypatch.setattr(waterbirds, "one_process", lambda: ThreadPoolExecutor(1))
    shape = folder_of(made / "runs", "early mask, true", 0) / "shape" / "test.csv"
    shape.rename(shape.with_suffix(".away"))
    script(made, made / "toy", "--backbone", "random:nano", "--splits", "test", "--seeds", 0, "--parallel", 1)
    shape.with_suffix(".away").rename(shape)
    assert begun == ["early mask, true"]
    assert "missing: early mask, true, seed 0: shape/test.csv" in capsys.readouterr().out


def test_markdown_puts_numbers_to_the_right():
    assert as_markdown(["", "n"], [["a", "+1.0"], ["b", ""]])[1] == "| --- | --: |"
