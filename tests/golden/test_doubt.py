"""Token removal: by distance, as iFAM's paper says, and by inner products, as its published code does."""

import pytest
import torch

from sightline.where.doubt import distances, published_scores, thresholds, without_doubtful
from sightline.where.parts import hard_keep

from .conftest import CLOSE, golden

QUANTILES = ("0.58", "0.9", "0.95", "0.97", "0.99")


@pytest.fixture
def seen(stage1, inputs):
    with torch.no_grad():
        parts = stage1.discover(inputs["inputs.images"])
        return parts, stage1.inner_products(parts.features)


def test_the_same_patches_belong_to_the_same_parts(seen):
    expected = golden("masks.npz")
    assert torch.equal(seen[0].scores.argmax(dim=1), expected["token.assignment"])
    torch.testing.assert_close(distances(seen[0]), expected["token.distance"], **CLOSE)
    torch.testing.assert_close(seen[1], expected["token.inner_products"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("q", QUANTILES)
def test_doubtful_patches_become_background(seen, q):
    expected, (parts, _) = golden("masks.npz"), seen
    few = int(expected["token.calibration_images"])
    farthest = thresholds(distances(parts)[:few], parts.scores[:few].argmax(dim=1), float(q))
    torch.testing.assert_close(farthest, expected[f"token.distance_threshold_q{q}"], **CLOSE)
    kept = without_doubtful(parts, expected[f"token.distance_threshold_q{q}"])
    assert torch.equal(kept, expected[f"token.distance.q{q}.mask"])
    assert torch.equal(hard_keep(parts.scores) & ~kept, expected[f"token.distance.q{q}.removed"])


def test_no_threshold_removes_nothing(seen):
    parts, _ = seen
    for nowhere in (torch.inf, torch.nan):
        assert torch.equal(without_doubtful(parts, torch.full((4,), nowhere)), hard_keep(parts.scores))
    assert not without_doubtful(parts, torch.full((4,), -1.0)).any()


def test_a_part_without_patches_has_no_threshold():
    values = torch.rand(2, 3, 4, 4)
    found = thresholds(values, torch.zeros(2, 4, 4, dtype=torch.long), 0.5)
    assert found[0] == pytest.approx(values[:, 0].median().item(), abs=0.1)
    assert found[1].isnan()


@pytest.mark.parametrize("tag", [*(f"q{q}" for q in QUANTILES), "noop"])
def test_published_token_removal(stage1, stage2, inputs, seen, tag):
    expected, (parts, products) = golden("masks.npz"), seen
    lowest = expected[f"token.ip_threshold_{tag}"]
    if tag != "noop":
        few = int(expected["token.calibration_images"])
        assigned = parts.scores[:few].argmax(dim=1)
        torch.testing.assert_close(thresholds(products[:few], assigned, 1 - float(tag[1:])), lowest, **CLOSE)
    left = published_scores(parts, products, lowest)
    torch.testing.assert_close(left.logits, expected[f"token.ip.{tag}.logits"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(left.shares, expected[f"token.ip.{tag}.maps"], atol=1e-4, rtol=1e-5)
    keep = hard_keep(left.scores)
    assert torch.equal(keep, expected[f"token.ip.{tag}.mask"])
    with torch.no_grad():
        ours = stage1.class_logits(stage1.embed(left))
        torch.testing.assert_close(ours, expected[f"token.ip.{tag}.class_logits"], **CLOSE)
        answers = stage2(inputs["inputs.images"], keep).logits
        torch.testing.assert_close(answers, expected[f"token.ip.{tag}.stage2_logits"], **CLOSE)
