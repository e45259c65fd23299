"""Geometric augmentation: image, mask, boxes and keypoints move together, within the configured ranges."""

from dataclasses import replace

import pytest
import torch

from sightline.data.augment import PRESETS, Affine, AnnotatedImages, warp_affine

from .augmenting import COLOUR, OFF, augmented, overlap, points, squares

GEOMETRY = {
    "resize": OFF,
    "centre crop": replace(OFF, crop=0.8),
    "random crop": replace(OFF, crop=0.8, random_crop=True),
    "flip": replace(OFF, flip=1.0),
    "rotate": replace(OFF, degrees=180.0),
    "translate": replace(OFF, translate=0.15),
    "zoom": replace(OFF, scale=(0.6, 1.5)),
    "random resized crop": replace(OFF, random_resized_crop=(0.3, 1.0)),
    "all at once": replace(OFF, flip=0.5, degrees=90.0, translate=0.1, scale=(0.8, 1.2), crop=0.9, random_crop=True),
    "bicubic": replace(OFF, degrees=30.0, random_resized_crop=(0.5, 1.0), resample="bicubic"),
}


# Joint transformation


@pytest.mark.parametrize("source", [(96, 96), (96, 130), (141, 88)])
@pytest.mark.parametrize("name", GEOMETRY)
def test_a_square_stays_under_its_mask_box_and_keypoint(name, source):
    given = squares(24, source)
    seen = augmented(GEOMETRY[name], given, (112, 104))
    red = seen.images[:, 0] > 0.5
    red &= seen.images[:, 2] < 0.5
    visible = seen.masks.flatten(1).sum(1) > 100
    assert visible.float().mean() > 0.7
    assert (overlap(red, seen.masks)[visible] > 0.9).all()
    for mask, (left, top, right, bottom) in zip(seen.masks[visible], seen.boxes[visible, 0], strict=True):
        y, x = mask.nonzero().T
        assert left - 1.5 <= x.min()
        assert x.max() + 1 <= right + 1.5
        assert top - 1.5 <= y.min()
        assert y.max() + 1 <= bottom + 1.5
        if GEOMETRY[name].degrees == 0:
            assert len(y) / ((right - left) * (bottom - top)) > 0.85
    x, y, shown = seen.keypoints[:, 0].T
    for mask, column, row in zip(seen.masks[shown > 0], x[shown > 0], y[shown > 0], strict=True):
        assert mask[row.round().int(), column.round().int()]


def test_flip(toys):
    seen = augmented(replace(OFF, flip=1.0), toys)
    torch.testing.assert_close(seen.images, toys.images.flip(3) / 255, rtol=0, atol=1e-4)
    assert torch.equal(seen.masks, toys.masks.flip(2))
    torch.testing.assert_close(seen.boxes[:, 0], torch.tensor([[24.0, 9, 59, 50]]).expand(12, 4))
    torch.testing.assert_close(seen.keypoints[..., 0], 63 - toys.keypoints[..., 0])
    assert torch.equal(seen.keypoints[..., 1:], toys.keypoints[..., 1:])


def test_rotation_by_90_degrees_is_clockwise():
    image = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    turned = warp_affine(image, Affine(angle=90.0))
    torch.testing.assert_close(turned, image.rot90(-1, (2, 3)), rtol=0, atol=1e-4)


def test_random_crops_copy_pixels_and_cover_all_positions():
    x, y = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="xy")
    given = AnnotatedImages(torch.stack([x, y, x * 0]).byte().expand(400, 3, 64, 64))
    seen = augmented(replace(OFF, crop=0.75, random_crop=True), given, (48, 48)).images * 255
    corner = seen[:, :2, 0, 0]
    assert (corner - corner.round()).abs().max() < 1e-2
    torch.testing.assert_close(seen[:, :2, 47, 47], corner + 47, rtol=0, atol=1e-2)
    assert abs(torch.corrcoef(corner.T)[0, 1]) < 0.15
    assert corner.amin(0).round().tolist() == [0, 0]
    assert corner.amax(0).round().tolist() == [16, 16]


def test_boxes_cropped_away_become_nan():
    gone = [[0.0, 0.0, 5.0, 5.0], [0.0, 20.0, 16.0, 40.0], [20.0, 48.0, 40.0, 60.0], [torch.nan] * 4]
    box = torch.tensor([[[30.0, 20.0, 60.0, 40.0], *gone]])
    seen = augmented(replace(OFF, crop=0.5), AnnotatedImages(torch.zeros(1, 3, 64, 64), boxes=box), (32, 32)).boxes
    assert seen[0, 0].tolist() == [14, 4, 32, 24]
    assert seen[0, 1:].isnan().all()


def test_keypoints_cropped_away_become_invisible():
    outside = [[3.0, 40.0, 1.0], [15.4, 16.0, 1.0], [47.6, 16.0, 1.0], [20.0, 15.4, 1.0], [20.0, 47.6, 1.0]]
    inside = [[16.0, 16.0, 1.0], [15.6, 15.6, 1.0], [47.4, 47.4, 1.0]]
    keypoints = torch.tensor([[*outside, *inside, [20.0, 20.0, 0.0]]])
    seen = augmented(
        replace(OFF, crop=0.5), AnnotatedImages(torch.zeros(1, 3, 64, 64), keypoints=keypoints), (32, 32)
    ).keypoints
    torch.testing.assert_close(seen[0, :, :2], keypoints[0, :, :2] - 16)
    assert seen[0, :, 2].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("colour", [(0.1, 0.9, 0.3), (0.0, 0.0, 0.0)])
