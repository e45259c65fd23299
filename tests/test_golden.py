"""The masked ViT against numbers that the published iFAM code produced (stage 2 only)."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.vit import ViTConfig
from sightline.weights import load_backbone

from .conftest import PLAIN, shared

CONFIG = ViTConfig(
    width=48, depth=3, heads=3, patch=14, grid=(6, 6), registers=4, layer_scale=1.0, head_norm=True, input=PLAIN
)
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def stage2():
    return load_backbone(shared("golden", "ifam_tiny.safetensors"), prefix="stage_2.", config=CONFIG)


@pytest.fixture(scope="module")
def inputs():
    return load_file(shared("golden", "ifam_tiny.safetensors"))


def golden(name: str):
    with np.load(shared("golden", name)) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


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
        gradient = expected["soft.uniform_random.grad_mask"]
        assert (weights.grad.flatten(1) - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7


def test_straight_through_composed_with_weighted_attention(stage2, inputs):
    """Hard forward, gradient of the sum of foreground shares: iFAM's papers, and what its code never ran."""
    expected = golden("straight_through.npz")
    logits = expected["logits"].clone().requires_grad_()
    shares = logits.softmax(dim=1)
    foreground, background = shares[:, :-1], shares[:, -1]
    hard = (foreground.max(dim=1).values >= background).float()
    keep = hard + foreground.sum(dim=1) - foreground.sum(dim=1).detach()
    keep.retain_grad()
    out = stage2(inputs["inputs.images"], keep)
    torch.testing.assert_close(out.logits, expected["composed.stage2_logits"], **CLOSE)
    torch.nn.functional.cross_entropy(out.logits, inputs["inputs.targets"]).backward()
    for ours, name in ((keep.grad.flatten(1), "grad_mask"), (logits.grad, "grad_logits")):
        gradient = expected[f"composed.{name}"]
        assert (ours - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7
