"""2,000 changed files of ten kinds: each is read, or refused in one line, in bounded time and memory."""

import pytest

from sightline.datasets.toy import write_toy
from sightline.train import train

from ..small_runs import small
from .__main__ import count_for
from .fuzz import Outcome, attempt, edited, edited_json, fuzz
from .readers import Kind, kinds

COUNTS = {
    "table": 300, "predictions": 300, "image": 450, "mask": 200, "config": 200, "intervention": 200, "onnx": 50,
    "weights": 60, "pickle": 60, "run": 150, "run and weights": 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    home = tmp_path_factory.mktemp("hostile")
    toy = write_toy(home / "toy", train=16, val=8, test=8, size=32)
    return kinds(home / "files", train(small(toy, home / "run", epochs=1))), home / "files"


def test_two_thousand_in_all():
    assert sum(COUNTS.values()) == 2000


@pytest.mark.parametrize("name", COUNTS)
def test_changed_files_are_read_or_refused_in_one_line(name, found):
    every, folder = found
    if name not in every:
        pytest.skip("needs onnx and onnxruntime")
    outcome = fuzz(every[name], COUNTS[name], folder)
    assert outcome.failures == []
    assert outcome.tried > COUNTS[name] // 2
    assert outcome.refused > 0, "the changes matter"


def test_every_kind_is_tried(found):
    assert set(found[0]) | {"onnx"} == set(COUNTS)


def test_unchanged_files_are_read(found):
    every, folder = found
    for kind in every.values():
        outcome = Outcome()
        attempt(kind, kind.seeds[0], folder, outcome)
        assert (outcome.read, outcome.failures) == (1, []), kind.name


def test_what_is_not_refused_is_found(tmp_path):
    """The harness itself: a reader that fails in another way is reported."""
    broken = Kind("x.json", (b'{"a": 1}',), lambda path: 1 / (path.read_bytes() == b'{"a": 1}'))
    outcome = fuzz(broken, 50, tmp_path)
    assert outcome.failures
    assert "ZeroDivisionError" in outcome.failures[0]


def test_changes_are_changes():
    assert edited(b"abc", [("flip", 0.0, 0)]) == b"`bc"
    assert edited(b"abc", [("cut", 0.0, 0)]) == b"bc"
    assert edited_json(b'{"a": {"b": 1}}', [("cut", 0.9, 0)]) == b'{"a": {}}'


def test_the_long_mode_makes_as_many_files_as_it_says():
    counts = [count_for(costly, 11, 4, 100_000) for costly in [True] * 4 + [False] * 7]
    assert sum(counts) == pytest.approx(100_000, abs=11)
    assert counts[-1] == pytest.approx(5 * counts[0], rel=0.001)


def test_a_refused_network_prints_nothing(found, capfd):
    """onnxruntime would tell of another attempt, in five lines."""
    if "onnx" not in found[0]:
        pytest.skip("needs onnx and onnxruntime")
    kind, folder = found[0]["onnx"], found[1]
    outcome = Outcome()
    attempt(kind, kind.seeds[0].replace(b"Sigmoid", b"\xecigmoid"), folder, outcome)
    assert (outcome.refused, outcome.failures) == (1, [])
    assert "EP Error" not in capfd.readouterr().out
