"""Multi-crop: crop geometry, agreement with Pillow, and determinism."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.augment import uniforms
from sightline.data.multicrop import DRAWS, MultiCrop, gaussian_matrix, random_boxes, resize_matrix
from sightline.datasets.toy_images import make_toy

PLAIN = MultiCrop(large=32, small=16, small_count=3, flip=0.0, jitter=0.0, grey=0.0, blur=(0.0, 0.0, 0.0), solarise=0.0)


def toy_images(count: int = 4, size: int = 64) -> torch.Tensor:
    return make_toy(count, size=size).images


def views_of(config: MultiCrop, images: torch.Tensor, *, seed: int = 0, epoch: int = 0, first: int = 0) -> tuple:
    return config(images, seed=seed, epoch=epoch, positions=torch.arange(first, first + len(images)))


def test_crops_are_where_their_boxes_are():
    """Blue encodes the row and red the column, so that a view shows where it was cropped."""
    ramp = (torch.arange(100).float() * 2 + 1).to(torch.uint8)  # twice the pixel's centre
    image = torch.stack(
        [ramp.expand(100, 100), torch.zeros(100, 100, dtype=torch.uint8), ramp[:, None].expand(100, 100)]
    )
    large, small = views_of(PLAIN, image[None])
    draws = uniforms(0, 0, torch.arange(1), 5 * len(DRAWS)).float().unflatten(1, (5, -1)).unbind(2)
    draws = dict(zip(DRAWS, draws, strict=True))
    for views, chosen, area in ((large, slice(0, 2), PLAIN.large_area), (small, slice(2, 5), PLAIN.small_area)):
        left, top, width, height = random_boxes({k: v[:, chosen] for k, v in draws.items()}, area)
        side = views.shape[-1]
        steps = (torch.arange(side) + 0.5) / side
        inner = slice(2, -2)  # at the edge of the image an antialiased pixel averages fewer pixels
        for k in range(views.shape[1]):
            across = 100 * (left[0, k] + width[0, k] * steps)
            down = 100 * (top[0, k] + height[0, k] * steps)
            assert torch.allclose(views[0, k, 0, 5] * 255 / 2, across, atol=0.6)
            assert torch.allclose((views[0, k, 0, 5] * 255 / 2)[inner], across[inner], atol=0.05)
            assert torch.allclose((views[0, k, 2, :, 5] * 255 / 2)[inner], down[inner], atol=0.05)


@pytest.mark.parametrize("window", [(0, 64), (10, 40), (3, 9)])
def test_the_resize_matrix_equals_pillows_antialiased_bilinear(window):
    image = toy_images(1)[0].permute(1, 2, 0).numpy()
    start, end = window
    box = (start, start, end, end)
    theirs = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR, box=box)).astype(float)
    matrix = resize_matrix(torch.tensor([float(start)]), torch.tensor([float(end - start)]), 64, 16)[0]
    ours = torch.einsum("sh,hwc,tw->stc", matrix, torch.tensor(image).float(), matrix)
    # Pillow reads no pixel outside the box, and rounds twice
    assert np.abs(ours.numpy() - theirs)[2:-2, 2:-2].max() <= 1.01


def test_flip():
    images = toy_images()
    plain, mirrored = (views_of(replace(PLAIN, flip=flip), images) for flip in (0.0, 1.0))
    for one, other in zip(plain, mirrored, strict=True):
        assert torch.allclose(one.flip(-1), other, atol=1e-5)


def test_the_blur_matrix_is_normalised_and_the_identity_without_blur():
    weights = gaussian_matrix(torch.tensor([0.0, 0.5, 3.0]), 16)
    assert torch.equal(weights[0], torch.eye(16))
    assert torch.allclose(weights.sum(-1), torch.ones(3, 16))
    assert weights[1, 8, 8] > weights[2, 8, 8]


def test_grey_views_have_no_colour_and_colours_stay_in_range():
    images = toy_images(8)
    large, small = views_of(replace(PLAIN, jitter=1.0, grey=1.0), images)
    for views in (large, small):
        assert (views.amax(2) - views.amin(2)).max() < 1e-3
    for views in views_of(replace(MultiCrop(), large=32, small=16), images):
        assert views.min() >= 0
        assert views.max() <= 1


def test_without_jitter_colours_are_unchanged():
    flat = torch.tensor([200, 30, 90], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 64, 64)
    for views in views_of(PLAIN, flat):
        assert torch.allclose(views * 255, torch.tensor([200.0, 30, 90]).view(3, 1, 1).expand_as(views), atol=0.01)


def test_solarisation_affects_the_second_global_crop_only():
    images = toy_images()
    (before, small), (after, small_after) = (views_of(replace(PLAIN, solarise=p), images) for p in (0.0, 1.0))
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(torch.where(before[:, 1] >= 0.5, 1 - before[:, 1], before[:, 1]), after[:, 1])
    assert torch.equal(small, small_after)


def test_a_view_depends_on_seed_epoch_and_position_only():
    config, images = MultiCrop(large=32, small=16), toy_images(6)
    whole = views_of(config, images)
    part = views_of(config, images[2:5], first=2)
    for all_views, some in zip(whole, part, strict=True):
        assert torch.allclose(all_views[2:5], some, atol=1e-6)
    for other in (
        views_of(config, images, seed=1),
        views_of(config, images, epoch=1),
        views_of(config, images, first=6),
    ):
        assert not torch.allclose(whole[0], other[0], atol=1e-2)


def test_shapes_without_local_crops():
    large, small = views_of(MultiCrop(large=24, small=8, small_count=0), toy_images(3))
    assert large.shape == (3, 2, 3, 24, 24)
    assert small.shape == (3, 0, 3, 8, 8)
