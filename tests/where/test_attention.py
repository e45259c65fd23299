"""CLS attention maps, by head and by block."""

import math

import pytest
import torch

from sightline.where.attention import AttentionSight, aggregate_heads, attention_maps_and_shares, cls_attention_map

from ..conftest import small_vit


@pytest.fixture
def images(generator) -> torch.Tensor:
    return torch.rand(3, 3, 32, 32, generator=generator)


def rows_of(vit, images, layer: int) -> torch.Tensor:
    """[B, heads, N], computed independently from the full attention matrices."""
    return vit(images, attention=[layer]).attention[0][:, :, 0, vit.prefix :]


def entropies(per_head: torch.Tensor) -> torch.Tensor:
    shares = per_head / per_head.sum(dim=2, keepdim=True)
    return -(shares * shares.log()).sum(dim=2) / math.log(per_head.shape[2])


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("heads", ["mean", "entropy", "lowest", "max", 0, 3])
def test_heads_are_aggregated_before_patches_are_renormalised(images, layer, heads):
    vit = small_vit(classes=0)
    per_head = rows_of(vit, images, layer)
    weights = 1 - entropies(per_head)
    lowest = entropies(per_head).argmin(dim=1)
    expected = {
        "mean": per_head.mean(dim=1),
        "entropy": (per_head * weights[..., None]).sum(dim=1),
        "lowest": per_head[torch.arange(3), lowest],  # a quarter of four heads
        "max": per_head.max(dim=1).values,
    }.get(heads, per_head[:, heads] if isinstance(heads, int) else None)
    expected = expected / expected.sum(dim=1, keepdim=True)
    found = cls_attention_map(vit, images, layer, heads)
    torch.testing.assert_close(found.flatten(1), expected)
    torch.testing.assert_close(found.sum(dim=(1, 2)), torch.ones(3))


def test_uniform_heads_have_equal_weights():
    even = torch.full((2, 3, 16), 1 / 20)
    torch.testing.assert_close(aggregate_heads(even, "entropy"), even[:, 0])


def test_unknown_heads_are_errors():
    per_head = torch.ones(1, 4, 9)
    with pytest.raises(ValueError, match="4 heads, so no head 4"):
        aggregate_heads(per_head, 4)
    with pytest.raises(ValueError, match="'sum'"):
        aggregate_heads(per_head, "sum")


def test_attention_shares_of_patches_registers_and_cls_sum_to_one(images):
    vit = small_vit(classes=0)
    _, shares = attention_maps_and_shares(vit, images, [-1], ["mean"])
    assert shares.shape == (3, 3, 3)
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(3, 3))
    full = vit(images, attention=[1]).attention[0][:, :, 0].mean(dim=1)
    torch.testing.assert_close(shares[:, 1, 1], full[:, 1:3].sum(dim=1))
    torch.testing.assert_close(shares[:, 1, 2], full[:, 0])
    _, without = attention_maps_and_shares(small_vit(classes=0, registers=0), images, [-1], ["mean"])
    assert (without[..., 1] == 0).all()


def test_patches_with_the_highest_attention_are_kept(images):
    vit = small_vit(classes=0)
    keep = AttentionSight(vit, 0.25, heads="max").look(images).keep.flatten(1)
    attention = cls_attention_map(vit, images, heads="max").flatten(1)
    assert (keep.sum(dim=1) == 4).all()
    assert all(attention[b, keep[b]].min() >= attention[b, ~keep[b]].max() for b in range(3))
