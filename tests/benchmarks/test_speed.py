"""Speeds: what is compared does the same work."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import speed
from speed import Speed
from speed_sight import (
    EVERY_TIME,
    ONCE,
    WAYS,
    interventions_of,
    look_every_time,
    look_once,
    model_of_way,
    tried_interventions,
)

SMALL = Speed("interventions", backbones=("random:nano",), parts=2, batches=(2,), rounds=1)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_looking_once_answers_as_looking_every_time_does(way):
    model, images = model_of_way(SMALL, way)
    tried = tried_interventions(model, images)
    once, every_time = (look(model, images, tried) for look in (look_once, look_every_time))
    assert len(once) == len(every_time) == 1 + 2 + 4
    for mine, theirs in zip(once, every_time, strict=True):
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=0, atol=0)
    assert any(not torch.equal(one.logits, once[0].logits) for one in once), "no intervention changes anything"


def test_the_figures_say_what_was_compared():
    rows = interventions_of(SMALL, "patches")
    assert [row["variant"] for row in rows] == [ONCE, EVERY_TIME]
    assert all(row["interventions"] == 7 and 0 < row["patches_visible"] <= 1 for row in rows)
    assert rows[1][f"ratio_to_{ONCE}"] > 1


def test_crops_are_the_same_however_they_are_searched(monkeypatch, capsys):
    given = ["crops", "--count", "6", "--rounds", "1", "--batches", "2"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *given])
    monkeypatch.setattr("speed_models.ONE_BY_ONE", 4)
    monkeypatch.setattr("speed_models.CHUNK", 3)
    found = {}
    monkeypatch.setattr(speed, "record", lambda path, device, content: found.update(content))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--out", "x.json"])
    speed.main()
    assert {row["same_boxes_as_one_by_one"] for row in found["search"]} == {True}
    assert {row["share_of_boxes_as_numpy"] for row in found["search"]} == {1.0}
    assert any("share_of_its_limit" in row for row in found["pipeline"])
