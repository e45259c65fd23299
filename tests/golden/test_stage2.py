"""The masked ViT against numbers that the published iFAM code produced."""

import pytest
import torch
import torch.nn.functional as F

from sightline.where.parts import straight_through

from .conftest import CLOSE, golden, gradients_agree


@pytest.mark.parametrize("hide", ["removal", "mask"])
@pytest.mark.parametrize("case", ["random40", "all", "empty", "mixed"])
@torch.no_grad()
def test_hard_masks(stage2, inputs, case, hide):
    expected = golden("stage2.npz")
    keep = expected[f"{case}.mask"].view(-1, 6, 6)
    out = stage2(inputs["inputs.images"], keep, hide=hide)
    for suffix in ("", "_dense"):
        torch.testing.assert_close(out.cls, expected[f"{case}.cls{suffix}"], **CLOSE)
        torch.testing.assert_close(out.logits, expected[f"{case}.logits{suffix}"], **CLOSE)
    torch.testing.assert_close(stage2.fc_norm(out.cls), expected[f"{case}.cls_fc_norm"], **CLOSE)


@pytest.mark.parametrize("case", ["uniform_random", "from_maps", "with_exact_0_and_1"])
def test_soft_masks(stage2, inputs, case):
    expected = golden("stage2.npz")
    weights = expected[f"soft.{case}.mask"].view(-1, 6, 6).requires_grad_()
    out = stage2(inputs["inputs.images"], weights)
    assert out.hide == "weighted"
    torch.testing.assert_close(out.cls, expected[f"soft.{case}.cls"], **CLOSE)
    torch.testing.assert_close(out.logits, expected[f"soft.{case}.logits"], **CLOSE)
    if case == "uniform_random":
        (out.logits * expected["soft.uniform_random.upstream_logits"]).sum().backward()
        assert gradients_agree(weights.grad.flatten(1), expected["soft.uniform_random.grad_mask"])


def test_straight_through_composed_with_weighted_attention(stage2, inputs):
    """Hard forward, gradient of the sum of foreground probabilities: iFAM's papers, and what its code never ran."""
    expected = golden("straight_through.npz")
    logits = expected["logits"].clone().requires_grad_()
    keep = straight_through(logits)
    keep.retain_grad()
    assert torch.equal(keep.flatten(1), expected["composed.mask"])
    out = stage2(inputs["inputs.images"], keep)
    torch.testing.assert_close(out.logits, expected["composed.stage2_logits"], **CLOSE)
    F.cross_entropy(out.logits, inputs["inputs.targets"]).backward()
    assert gradients_agree(keep.grad.flatten(1), expected["composed.grad_mask"])
    assert gradients_agree(logits.grad, expected["composed.grad_logits"])
