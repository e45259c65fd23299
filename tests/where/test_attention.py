"""The attention of CLS, head by head and block by block."""

import math

import pytest
import torch

from sightline.where.attention import AttentionSight, cls_attention_map, cls_attention_shares, joined

from ..conftest import small_vit


@pytest.fixture
def images(generator) -> torch.Tensor:
    return torch.rand(3, 3, 32, 32, generator=generator)


def rows_of(vit, images, layer: int) -> torch.Tensor:
    """[B, heads, N], from the full matrices: a way of its own."""
    return vit(images, attention=[layer]).attention[0][:, :, 0, vit.prefix :]


def entropies(per_head: torch.Tensor) -> torch.Tensor:
    shares = per_head / per_head.sum(dim=2, keepdim=True)
    return -(shares * shares.log()).sum(dim=2) / math.log(per_head.shape[2])


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("heads", ["mean", "entropy", "lowest", "max", 0, 3])
def test_heads_are_joined_first_and_patches_renormalised_then(images, layer, heads):
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


def test_renormalising_every_head_first_is_another_map(images):
    vit = small_vit(classes=0)
    per_head = rows_of(vit, images, -1)
    alike = (per_head / per_head.sum(dim=2, keepdim=True)).mean(dim=1)
    found = cls_attention_map(vit, images, each=True).flatten(1)
    torch.testing.assert_close(found, alike)
    assert (found - cls_attention_map(vit, images).flatten(1)).abs().max() > 1e-4


def test_the_number_of_sharpest_heads_can_be_said(generator):
    per_head = torch.rand(5, 4, 9, generator=generator).softmax(dim=2)
    torch.testing.assert_close(joined(per_head, "lowest", 4), per_head.mean(dim=1))
    order = entropies(per_head).argsort(dim=1)
    two = torch.stack([per_head[b, order[b, :2]].mean(dim=0) for b in range(5)])
    torch.testing.assert_close(joined(per_head, "lowest", 2), two)


def test_heads_that_are_all_uniform_count_alike():
    even = torch.full((2, 3, 16), 1 / 20)
    torch.testing.assert_close(joined(even, "entropy"), even[:, 0])


def test_what_is_not_there_is_said():
    per_head = torch.ones(1, 4, 9)
    with pytest.raises(ValueError, match="4 heads, so no head 4"):
        joined(per_head, 4)
    with pytest.raises(ValueError, match="'sum'"):
        joined(per_head, "sum")


def test_shares_of_patches_registers_and_cls_add_up(images):
    vit = small_vit(classes=0)
    shares = cls_attention_shares(vit, images)
    assert shares.shape == (3, 3, 3)
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(3, 3))
    full = vit(images, attention=[1]).attention[0][:, :, 0].mean(dim=1)
    torch.testing.assert_close(shares[:, 1, 1], full[:, 1:3].sum(dim=1))
    torch.testing.assert_close(shares[:, 1, 2], full[:, 0])
    assert (cls_attention_shares(small_vit(classes=0, registers=0), images)[..., 1] == 0).all()


def test_the_most_attended_patches_are_kept(images):
    vit = small_vit(classes=0)
    keep = AttentionSight(vit, 0.25, heads="max").look(images).keep.flatten(1)
    attention = cls_attention_map(vit, images, heads="max").flatten(1)
    assert (keep.sum(dim=1) == 4).all()
    assert all(attention[b, keep[b]].min() >= attention[b, ~keep[b]].max() for b in range(3))
