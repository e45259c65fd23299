"""The benchmark of many interventions: both ways do the same work, and it says how often."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from intervention_cost import (
    EVERY_TIME,
    ONCE,
    WAYS,
    InterventionCost,
    interventions,
    looked_at_every_time,
    looked_at_once,
    measure,
    model_and_pictures,
)

SMALL = InterventionCost("random:nano", parts=2, batch=2, rounds=1)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_looking_once_answers_as_looking_every_time_does(way):
    model, images = model_and_pictures(SMALL, way)
    tried = interventions(model, images)
    once, every_time = (look(model, images, tried) for look in (looked_at_once, looked_at_every_time))
    assert len(once) == len(every_time) == 1 + 2 + 4
    for mine, theirs in zip(once, every_time, strict=True):
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=0, atol=0)
    assert any(not torch.equal(one.logits, once[0].logits) for one in once), "no intervention changes anything"


def test_the_figures_say_what_was_compared():
    rows = measure(SMALL, "patches")
    assert [row["variant"] for row in rows] == [ONCE, EVERY_TIME]
    assert all(row["interventions"] == 7 and 0 < row["patches_visible"] <= 1 for row in rows)
    assert rows[1][f"ratio_to_{ONCE}"] > 1