def test_the_area_outside_has_exactly_the_fill_colour(colour, toys):
    config = replace(COLOUR["planckian"], degrees=180.0, brightness=0.4, scale=(0.5, 0.6), fill=colour)
    seen = augmented(config, toys)
    corners = seen.images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert torch.equal(corners, torch.tensor(colour)[:, None].expand(12, 3, 4))
    assert not seen.masks[:, 0].any()


def test_a_zoomed_out_image_ends_at_its_edge():
    white = AnnotatedImages(torch.full((1, 3, 64, 64), 255, dtype=torch.uint8), torch.ones(1, 64, 64, dtype=torch.bool))
    seen = augmented(replace(OFF, scale=(0.5, 0.5), fill=(0.0, 0.0, 0.0)), white)
    expected = torch.zeros(1, 64, 64, dtype=torch.bool)
    expected[:, 16:48, 16:48] = True
    assert torch.equal(seen.images, expected[:, None].expand(1, 3, 64, 64).float())
    assert torch.equal(seen.masks, expected)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_a_resized_crop_never_shows_the_fill_colour(resample):
    given = AnnotatedImages(torch.full((200, 3, 40, 64), 255, dtype=torch.uint8))
    seen = augmented(replace(OFF, random_resized_crop=(0.08, 1.0), fill=(0, 0, 0), resample=resample), given, (70, 60))
    assert seen.images.min() > 1 - 1e-5


@pytest.mark.parametrize("config", [OFF, replace(OFF, random_resized_crop=(1.0, 1.0))], ids=["resize", "resized crop"])
def test_shrinking_does_not_alias(config):
    board = (torch.arange(400)[:, None] + torch.arange(400)) % 2
    seen = augmented(config, AnnotatedImages(255 * board.byte().expand(1, 3, 400, 400)), (56, 56)).images
    assert (seen - 0.5).abs().max() < 0.05


def test_the_sampling_grid_is_not_rounded_under_autocast(toys):
    with torch.autocast("cpu", torch.bfloat16):
        seen = augmented(PRESETS["imagenet"], toys)
    torch.testing.assert_close(seen.images, augmented(PRESETS["imagenet"], toys).images, rtol=0, atol=1e-6)


# Ranges


def test_rotation_zoom_and_translation_fill_their_ranges():
    config = replace(OFF, degrees=30.0, translate=0.2, scale=(0.8, 1.3))
    middle, right = augmented(config, points(400, (39.5, 29.5), (49.5, 29.5))).keypoints.unbind(1)
    arm = (right - middle)[:, :2]
    for measured, low, high in (
        (torch.atan2(arm[:, 1], arm[:, 0]).rad2deg(), -30, 30),
        (arm.norm(dim=1) / 10, 0.8, 1.3),
        (middle[:, 0] - 39.5, -16, 16),
        (middle[:, 1] - 29.5, -12, 12),
    ):
        slack = 0.02 * (high - low)
        assert low - 1e-6 <= measured.min() < low + slack
        assert high - slack < measured.max() <= high + 1e-6
        assert abs(measured.mean() - (low + high) / 2) < 0.05 * (high - low)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_the_flip_probability(probability):
    seen = augmented(replace(OFF, flip=probability), points(400, (0, 5))).keypoints[:, 0, 0]
    assert abs((seen > 40).double().mean() - probability) < 0.07
    if probability in (0.0, 1.0):
        assert len(seen.unique()) == 1


@pytest.mark.parametrize(("source", "size"), [((60, 60), (32, 32)), ((60, 80), (32, 48)), ((40, 200), (32, 32))])
def test_resized_crops_keep_to_area_aspect_ratio_and_image(source, size):
    corners = torch.tensor([[0.0, 0.0, 1.0], [source[1], source[0], 1.0]], dtype=torch.float64) - 0.5
    given = AnnotatedImages(torch.zeros(400, 3, *source, dtype=torch.uint8), keypoints=corners.expand(400, 2, 3))
    first, last = (
        augmented(replace(OFF, random_resized_crop=(0.2, 0.9)), given, size).keypoints[..., :2] + 0.5
    ).unbind(1)
    enlarged = (last - first) / torch.tensor([source[1], source[0]])
    width, height = (torch.tensor([size[1], size[0]]) / enlarged).T
    start = -first / enlarged
    assert start.min() > -1e-6
    assert (start + torch.stack([width, height], 1) - torch.tensor([source[1], source[0]])).max() < 1e-6
    area, ratio = width * height / (source[0] * source[1]), width / height
    assert ratio.min() > 3 / 4 - 1e-6
    assert 1.2 < ratio.max() < 4 / 3 + 1e-6
    assert area.max() < 0.9 + 1e-6
    if source[1] < 2 * source[0]:
        assert ratio.min() < 0.85
        assert area.min() > 0.2 - 1e-6
        assert area.max() > 0.85
        assert abs(area.mean() - 0.55) < 0.03
        room = torch.tensor([source[1], source[0]]) - torch.stack([width, height], 1)
        assert abs(torch.corrcoef((start / room).T)[0, 1]) < 0.15
