"""Augmentation: what moves moves together, chance comes from (seed, epoch, index) alone, colours leave places alone."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from safetensors.torch import load_file

from sightline.data.augment import (
    PRESETS,
    Affine,
    Augment,
    Pictures,
    random_affine,
    uniforms,
    unwarp,
    warp,
)
from sightline.data.colours import OPERATIONS, OTHER, illuminants
from sightline.data.images import mask_to_tensor, to_tensor
from sightline.data.toy import make_toy
from sightline.errors import UserError
from sightline.vit import Input

from ..conftest import shared

OFF = Augment(flip=0.0)
MANY = torch.arange(400)
GEOMETRY = {
    "resize": OFF,
    "centre crop": replace(OFF, crop=0.8),
    "random crop": replace(OFF, crop=0.8, random_crop=True),
    "flip": replace(OFF, flip=1.0),
    "turn": replace(OFF, degrees=180.0),
    "move": replace(OFF, translate=0.15),
    "zoom": replace(OFF, scale=(0.6, 1.5)),
    "random resized crop": replace(OFF, random_resized_crop=(0.3, 1.0)),
    "all at once": replace(OFF, flip=0.5, degrees=90.0, translate=0.1, scale=(0.8, 1.2), crop=0.9, random_crop=True),
    "bicubic": replace(OFF, degrees=30.0, random_resized_crop=(0.5, 1.0), resample="bicubic"),
}
COLOUR = {
    "brightness": replace(OFF, brightness=0.4),
    "contrast": replace(OFF, contrast=0.4),
    "saturation": replace(OFF, saturation=0.8),
    "hue": replace(OFF, hue=0.5),
    "planckian": replace(OFF, planckian=1.0),
}


@pytest.fixture(scope="module")
def toys() -> Pictures:
    toy = make_toy(12, size=64, seed=5)
    boxes = torch.tensor([[[5.0, 9.0, 40.0, 50.0], [torch.nan] * 4]]).expand(12, 2, 4)
    return Pictures(toy.images, toy.masks, boxes, toy.keypoints)


def squares(count: int, canvas: tuple[int, int]) -> Pictures:
    """A red square on blue in each picture, somewhere near the middle, with all that is known about it."""
    h, w = canvas
    chance = np.random.default_rng(3)
    left, top, side = chance.integers(w // 3, w // 2, count), chance.integers(h // 3, h // 2, count), 24
    masks = torch.zeros(count, h, w, dtype=torch.bool)
    for mask, x, y in zip(masks, left, top, strict=True):
        mask[y : y + side, x : x + side] = True
    corners = torch.from_numpy(np.stack([left, top], 1)).float()
    images = torch.stack([masks, torch.zeros_like(masks), ~masks], 1).mul(255).byte()
    middle = torch.cat([corners + side / 2 - 0.5, torch.ones(count, 1)], 1)
    return Pictures(images, masks, torch.cat([corners, corners + side], 1)[:, None], middle[:, None])


def points(count: int, *places: tuple[float, float]) -> Pictures:
    keypoints = torch.tensor([[*place, 1.0] for place in places], dtype=torch.float64).expand(count, -1, 3)
    return Pictures(torch.zeros(count, 3, 60, 80, dtype=torch.uint8), keypoints=keypoints)


def go(how: Augment, pictures: Pictures, size=None, *, seed=0, epoch=0, indices=None) -> Pictures:
    how = replace(how, size=size or tuple(pictures.images.shape[2:]))
    return how(
        pictures, seed=seed, epoch=epoch, indices=torch.arange(len(pictures.images)) if indices is None else indices
    )


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a & b).sum((1, 2)) / (a | b).sum((1, 2)).clamp(min=1)


# Chance


def test_uniforms_are_splitmix64_worked_out_in_plain_integers():
    def scrambled(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert scrambled(0) == 0xE220A8397B1DCDAF  # SplitMix64's published first number for seed 0
    for seed, epoch, index in ((0, 0, 0), (-7, 12, 10**12), (2**63 + 5, 3, 77)):
        key = scrambled(scrambled(scrambled(seed % 2**64) ^ epoch) ^ index)
        expected = [(scrambled((key + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for i in range(5)]
        assert uniforms(seed, epoch, torch.tensor([index]), 5)[0].tolist() == expected


def test_uniforms_are_uniform_in_every_column():
    draws = uniforms(1, 2, torch.arange(20_000), 8)
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.stack([torch.histc(column, 20, 0, 1) for column in draws.T])
    chi_squared = ((counts - 1000) ** 2 / 1000).sum(1)
    assert (chi_squared < 44).all()  # 19 degrees of freedom: one in a thousand


def test_uniforms_of_neighbouring_seeds_epochs_indices_and_columns_are_unrelated():
    n = torch.arange(20_000)
    base = uniforms(1, 2, n, 2)
    others = [base[:, 1], base[:, 0].roll(1), uniforms(2, 2, n, 1)[:, 0], uniforms(1, 3, n, 1)[:, 0]]
    others += [uniforms(2, 1, n, 1)[:, 0], uniforms(1, 2, n + 1, 2)[:, 1], uniforms(1, 2, n ^ 1, 1)[:, 0]]
    related = torch.corrcoef(torch.stack([base[:, 0], *others]))
    assert (related - torch.eye(len(related))).abs()[0].max() < 0.03


def test_uniforms_do_not_depend_on_company_order_or_count():
    all_of_them = uniforms(9, 4, torch.arange(100), 6)
    some = torch.tensor([71, 3, 3, 99])
    assert torch.equal(uniforms(9, 4, some, 3), all_of_them[some, :3])


@pytest.mark.parametrize("name", PRESETS)
def test_a_picture_is_the_same_in_every_batch(name, toys):
    how = replace(PRESETS[name], size=(48, 40))
    together = how(toys, seed=3, epoch=2, indices=100 + torch.arange(12))
    some = torch.tensor([7, 0, 11, 4, 5])
    few = Pictures(toys.images[some], toys.masks[some], toys.boxes[some], toys.keypoints[some])
    apart = how(few, seed=3, epoch=2, indices=100 + some)
    torch.testing.assert_close(apart.images, together.images[some], rtol=0, atol=1e-6)
    assert torch.equal(apart.masks, together.masks[some])
    assert torch.equal(apart.boxes.nan_to_num(-1), together.boxes[some].nan_to_num(-1))
    assert torch.equal(apart.keypoints, together.keypoints[some])


@pytest.mark.parametrize("name", ["light", "published", "imagenet"])
def test_the_same_numbers_give_the_same_pictures_and_others_give_others(name, toys):
    first = go(PRESETS[name], toys, seed=1, epoch=1).images
    assert torch.equal(go(PRESETS[name], toys, seed=1, epoch=1).images, first)
    for other in ({"seed": 2, "epoch": 1}, {"seed": 1, "epoch": 2}, {"indices": 50 + torch.arange(12)}):
        changed = (go(PRESETS[name], toys, **{"seed": 1, "epoch": 1} | other).images != first).flatten(1).any(1)
        assert changed.float().mean() > 0.8


def test_a_setting_does_not_disturb_the_draws_of_another(toys):
    plain = go(replace(OFF, flip=0.5, degrees=20.0), toys)
    more = go(replace(OFF, flip=0.5, degrees=20.0, hue=0.1, planckian=0.8, randaugment=(0, 5.0)), toys)
    assert torch.equal(plain.masks, more.masks)
    assert torch.equal(plain.keypoints, more.keypoints)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PRESETS)
def test_a_seed_means_the_same_on_the_gpu(name, toys):
    there = Pictures(*(value.cuda() for value in (toys.images, toys.masks, toys.boxes, toys.keypoints)))
    here, seen = (go(PRESETS[name], pictures, (48, 40), seed=6) for pictures in (toys, there))
    assert seen.images.device.type == "cuda"
    assert (here.images - seen.images.cpu()).abs().mean() < 1e-4  # posterize may fall one level apart here and there
    assert (here.masks != seen.masks.cpu()).float().mean() < 1e-3
    torch.testing.assert_close(here.boxes, seen.boxes.cpu(), equal_nan=True)
    torch.testing.assert_close(here.keypoints, seen.keypoints.cpu())


def test_global_generators_are_left_alone(toys):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    go(PRESETS["imagenet"], toys)
    assert torch.equal(torch.get_rng_state(), before)


# What stays


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
def test_with_everything_off_nothing_changes(dtype, toys):
    images = toys.images if dtype == torch.uint8 else (toys.images / 255).to(dtype)
    same = go(OFF, replace(toys, images=images))
    assert same.images.dtype == torch.float32
    assert torch.equal(same.images, toys.images / 255 if dtype == torch.uint8 else images.float())
    assert torch.equal(same.masks, toys.masks)
    torch.testing.assert_close(same.boxes, toys.boxes, equal_nan=True)
    torch.testing.assert_close(same.keypoints, toys.keypoints)


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_comes_of_nothing(name, toys):
    none = Pictures(toys.images[:0], toys.masks[:0], toys.boxes[:0], toys.keypoints[:0])
    assert go(PRESETS[name], none, (40, 30)).images.shape == (0, 3, 40, 30)
    boxless = Pictures(toys.images, boxes=toys.boxes[:, :0], keypoints=toys.keypoints[:, :0])
    seen = go(PRESETS[name], boxless)
    assert (seen.boxes.shape, seen.keypoints.shape) == ((12, 0, 4), (12, 0, 3))


def test_what_is_not_given_does_not_come_back(toys):
    seen = go(PRESETS["published"], Pictures(toys.images))
    assert (seen.masks, seen.boxes, seen.keypoints) == (None, None, None)


@pytest.mark.parametrize("name", PRESETS)
def test_the_input_is_not_written_to(name, toys):
    given = replace(toys, images=toys.images / 255)
    kept = [value.clone() for value in (given.images, given.masks, given.boxes, given.keypoints)]
    go(PRESETS[name], given, (40, 40))
    for value, before in zip((given.images, given.masks, given.boxes, given.keypoints), kept, strict=True):
        torch.testing.assert_close(value, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("canvas", [(150, 150), (97, 140), (180, 121)])
@pytest.mark.parametrize("crop", [1.0, 0.875])
def test_evaluation_shows_what_reading_the_file_shows(canvas, crop):
    toy = make_toy(1, size=184, seed=1)
    image, mask = toy.images[0, :, : canvas[0], : canvas[1]], toy.masks[0, : canvas[0], : canvas[1]]
    expects = Input(size=(90, 84), crop=crop, resample="bilinear")
    seen = go(replace(PRESETS["none"], crop=crop), Pictures(image[None], mask[None]), (90, 84))
    file = to_tensor(Image.fromarray(image.permute(1, 2, 0).numpy()), expects)
    assert (seen.images[0] - file).abs().max() < 1.6 / 255  # Pillow rounds twice
    mask_file = mask_to_tensor(Image.fromarray(mask.numpy()), expects)
    assert overlap(seen.masks, mask_file[None]).item() > 0.99


@pytest.mark.parametrize("how", COLOUR.values(), ids=COLOUR)
def test_colours_leave_places_alone(how, toys):
    seen = go(how, toys)
    assert torch.equal(seen.masks, toys.masks)
    torch.testing.assert_close(seen.keypoints, toys.keypoints)
    assert ((seen.images - toys.images / 255).abs().amax((1, 2, 3)) > 0.01).float().mean() > 0.7


@pytest.mark.parametrize("name", PRESETS)
def test_values_stay_between_0_and_1(name, toys):
    seen = go(PRESETS[name], toys, (50, 45)).images
    assert seen.shape == (12, 3, 50, 45)
    assert seen.min() >= 0
    assert seen.max() <= 1


# What moves


@pytest.mark.parametrize("canvas", [(96, 96), (96, 130), (141, 88)])
@pytest.mark.parametrize("name", GEOMETRY)
def test_a_square_stays_under_its_mask_box_and_keypoint(name, canvas):
    given = squares(24, canvas)
    seen = go(GEOMETRY[name], given, (112, 104))
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


def test_a_flip_is_a_flip(toys):
    seen = go(replace(OFF, flip=1.0), toys)
    torch.testing.assert_close(seen.images, toys.images.flip(3) / 255, rtol=0, atol=1e-4)
    assert torch.equal(seen.masks, toys.masks.flip(2))
    torch.testing.assert_close(seen.boxes[:, 0], torch.tensor([[24.0, 9, 59, 50]]).expand(12, 4))
    torch.testing.assert_close(seen.keypoints[..., 0], 63 - toys.keypoints[..., 0])
    assert torch.equal(seen.keypoints[..., 1:], toys.keypoints[..., 1:])


def test_a_quarter_turn_is_clockwise():
    image = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    turned = warp(image, Affine(angle=90.0))
    torch.testing.assert_close(turned, image.rot90(-1, (2, 3)), rtol=0, atol=1e-4)


def test_random_crops_copy_pixels_and_reach_every_corner():
    x, y = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="xy")
    given = Pictures(torch.stack([x, y, x * 0]).byte().expand(400, 3, 64, 64))
    seen = go(replace(OFF, crop=0.75, random_crop=True), given, (48, 48)).images * 255
    corner = seen[:, :2, 0, 0]
    assert (corner - corner.round()).abs().max() < 1e-2
    torch.testing.assert_close(seen[:, :2, 47, 47], corner + 47, rtol=0, atol=1e-2)
    assert abs(torch.corrcoef(corner.T)[0, 1]) < 0.15
    assert corner.amin(0).round().tolist() == [0, 0]
    assert corner.amax(0).round().tolist() == [16, 16]


def test_boxes_that_leave_are_absent_and_absent_ones_stay_so():
    gone = [[0.0, 0.0, 5.0, 5.0], [0.0, 20.0, 16.0, 40.0], [20.0, 48.0, 40.0, 60.0], [torch.nan] * 4]
    box = torch.tensor([[[30.0, 20.0, 60.0, 40.0], *gone]])
    seen = go(replace(OFF, crop=0.5), Pictures(torch.zeros(1, 3, 64, 64), boxes=box), (32, 32)).boxes
    assert seen[0, 0].tolist() == [14, 4, 32, 24]
    assert seen[0, 1:].isnan().all()


def test_keypoints_that_leave_are_invisible_and_stay_exact():
    outside = [[3.0, 40.0, 1.0], [15.4, 16.0, 1.0], [47.6, 16.0, 1.0], [20.0, 15.4, 1.0], [20.0, 47.6, 1.0]]
    inside = [[16.0, 16.0, 1.0], [15.6, 15.6, 1.0], [47.4, 47.4, 1.0]]
    keypoints = torch.tensor([[*outside, *inside, [20.0, 20.0, 0.0]]])
    seen = go(replace(OFF, crop=0.5), Pictures(torch.zeros(1, 3, 64, 64), keypoints=keypoints), (32, 32)).keypoints
    torch.testing.assert_close(seen[0, :, :2], keypoints[0, :, :2] - 16)
    assert seen[0, :, 2].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("colour", [(0.1, 0.9, 0.3), (0.0, 0.0, 0.0)])
def test_what_is_uncovered_has_exactly_the_fill_colour(colour, toys):
    how = replace(COLOUR["planckian"], degrees=180.0, brightness=0.4, scale=(0.5, 0.6), fill=colour)
    seen = go(how, toys)
    corners = seen.images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert torch.equal(corners, torch.tensor(colour)[:, None].expand(12, 3, 4))
    assert not seen.masks[:, 0].any()


def test_the_picture_ends_where_it_ends():
    white = Pictures(torch.full((1, 3, 64, 64), 255, dtype=torch.uint8), torch.ones(1, 64, 64, dtype=torch.bool))
    seen = go(replace(OFF, scale=(0.5, 0.5), fill=(0.0, 0.0, 0.0)), white)
    expected = torch.zeros(1, 64, 64, dtype=torch.bool)
    expected[:, 16:48, 16:48] = True
    assert torch.equal(seen.images, expected[:, None].expand(1, 3, 64, 64).float())
    assert torch.equal(seen.masks, expected)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_a_resized_crop_never_shows_the_fill(resample):
    given = Pictures(torch.full((200, 3, 40, 64), 255, dtype=torch.uint8))
    seen = go(replace(OFF, random_resized_crop=(0.08, 1.0), fill=(0, 0, 0), resample=resample), given, (70, 60))
    assert seen.images.min() > 1 - 1e-5


@pytest.mark.parametrize("how", [OFF, replace(OFF, random_resized_crop=(1.0, 1.0))], ids=["resize", "resized crop"])
def test_shrinking_does_not_alias(how):
    board = (torch.arange(400)[:, None] + torch.arange(400)) % 2
    seen = go(how, Pictures(255 * board.byte().expand(1, 3, 400, 400)), (56, 56)).images
    assert (seen - 0.5).abs().max() < 0.05


def test_a_grid_is_not_rounded_under_autocast(toys):
    with torch.autocast("cpu", torch.bfloat16):
        seen = go(PRESETS["imagenet"], toys)
    torch.testing.assert_close(seen.images, go(PRESETS["imagenet"], toys).images, rtol=0, atol=1e-6)


# How far


def test_turns_zooms_and_moves_fill_their_ranges_and_keep_to_them():
    how = replace(OFF, degrees=30.0, translate=0.2, scale=(0.8, 1.3))
    middle, right = go(how, points(400, (39.5, 29.5), (49.5, 29.5))).keypoints.unbind(1)
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


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_as_many_are_flipped_as_asked_for(share):
    seen = go(replace(OFF, flip=share), points(400, (0, 5))).keypoints[:, 0, 0]
    assert abs((seen > 40).double().mean() - share) < 0.07
    if share in (0.0, 1.0):
        assert len(seen.unique()) == 1


@pytest.mark.parametrize(("canvas", "size"), [((60, 60), (32, 32)), ((60, 80), (32, 48)), ((40, 200), (32, 32))])
def test_resized_crops_keep_to_area_ratio_and_canvas(canvas, size):
    corners = torch.tensor([[0.0, 0.0, 1.0], [canvas[1], canvas[0], 1.0]], dtype=torch.float64) - 0.5
    given = Pictures(torch.zeros(400, 3, *canvas, dtype=torch.uint8), keypoints=corners.expand(400, 2, 3))
    first, last = (go(replace(OFF, random_resized_crop=(0.2, 0.9)), given, size).keypoints[..., :2] + 0.5).unbind(1)
    enlarged = (last - first) / torch.tensor([canvas[1], canvas[0]])
    width, height = (torch.tensor([size[1], size[0]]) / enlarged).T
    start = -first / enlarged
    assert start.min() > -1e-6
    assert (start + torch.stack([width, height], 1) - torch.tensor([canvas[1], canvas[0]])).max() < 1e-6
    area, ratio = width * height / (canvas[0] * canvas[1]), width / height
    assert ratio.min() > 3 / 4 - 1e-6
    assert 1.2 < ratio.max() < 4 / 3 + 1e-6
    assert area.max() < 0.9 + 1e-6
    if canvas[1] < 2 * canvas[0]:
        assert ratio.min() < 0.85
        assert area.min() > 0.2 - 1e-6
        assert area.max() > 0.85
        assert abs(area.mean() - 0.55) < 0.03
        room = torch.tensor([canvas[1], canvas[0]]) - torch.stack([width, height], 1)
        assert abs(torch.corrcoef((start / room).T)[0, 1]) < 0.15


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"flip": 1.5}, "flip 1.5"),
        ({"scale": (1.2, 0.8)}, "scale"),
        ({"random_resized_crop": (0.0, 1.0)}, "random_resized_crop"),
        ({"hue": 0.7}, "hue 0.7"),
        ({"size": (0, 224)}, "size"),
        ({"contrast": -0.1}, "contrast"),
        ({"randaugment": (2, 11.0)}, "randaugment"),
        ({"degrees": float("nan")}, "degrees"),
        ({"fill": (124, 116, 104)}, "fill"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong, named):
    with pytest.raises(UserError, match=named):
        Augment(**wrong)


def test_pictures_that_do_not_fit_together_are_refused():
    for wrong in (
        {"images": torch.zeros(2, 1, 8, 8)},
        {"images": torch.zeros(2, 3, 8, 8), "masks": torch.zeros(2, 8, 8)},
        {"images": torch.zeros(2, 3, 8, 8), "masks": torch.zeros(2, 8, 9, dtype=torch.bool)},
        {"images": torch.zeros(2, 3, 8, 8), "boxes": torch.zeros(1, 1, 4)},
        {"images": torch.zeros(2, 3, 8, 8), "keypoints": torch.zeros(2, 5, 2)},
    ):
        with pytest.raises(ValueError, match="are"):
            Pictures(**wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_json(name, toys):
    back = Augment(**json.loads(json.dumps(asdict(replace(PRESETS[name], size=(40, 40))))))
    assert torch.equal(
        back(toys, seed=0, epoch=0, indices=torch.arange(12)).images, go(PRESETS[name], toys, (40, 40)).images
    )


# Colours


def flat(*colour: float, count: int = 400) -> Pictures:
    return Pictures(torch.tensor(colour)[:, None, None].expand(count, 3, 4, 4))


def test_brightness_multiplies_within_its_range():
    factors = go(COLOUR["brightness"], flat(0.5, 0.2, 0.4)).images[..., 0, 0] / torch.tensor([0.5, 0.2, 0.4])
    torch.testing.assert_close(factors, factors[:, :1].expand(400, 3))
    assert 0.6 - 1e-6 < factors.min() < 0.62
    assert 1.38 < factors.max() < 1.4 + 1e-6


def test_contrast_is_about_the_mean_grey(toys):
    pale = Pictures(0.4 + toys.images / 255 * 0.2)
    seen = go(replace(OFF, contrast=0.4), pale).images
    ratio = seen.flatten(2).std(2) / pale.images.flatten(2).std(2)
    assert 0.6 - 1e-4 < ratio.min() < 0.8
    assert 1.2 < ratio.max() < 1.4 + 1e-4
    luma = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(seen.mean((2, 3)) @ luma, pale.images.mean((2, 3)) @ luma)


def test_contrast_combined_with_light_and_saturation_is_one_after_the_other(toys):
    """Where nothing is clipped, the one matrix equals the steps it stands for."""
    pale = Pictures(0.4 + toys.images / 255 * 0.1)
    once = go(replace(OFF, brightness=0.1, contrast=0.3, saturation=0.3, hue=0.2, planckian=1.0), pale)
    step = pale
    for setting in ("brightness", "contrast", "saturation", "hue", "planckian"):
        step = go(replace(OFF, **{setting: {"brightness": 0.1, "hue": 0.2, "planckian": 1.0}.get(setting, 0.3)}), step)
    assert once.images.max() < 1
    torch.testing.assert_close(once.images, step.images, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_grey_stays_grey_and_brightness_stays_under(name):
    torch.testing.assert_close(go(COLOUR[name], flat(0.3, 0.3, 0.3)).images, flat(0.3, 0.3, 0.3).images)
    luma = torch.tensor([0.299, 0.587, 0.114])
    seen = go(COLOUR[name], flat(0.5, 0.45, 0.4)).images[..., 0, 0]
    torch.testing.assert_close(seen @ luma, torch.full((400,), 0.45925))
    assert seen.std(0).max() > 0.01


def test_a_third_of_the_colour_circle_turns_red_towards_green_or_blue():
    seen = go(replace(OFF, hue=0.5), flat(0.6, 0.4, 0.4)).images[..., 0, 0]
    assert {0, 1, 2} == set(seen.argmax(1).tolist())


def test_lights_are_black_bodies():
    """Their chromaticities against the tabulated Planckian locus (CIE 1931)."""
    to_xyz = torch.tensor(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], dtype=torch.float64
    )
    xyz = illuminants() @ to_xyz.T
    x, y = (xyz[:, :2] / xyz.sum(1, keepdim=True)).T
    assert len(x) == 25
    for kelvin, expected in ((3000, (0.4369, 0.4041)), (6500, (0.3135, 0.3237)), (10000, (0.2807, 0.2884))):
        row = (kelvin - 3000) // 500
        assert abs(x[row] - expected[0]) < 0.002
        assert abs(y[row] - expected[1]) < 0.002
    red, green, blue = illuminants().T
    assert (red.diff() < 0).all()
    assert (blue.diff() > 0).all()
    assert (green == 1).all()


def test_planckian_light_multiplies_red_and_blue_as_often_as_asked():
    given = torch.tensor([0.4, 0.5, 0.5])
    seen = go(replace(OFF, planckian=0.8), flat(*given.tolist())).images[..., 0, 0]
    lights = [tuple(row) for row in (seen / given).double().round(decimals=4).tolist()]
    known = {tuple(row) for row in illuminants().round(decimals=4).tolist()}
    changed = [light for light in lights if light != (1.0, 1.0, 1.0)]
    assert 0.73 < len(changed) / 400 < 0.87
    assert all(any(np.allclose(light, row, atol=2e-4) for row in known) for light in changed)
    assert len(set(changed)) >= 24
    assert go(replace(OFF, planckian=1.0), flat(0.9, 0.9, 0.9)).images.max() == 1


# RandAugment


def pillow(images: torch.Tensor, operation) -> torch.Tensor:
    pictures = [operation(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2) / 255


def one(name: str, images: torch.Tensor, amount: float) -> torch.Tensor:
    return OTHER[name](images / 255, torch.full((len(images), 1, 1, 1), amount))


def test_equalize_is_pillows_to_the_bit(toys):
    images = torch.cat([toys.images, toys.images // 7, torch.full((1, 3, 64, 64), 9, dtype=torch.uint8)])
    assert torch.equal(one("equalize", images, 0.3), pillow(images, ImageOps.equalize))


def test_posterize_and_solarize_are_pillows(toys):
    for amount, bits in ((0.0, 8), (0.6, 6), (-1.0, 4)):
        expected = pillow(toys.images, lambda image, bits=bits: ImageOps.posterize(image, bits))
        assert torch.equal(one("posterize", toys.images, amount), expected)
    expected = pillow(toys.images, lambda image: ImageOps.solarize(image, 105))
    torch.testing.assert_close(one("solarize", toys.images, -0.59), expected)
    assert torch.equal(one("solarize", toys.images, 0.0), toys.images / 255)


def test_auto_contrast_and_sharpening_are_pillows_up_to_its_rounding(toys):
    pale = toys.images // 2 + 40
    assert (one("auto_contrast", pale, 0.0) - pillow(pale, ImageOps.autocontrast)).abs().max() < 1.1 / 255
    for amount in (-1.0, 0.5, 1.0):
        expected = pillow(toys.images, lambda image, a=amount: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * a))
        assert (one("sharpen", toys.images, amount) - expected).abs().max() < 2.1 / 255
    still = torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(one("auto_contrast", still, 0.0), still / 255)


def test_randaugment_moves_masks_with_their_squares():
    given = squares(100, (96, 96))
    seen = go(replace(OFF, randaugment=(2, 6.0)), given)
    moved = (seen.keypoints[:, 0, :2] - given.keypoints[:, 0, :2]).abs().amax(1) > 1
    assert 0.2 < moved.float().mean() < 0.8
    contrasts = [
        (image[:, mask].mean(1) - image[:, ~mask].mean(1)).abs().max().item()
        for image, mask in zip(seen.images, seen.masks, strict=True)
        if mask.any()
    ]
    assert len(contrasts) > 90
    assert np.mean(np.array(contrasts) > 0.4) > 0.9  # not all: pure red and blue both solarize to black


def test_randaugment_uses_every_operation_about_as_often():
    from sightline.data.augment import _drawn

    _, rounds = _drawn(replace(OFF, randaugment=(2, 6.0)), 0, 0, torch.arange(10_000))
    for which, amount in rounds:
        counts = torch.bincount(which + 1, minlength=len(OPERATIONS) + 1)
        assert abs(counts[0] / 10_000 - 0.5) < 0.03
        assert ((counts[1:] / 10_000 - 0.5 / len(OPERATIONS)).abs() < 0.01).all()
        assert abs(amount.abs().mean() - 0.6) < 0.01
        assert abs(amount.abs().std() - 0.05) < 0.01
        assert abs((amount > 0).double().mean() - 0.5) < 0.03


def test_randaugment_without_operations_changes_nothing_but_the_sampling(toys):
    seen = go(replace(OFF, randaugment=(0, 9.0)), toys)
    torch.testing.assert_close(seen.images, toys.images / 255, rtol=0, atol=1e-4)


# iFAM's equivariance


def golden() -> dict[str, np.ndarray]:
    with np.load(shared("golden", "losses.npz")) as file:
        return {key: file[key] for key in file.files}


def test_warp_is_the_published_one():
    file = golden()
    angle, x, y, scale, *_ = file["warp.params"].tolist()
    images = load_file(shared("golden", "ifam_tiny.safetensors"))["inputs.images"]
    warped = warp(images, Affine(angle, x, y, scale))
    torch.testing.assert_close(warped, torch.from_numpy(file["warp.images_warped"]), rtol=0, atol=1e-4)


def test_unwarp_is_the_published_one_exactly():
    file = golden()
    cases = [key.split(".")[0] for key in file if key.endswith(".equiv_maps")]
    assert len(cases) == 9
    for case in cases:
        angle, x, y, scale, h, w = file[f"{case}.transform"].tolist()
        maps = unwarp(torch.from_numpy(file[f"{case}.equiv_maps"]), Affine(angle, x, y, scale), (int(h), int(w)))
        assert torch.equal(maps, torch.from_numpy(file[f"{case}.equiv_maps_inverted"])), case


def test_unwarp_undoes_warp():
    masks = squares(12, (96, 128)).masks
    for step in range(5):
        affine = random_affine((96, 128), seed=0, step=step)
        back = unwarp(warp(masks[:, None].float(), affine), affine, (96, 128))[:, 0] > 0.5
        there = unwarp(warp(torch.ones(12, 1, 96, 128), affine), affine, (96, 128))[:, 0] > 0.5
        assert (overlap(back, masks & there) > 0.9).all()


def test_random_affine_keeps_to_its_ranges_and_its_step():
    drawn = [random_affine((84, 112), seed=4, step=step) for step in range(400)]
    assert drawn[7] == random_affine((84, 112), seed=4, step=7)
    assert drawn[7] != random_affine((84, 112), seed=5, step=7)
    of_images = torch.cat([uniforms(4, epoch, torch.arange(10), 20).flatten() for epoch in range(10)])
    assert (of_images - (drawn[7].angle / 90 + 1) / 2).abs().min() > 1e-9
    angle, x, y, scale = np.array([(a.angle, a.x, a.y, a.scale) for a in drawn]).T
    assert (x == x.round()).all()
    for values, low, high in ((angle, -90, 90), (x, -12, 12), (y, -9, 9), (scale, 0.8, 1.4)):
        assert low <= values.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < values.max() <= high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_pass_through_warp_and_unwarp_in_any_dtype(dtype):
    affine = Affine(20.0, 1.0, 0.0, 1.1)
    maps = torch.rand(2, 3, 80, 90, dtype=dtype, generator=torch.Generator().manual_seed(0), requires_grad=True)
    back = unwarp(warp(maps, affine), affine, (80, 90))
    assert back.dtype == dtype
    torch.testing.assert_close(warp(maps, affine).double(), warp(maps.double(), affine), rtol=0.01, atol=1e-4)
    back.sum().backward()
    assert (maps.grad != 0).float().mean() > 0.5
