"""Stage 1 by clustering: the foreground is found without labels, masks or training, whatever the seed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.where.foreground import (
    border_ratio,
    find_foreground,
    fit_logistic,
    kmeans,
    learn_foreground,
    otsu,
)

SIDE, GRID = 96, 12


@pytest.fixture(scope="module")
def scene():
    """Red or yellow discs on green or blue ground: patch tokens are mean colours, so clusters are colours."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images, masks = [], []
    for i in range(24):
        centre = 30 + 36 * torch.rand(2, generator=generator)
        mask = (y - centre[0]).square() + (x - centre[1]).square() < (14 + 6 * (i % 3)) ** 2
        ground = torch.tensor([(0.1, 0.6, 0.2), (0.1, 0.3, 0.7)][i % 2]).view(3, 1, 1)
        upper, lower = (torch.tensor(c).view(3, 1, 1) for c in ((0.9, 0.1, 0.1), (0.9, 0.8, 0.1)))
        disc = torch.where((y < centre[0])[None], upper, lower)
        noise = 0.03 * torch.randn(3, SIDE, SIDE, generator=generator)
        images.append((torch.where(mask, disc, ground) + noise).clamp(0, 1))
        masks.append(mask)
    images = torch.stack(images)
    tokens = F.adaptive_avg_pool2d(images, GRID)
    return images, torch.stack(masks), torch.cat([tokens, tokens.square()], dim=1)


def iou(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one & other).flatten(1).sum(1) / (one | other).flatten(1).sum(1).clamp(min=1)).mean())


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_object_is_found_with_any_number_of_parts_and_any_seed(scene, parts, seed):
    images, masks, features = scene
    found = find_foreground(features, images, seed=seed)
    assert iou(found.masks, masks) > 0.8
    start = learn_foreground(features, found.masks, parts, seed=seed)
    logit = torch.einsum("ndhw,d->nhw", features, start.gate[:-1]) + start.gate[-1]
    truth = F.adaptive_avg_pool2d(masks[:, None].float(), GRID)[:, 0] >= 0.5
    assert iou(logit > 0, truth) > 0.8
    assert start.prototypes.shape == (parts, features.shape[1])
    assert abs(start.coverage - float(truth.float().mean())) < 0.05


def test_the_foreground_does_not_depend_on_the_number_of_parts(scene):
    images, _, features = scene
    found = find_foreground(features, images, seed=3)
    gates = [learn_foreground(features, found.masks, parts, seed=3).gate for parts in (1, 4, 8)]
    assert all(torch.equal(gates[0], gate) for gate in gates)


def test_a_selector_with_coarser_features_learns_the_same_foreground(scene):
    """Of 9 cells a side, which do not divide the image evenly."""
    images, masks, features = scene
    found = find_foreground(features, images, seed=1)
    tokens = F.adaptive_avg_pool2d(images, 9)
    coarse = torch.cat([tokens, tokens.square()], dim=1)
    start = learn_foreground(coarse, found.masks, 2, seed=1)
    logit = torch.einsum("ndhw,d->nhw", coarse, start.gate[:-1]) + start.gate[-1]
    truth = F.adaptive_avg_pool2d(masks[:, None].float(), 9)[:, 0] >= 0.5
    assert iou(logit > 0, truth) > 0.8


def test_the_same_seed_gives_the_same_start(scene):
    images, _, features = scene
    found = [find_foreground(features, images, seed=5) for _ in range(2)]
    assert torch.equal(found[0].masks, found[1].masks)
    one, two = (learn_foreground(features, each.masks, 3, seed=5) for each in found)
    assert torch.equal(one.gate, two.gate)
    assert torch.equal(one.prototypes, two.prototypes)


def test_patches_are_divided_by_otsus_threshold_of_their_mean_border_ratio_over_all_starts():
    """Of noise, where every start of k-means finds other clusters."""
    generator = torch.Generator().manual_seed(0)
    features, images = (torch.rand(6, 3, side, side, generator=generator) for side in (8, 32))
    found = find_foreground(features, images, clusters=5, starts=3, seed=2)
    tokens, each = F.normalize(features.permute(0, 2, 3, 1).reshape(-1, 3), dim=1), []
    for start in (6, 7, 8):
        cluster = kmeans(tokens, 5, start)
        each.append(border_ratio(cluster, 5, (6, 8, 8)).clamp(max=1.0)[cluster])
    mean = torch.stack(each).mean(dim=0)
    assert found.threshold == pytest.approx(otsu(mean), abs=1e-5)
    assert found.border_ratio == pytest.approx(np.quantile(mean, np.linspace(0, 1, 11)), abs=2e-3)
    assert abs(found.threshold - 0.5) > 0.01
    assert abs(found.threshold - otsu(each[0])) > 0.01


def test_border_ratio_is_one_for_chance_and_less_for_what_is_inside():
    cluster = torch.zeros(2, 5, 5, dtype=torch.int64)
    cluster[:, 1:4, 1:4] = 1
    ratio = border_ratio(cluster.flatten(), 3, (2, 5, 5))
    assert ratio[1] == 0
    assert ratio[0] == pytest.approx(25 / 16)


def test_otsu_separates_two_groups_whatever_their_sizes():
    values = torch.tensor([0.1, 0.2, 0.15, 0.9, 1.0, 1.0, 0.95])
    assert 0.2 < otsu(values) < 0.9
    assert 0.2 < otsu(values.repeat_interleave(torch.tensor([1, 2, 1, 30, 30, 30, 6]))) < 0.9


def test_otsu_finds_nothing_below_where_all_values_are_equal():
    assert otsu(torch.full((5,), 0.7, dtype=torch.float64)) == 0.7


def test_kmeans_finds_separated_clusters():
    generator = torch.Generator().manual_seed(1)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = (centres[:, None] + torch.randn(3, 40, 2, generator=generator)).flatten(0, 1)
    found = kmeans(points, 3, seed=0).view(3, 40)
    assert all(len(row.unique()) == 1 for row in found)
    assert len(found.unique()) == 3


def test_logistic_regression_recovers_a_linear_rule():
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(2)) * 3 + 1
    target = (x[:, 0] - 2 * x[:, 2] > 0.5).float()
    fit = fit_logistic(x, target)
    assert (((x @ fit[:-1] + fit[-1]) > 0).float() == target).float().mean() > 0.99
