"""The toy images: reproducible, with exact masks, parts and key points, and a shortcut in the background."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from sightline.datasets.toy_images import BLOCK, PART_NAMES, ToyImages, make_toy

K = len(PART_NAMES)


def assert_same(toy: ToyImages, other: ToyImages, first: int | None = None) -> None:
    for field in fields(ToyImages):
        assert torch.equal(getattr(toy, field.name)[:first], getattr(other, field.name)[:first]), field.name


def balanced(count: int, seed: int) -> ToyImages:
    index = torch.arange(count)
    return make_toy(count, size=64, seed=seed, labels=index % 2, backgrounds=index // 2 % 2)


def interior(masks, margin: int = 1):
    """Pixels whose neighbours within the margin are all in the mask."""
    return F.max_pool2d((~masks).float(), 2 * margin + 1, stride=1, padding=margin) == 0


def mean_colour(toy: ToyImages, masks):
    weight = masks[:, None].float()
    return (toy.images * weight).sum((2, 3)) / (255 * weight.sum((2, 3)))


def linear_accuracy(features, targets, new_features, new_targets) -> float:
    """Held-out accuracy of a least-squares classifier."""
    with_bias = [torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in (features, new_features)]
    weights = torch.linalg.lstsq(with_bias[0], 2.0 * targets[:, None] - 1).solution
    return ((with_bias[1] @ weights > 0)[:, 0] == (new_targets == 1)).float().mean().item()


def boxes(masks):
    """Left, top, right, bottom of each mask, right and bottom excluded; float [n, 4]."""
    sides = []
    for axis in (1, 2):
        seen = masks.any(axis)
        sides.append((seen.int().argmax(1), seen.shape[1] - seen.flip(1).int().argmax(1)))
    (left, right), (top, bottom) = sides
    return torch.stack([left, top, right, bottom], dim=1).float()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads are slow on a machine that runs other tests at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def toy() -> ToyImages:
    return make_toy(200, size=64, seed=3, correlation=0.5)


@pytest.mark.parametrize("size", [32, 40, 128, 256])
def test_shapes_and_types(size):
    toy = make_toy(3, size=size)
    expected = {
        "images": ((3, 3, size, size), torch.uint8),
        "labels": ((3,), torch.int64),
        "backgrounds": ((3,), torch.int64),
        "masks": ((3, size, size), torch.bool),
        "parts": ((3, size, size), torch.uint8),
        "keypoints": ((3, K, 3), torch.float32),
    }
    found = {field.name: getattr(toy, field.name) for field in fields(ToyImages)}
    assert {name: (tuple(value.shape), value.dtype) for name, value in found.items()} == expected


def test_the_same_seed_gives_the_same_bytes(toy):
    assert_same(toy, make_toy(200, size=64, seed=3, correlation=0.5))


def test_threads_do_not_change_a_byte():
    alone = make_toy(BLOCK, size=72, seed=4)
    try:
        torch.set_num_threads(3)
        together = make_toy(BLOCK, size=72, seed=4)
    finally:
        torch.set_num_threads(1)
    assert_same(alone, together)


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_an_image_does_not_depend_on_how_many_are_drawn(toy, count):
    assert_same(make_toy(count, size=64, seed=3, correlation=0.5), toy, first=count)


def test_images_with_given_labels_and_backgrounds_do_not_depend_on_how_many_are_drawn():
    labels, backgrounds = torch.tensor([[1, 0] * 30, [0, 0, 1] * 20])
    few = make_toy(7, size=40, seed=8, labels=labels[:7], backgrounds=backgrounds[:7])
    assert_same(few, make_toy(60, size=40, seed=8, labels=labels, backgrounds=backgrounds), first=7)
    assert few.labels.tolist() == labels[:7].tolist()
    assert few.backgrounds.tolist() == backgrounds[:7].tolist()


def test_no_image_is_drawn_twice(toy):
    other = make_toy(200, size=64, seed=4, correlation=0.5)
    for both in (torch.cat([toy.images, other.images]), torch.cat([toy.masks, other.masks])):
        assert len(both.flatten(1).unique(dim=0)) == 400


def test_mask_is_where_a_part_is(toy):
    assert torch.equal(toy.masks, toy.parts < K)
    assert toy.parts.unique().tolist() == list(range(K + 1))


@pytest.mark.parametrize("displacement", [0.0, 0.15, 0.4])
@pytest.mark.parametrize("size", [32, 128])
def test_every_bird_is_visible(size, displacement):
    areas = make_toy(96, size=size, seed=5, displacement=displacement).masks.float().mean((1, 2))
    assert areas.min() > 0.04
    assert areas.max() < 0.45


def test_mask_is_half_coverage_at_any_resolution():
    coarse, fine = make_toy(24, size=64, seed=6), make_toy(24, size=256, seed=6)
    covered = F.avg_pool2d(fine.masks.float(), 4) >= 0.5
    overlap = (covered & coarse.masks).sum((1, 2)) / (covered | coarse.masks).sum((1, 2))
    assert overlap.min() > 0.9
    shrunk = F.avg_pool2d(fine.images.float(), 4)
    assert (shrunk - coarse.images).abs().mean() < 5


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95, 1.0])
def test_class_and_background_agree_with_the_given_correlation(correlation):
    count = 800
    toy = make_toy(count, size=32, seed=7, correlation=correlation)
    four_sigma = 4 * (correlation * (1 - correlation) / count) ** 0.5
    assert (toy.labels == toy.backgrounds).float().mean().item() == pytest.approx(correlation, abs=four_sigma + 1e-6)
    assert toy.labels.float().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / count**0.5)


def test_another_background_leaves_the_bird_unchanged(toy):
    other = make_toy(200, size=64, seed=3, labels=toy.labels, backgrounds=1 - toy.backgrounds)
    for name in ("labels", "masks", "parts", "keypoints"):
        assert torch.equal(getattr(toy, name), getattr(other, name))
    differs = (toy.images != other.images).any(1)
    inside = interior(toy.masks)
    assert inside.sum() > 0.5 * toy.masks.sum()
    assert not (differs & inside).any()
    assert differs[~toy.masks].float().mean() > 0.95


def test_another_label_leaves_background_and_colours_unchanged():
    given = torch.zeros(64, dtype=torch.long)
    stork, duck = (make_toy(64, size=64, seed=9, displacement=0, labels=given + k, backgrounds=given) for k in (0, 1))
    above = interior(~(stork.masks | duck.masks))
    above[:, 24:] = False  # the shadows lie lower
    same = (stork.images == duck.images).all(1)
    assert above.float().mean() > 0.2
    assert same[above].all()
    closeness = (mean_colour(stork, stork.masks) - mean_colour(duck, duck.masks)).abs().mean()
    shuffled = (mean_colour(stork, stork.masks) - mean_colour(duck, duck.masks).roll(1, 0)).abs().mean()
    assert closeness < 0.5 * shuffled
    assert not torch.equal(stork.masks, duck.masks)


@pytest.mark.parametrize("displacement", [0.15, 0.4])
def test_keypoints_lie_on_their_part_next_to_its_centre(displacement):
    toy = make_toy(96, size=64, seed=10, displacement=displacement)
    visible = 0
    for parts, keypoints in zip(toy.parts, toy.keypoints, strict=True):
        for part, (x, y, seen) in enumerate(keypoints.tolist()):
            pixels = (parts == part).nonzero().flip(1).float()
            if len(pixels) == 0:
                assert (x, y, seen) == (0, 0, 0)
                continue
            visible += 1
            assert seen == 1
            assert parts[int(y), int(x)] == part
            to_centre = (pixels - pixels.mean(0)).norm(dim=1)
            chosen = (torch.tensor([x, y]) - pixels.mean(0)).norm()
            assert chosen <= to_centre.min() + 0.1
    hidden = 96 * K - visible
    assert visible > 500
    assert hidden > 0 if displacement == 0.4 else hidden < 6


def test_displacement_moves_birds_from_the_centre():
    distances = []
    for displacement in (0.0, 0.1, 0.2, 0.35):
        box = boxes(make_toy(100, size=64, seed=11, displacement=displacement).masks)
        middle = (box[:, :2] + box[:, 2:]) / 2
        distances.append((middle / 64 - 0.5).norm(dim=1))
        assert distances[-1].max() < displacement + 0.04
    means = [distance.mean().item() for distance in distances]
    assert means == sorted(means)
    assert means[1] > means[0] + 0.03
    assert means[3] > means[1] + 0.05


def test_birds_look_left_and_right_alike(toy):
    head, tail = (toy.keypoints[:, PART_NAMES.index(name), 0] for name in ("head", "tail"))
    assert 0.35 < (head > tail).float().mean() < 0.65


def test_the_background_is_a_shortcut_and_the_colour_of_the_bird_is_not():
    one, two = balanced(600, seed=12), balanced(600, seed=13)
    scenery = [mean_colour(toy, ~toy.masks) for toy in (one, two)]
    bird = [mean_colour(toy, toy.masks) for toy in (one, two)]
    assert linear_accuracy(scenery[0], one.backgrounds, scenery[1], two.backgrounds) > 0.95
    assert 0.4 < linear_accuracy(bird[0], one.labels, bird[1], two.labels) < 0.62
    assert 0.4 < linear_accuracy(scenery[0], one.labels, scenery[1], two.labels) < 0.6


def test_the_silhouette_determines_the_class():
    def proportions(toy: ToyImages):
        wide, tall = (boxes(toy.masks)[:, 2:] - boxes(toy.masks)[:, :2]).unbind(1)
        return torch.stack([wide / tall, toy.masks.sum((1, 2)) / (wide * tall)], dim=1)

    one, two = balanced(240, seed=14), balanced(240, seed=15)
    assert linear_accuracy(proportions(one), one.labels, proportions(two), two.labels) > 0.95


def test_bird_colours_meet_background_colours():
    """Some birds are camouflaged: their mean colour is nearer to the background than backgrounds to each other."""
    toy = balanced(200, seed=16)
    bird, scenery = mean_colour(toy, toy.masks), mean_colour(toy, ~toy.masks)
    camouflaged = (bird - scenery).norm(dim=1) < torch.pdist(scenery).median() / 2
    assert 0.05 < camouflaged.float().mean() < 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is 0: it must be at least 1"),
        ({"size": 100}, "size is 100: it must be a multiple of 8 from 32 to 256"),
        ({"size": 24}, "size is 24: it must be a multiple of 8 from 32 to 256"),
        ({"size": 264}, "size is 264: it must be a multiple of 8 from 32 to 256"),
        ({"seed": -1}, "seed is -1: it must not be negative"),
        ({"correlation": 1.5}, "correlation is 1.5: it must lie between 0 and 1"),
        ({"correlation": float("nan")}, "correlation is nan: it must lie between 0 and 1"),
        ({"displacement": -0.1}, "displacement is -0.1: it must lie between 0 and 0.4"),
        ({"displacement": 0.5}, "displacement is 0.5: it must lie between 0 and 0.4"),
        ({"labels": torch.zeros(3)}, r"labels has shape \[3\]: it must have one value per image, \[2\]"),
        (
            {"backgrounds": torch.zeros(2, 1)},
            r"backgrounds has shape \[2, 1\]: it must have one value per image, \[2\]",
        ),
        ({"labels": torch.tensor([0, 2])}, r"labels contains \[0, 2\]: only 0 and 1 are allowed"),
    ],
)
def test_wrong_arguments_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_toy(**({"count": 2} | arguments))
