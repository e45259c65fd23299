"""The table of speeds: every row is measured, and what is timed is proved and equals the reference."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import speed_table
import two_stages

FEW = {"--backbones": "nano", "--side": "32", "--batches": "2", "--train-batch": "2", "--rounds": "1", "--seconds": "0"}
SMALL = [word for pair in FEW.items() for word in pair]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    path = tmp_path_factory.mktemp("speed") / "x.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_table, "initialise_quickly", lambda: None)  # it would stay for other tests
        patch.setattr(sys, "argv", ["speed_table.py", *SMALL, "--out", str(path)])
        speed_table.main()
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_part_of_the_table_is_there(figures):
    assert figures["failed"] == []
    rows = {(row["work"], row["sight"]): row for row in figures["rows"]}
    for sight in two_stages.SIGHTS:
        assert (("look and judge", sight) in rows) == (sight != "patches, no mask gradient")
        assert (("step", sight) in rows) == ("3 blocks" not in sight)
    assert all(row["ratio"] > 0 and len(row["spread"]) == 2 for row in figures["rows"])
    assert rows["dense", "everything"]["ratio"] == 1


def test_the_timed_path_is_proved(figures):
    proof, alike = figures["checks"]
    assert proof["verdict"] == "blind"
    assert proof["paths"] == ["removal, packed, image by image"]
    assert alike["logits"] < 1e-4


def test_given_sights_show_a_quarter_on_average():
    for pixels in (False, True):
        sight = two_stages.given_sight(64, 64, (16, 16), pixels=pixels)
        assert 0.22 < sight.visible((64, 64)).float().mean() < 0.28
        assert len(sight.keep.flatten(1).sum(dim=1).unique()) > 10, "rows must be ragged"
