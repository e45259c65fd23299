"""Token removal: by distance, as iFAM's paper says, and by inner products, as its published code does."""

import numpy as np
import pytest
import torch

from sightline.where.corrections import Correction, PartAssignment, published_scores
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
    claims = PartAssignment.of(seen[0], seen[0].scores)
    own = expected["token.distance"].gather(1, claims.part[:, None])[:, 0]
    torch.testing.assert_close(claims.distances, own, **CLOSE)
    torch.testing.assert_close(seen[1], expected["token.inner_products"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("q", QUANTILES)
def test_doubtful_patches_become_background(seen, q):
    expected, (parts, _) = golden("masks.npz"), seen
    few, claims = int(expected["token.calibration_images"]), PartAssignment.of(parts, parts.scores)
    farthest = expected[f"token.distance_threshold_q{q}"]
    torch.testing.assert_close(quantiles(claims.distances[:few], parts.scores[:few], float(q)), farthest, **CLOSE)
    correction = Correction(farthest=tuple(farthest.tolist()))
    assert torch.equal(correction.keep(claims), expected[f"token.distance.q{q}.mask"])
    assert torch.equal(correction.removed(claims), expected[f"token.distance.q{q}.removed"])


def quantiles(values: torch.Tensor, scores: torch.Tensor, q: float) -> torch.Tensor:
    """Of the values [n, H, W] of the patches that belong to each part."""
    assigned = scores.argmax(dim=1)
    own = [values[assigned == part].double().numpy() for part in range(scores.shape[1] - 1)]
    return torch.tensor([np.quantile(some, q) for some in own], dtype=torch.float64)


@pytest.mark.parametrize("tag", [*(f"q{q}" for q in QUANTILES), "noop"])
def test_published_token_removal(stage1, stage2, inputs, seen, tag):
    expected, (parts, products) = golden("masks.npz"), seen
    lowest = expected[f"token.ip_threshold_{tag}"]
    if tag != "noop":
        few = int(expected["token.calibration_images"])
        own = products.gather(1, PartAssignment.of(parts, parts.scores).part[:, None])[:few, 0]
        torch.testing.assert_close(quantiles(own, parts.scores[:few], 1 - float(tag[1:])), lowest, **CLOSE)
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
