"""Token removal by distance, as in iFAM's paper."""

import numpy as np
import pytest
import torch

from sightline.where.corrections import Correction, PartAssignment

from .conftest import CLOSE, golden

QUANTILES = ("0.58", "0.9", "0.95", "0.97", "0.99")


@pytest.fixture
def seen(stage1, inputs):
    with torch.no_grad():
        parts = stage1.discover(inputs["inputs.images"])
        return parts, stage1.inner_products(parts.features)


def test_patches_are_assigned_to_the_expected_parts(seen):
    expected = golden("masks.npz")
    assert torch.equal(seen[0].scores.argmax(dim=1), expected["token.assignment"])
    assignment = PartAssignment.of(seen[0], seen[0].scores)
    own = expected["token.distance"].gather(1, assignment.part[:, None])[:, 0]
    torch.testing.assert_close(assignment.distances, own, **CLOSE)
    torch.testing.assert_close(seen[1], expected["token.inner_products"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("q", QUANTILES)
def test_removed_tokens_become_background(seen, q):
    expected, (parts, _) = golden("masks.npz"), seen
    few, assignment = int(expected["token.calibration_images"]), PartAssignment.of(parts, parts.scores)
    max_distances = expected[f"token.distance_threshold_q{q}"]
    torch.testing.assert_close(
        quantiles(assignment.distances[:few], parts.scores[:few], float(q)), max_distances, **CLOSE
    )
    correction = Correction(max_distances=tuple(max_distances.tolist()))
    assert torch.equal(correction.keep(assignment), expected[f"token.distance.q{q}.mask"])
    assert torch.equal(correction.removed(assignment), expected[f"token.distance.q{q}.removed"])


def quantiles(values: torch.Tensor, scores: torch.Tensor, q: float) -> torch.Tensor:
    """Per part, the quantile of the values [n, H, W] over its patches."""
    assigned = scores.argmax(dim=1)
    own = [values[assigned == part].double().numpy() for part in range(scores.shape[1] - 1)]
    return torch.tensor([np.quantile(some, q) for some in own], dtype=torch.float64)
