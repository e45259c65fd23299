"""The losses that shape parts, against numbers that the published code produced."""

import pytest
import torch

from sightline.data.augment import Affine, unwarp_affine
from sightline.where.part_losses import (
    background,
    concentration,
    entropy,
    equivariance,
    orthogonality,
    presence,
    total_variation,
)

from .conftest import LOSS, golden, gradients_agree

CASES = ["model", "rand", "k1", "uniform", "onehot", "onehot_part_absent", "onehot_no_bg", "all_bg", "orthogonal_feat"]


def as_published(probabilities):
    """Rows in units of W and columns in units of H."""
    return concentration(probabilities, unit=(probabilities.shape[3], probabilities.shape[2]))


OF_SHARES = {
    "total_variation": total_variation,
    "entropy": entropy,
    "presence_fg": presence,
    "presence_bg": background,
    "concentration": as_published,
}
OF_VECTORS = {"orthogonality_parts": orthogonality, "orthogonality_transposed": lambda v: orthogonality(v.mT)}


def of_case(case):
    return {k.removeprefix(f"{case}."): v for k, v in golden("losses.npz").items() if k.startswith(f"{case}.")}


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    expected = of_case(case)
    ours = {name: loss(expected["maps"]) for name, loss in OF_SHARES.items()}
    ours |= {name: loss(expected["features"]) for name, loss in OF_VECTORS.items()}
    ours["equivariance"] = equivariance(expected["maps"], expected["equiv_maps_inverted"])
    for name, value in ours.items():
        theirs = expected[f"loss.{name}"]
        if theirs.isnan():
            assert name == "concentration"
            assert value.isfinite()
        else:
            torch.testing.assert_close(value, theirs, **LOSS, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", ["model", "rand", "k1", "orthogonal_feat"])
def test_gradients(case):
    expected = of_case(case)

    def agrees(loss, start, name):
        start = start.clone().requires_grad_()
        loss(start).backward()
        return gradients_agree(start.grad, expected[f"grad.{name}"])

    for name, loss in OF_SHARES.items():
        assert agrees(lambda logits, loss=loss: loss(logits.softmax(dim=1)), expected["logits"], name), name
    for name, loss in OF_VECTORS.items():
        assert agrees(loss, expected["features"], name), name
    moved = expected["equiv_maps_inverted"]
    assert agrees(lambda logits: equivariance(logits.softmax(dim=1), moved), expected["logits"], "equivariance")


@pytest.mark.parametrize("case", ["model", "rand", "k1", "orthogonal_feat"])
def test_equivariance_has_a_gradient_through_the_transformed_maps_too(case):
    expected = of_case(case)
    angle, x, y, scale, h, w = expected["transform"].tolist()
    moved = expected["equiv_maps"].clone().requires_grad_()
    equivariance(expected["maps"], unwarp_affine(moved, Affine(angle, x, y, scale), (int(h), int(w)))).backward()
    assert gradients_agree(moved.grad, expected["grad.equivariance_wrt_equiv_maps"])


def test_offsets_are_in_units_of_their_own_side_unless_asked_otherwise():
    maps = of_case("rand")["maps"]
    assert not torch.isclose(concentration(maps), as_published(maps))
    torch.testing.assert_close(concentration(maps), concentration(maps.mT))
