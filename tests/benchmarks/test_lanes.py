"""Jobs in parallel: failures, retries and deadlines."""

import json
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from sightline.errors import UserError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import lanes
from lanes import Job, deadline_in, run_parallel


class Processes:
    """In place of real ones: notes what is begun in which, and fails as told."""

    def __init__(self, failures: dict[str, list[BaseException]]):
        self.failures, self.begun, self.count = failures, [], 0

    def __call__(self):
        self.count += 1
        return self

    def submit(self, _, __, work, row):
        self.begun.append(row)
        future: Future = Future()
        if self.failures.get(row):
            future.set_exception(self.failures[row].pop(0))
        else:
            future.set_result(work(row))
        return future

    def shutdown(self):
        pass


def done(row: str) -> dict[str, str]:
    return {"row": row, "done": "yes"}


def worked_off(monkeypatch, capsys, failures, minutes: float | None = None) -> tuple[Processes, list[dict]]:
    processes = Processes(failures)
    monkeypatch.setattr(lanes, "new_process", processes)
    run_parallel([Job({"row": row}, done, (row,)) for row in "abc"], 1, deadline_in(minutes))
    return processes, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_failing_row_does_not_take_the_others_with_it(monkeypatch, capsys):
    processes, reported = worked_off(monkeypatch, capsys, {"a": [UserError("no")]})
    assert processes.begun == ["a", "b", "c"]
    assert reported == [{"row": "a", "failed": "UserError: no", "tried_again": False}, done("b"), done("c")]


def test_a_process_that_dies_is_replaced_and_its_row_tried_once_more(monkeypatch, capsys):
    processes, reported = worked_off(monkeypatch, capsys, {"a": [BrokenProcessPool("gone")] * 5})
    assert processes.begun == ["a", "b", "c", "a"]
    assert [line["tried_again"] for line in reported if "failed" in line] == [True, False]
    assert processes.count == 2


def test_after_the_deadline_nothing_is_begun(monkeypatch, capsys):
    processes, reported = worked_off(monkeypatch, capsys, {}, minutes=-1.0)
    assert processes.begun == []
    assert {line["skipped"] for line in reported} == {"no time left"}


def test_what_is_interrupted_at_the_deadline_is_said_to_be_saved(monkeypatch, capsys):
    _, reported = worked_off(monkeypatch, capsys, {"a": [KeyboardInterrupt()]}, minutes=5.0)
    assert reported[0] == {"row": "a", "stopped": "saved, to be resumed", "tried_again": False}
    with pytest.raises(KeyboardInterrupt):
        lanes.run_until(time.time() + 0.05, time.sleep, 5)
    assert lanes.run_until(time.time() + 0.05, done, "a") == done("a")
    time.sleep(0.1)


def test_rows_run_in_processes_of_their_own(capsys):
    run_parallel([Job({"row": row}, dict, ((("row", row),),)) for row in "ab"], 2, deadline_in(5.0))
    assert sorted(json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()) == ["a", "b"]
