"""Crops: the best squares, one after the other, exactly; and the controls."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.datasets.toy_images import make_toy
from sightline.sight import Look, inside_boxes
from sightline.where.attention import cls_attention_map
from sightline.where.crops import CentreSight, CropSight, RandomSight, greedy_crops, random_crops, side_in_pixels

from ..conftest import small_vit


def brute_force(values: torch.Tensor, sides: list[int]) -> list[tuple[int, int, int, int]]:
    """Every position in reading order, every pixel added up."""
    (h, w), boxes = values.shape, []
    for s in sides:
        best = None
        for y in range(h - s + 1):
            for x in range(w - s + 1):
                free = all(x + s <= left or x >= right or y + s <= top or y >= bottom
                           for left, top, right, bottom in boxes)  # fmt: skip
                total = values[y : y + s, x : x + s].sum().item()
                if free and (best is None or total > best[0]):
                    best = (total, (x, y, x + s, y + s))
        assert best is not None
        boxes.append(best[1])
    return boxes


def as_tuples(boxes: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(box) for box in boxes.tolist()]


@pytest.mark.parametrize(
    ("sides", "boxes", "sums"),
    [
        ([4, 2], [(2, 1, 6, 5), (0, 4, 2, 6)], [67, 21]),
        ([3, 3, 2], [(2, 2, 5, 5), (0, 5, 3, 8), (6, 4, 8, 6)], [45, 36, 19]),
    ],
)
def test_a_map_worked_out_by_hand(sides, boxes, sums):
    y, x = torch.arange(8)[:, None], torch.arange(8)
    values = (3 * x + 5 * y + x * y) % 7
    assert values.sum() == 210
    found = as_tuples(greedy_crops(values[None].float(), sides)[0])
    assert found == boxes
    assert [values[t:b, left:r].sum().item() for left, t, r, b in found] == sums


@pytest.mark.parametrize("kind", ["few values, many ties", "floats"])
def test_as_brute_force(kind, generator):
    maps = torch.rand(40, 9, 11, generator=generator)
    maps = (3 * maps).floor() if kind.startswith("few") else maps
    found = greedy_crops(maps, [4, 3, 3, 1])
    for values, boxes in zip(maps.double(), found, strict=True):
        assert as_tuples(boxes) == brute_force(values, [4, 3, 3, 1])


@settings(deadline=None, max_examples=60)
@given(
    size=st.tuples(st.integers(6, 20), st.integers(6, 20)),
    sides=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    levels=st.integers(1, 5),
)
def test_crops_lie_inside_have_their_size_and_do_not_overlap(size, sides, seed, levels):
    maps = torch.randint(0, levels, (3, *size), generator=torch.Generator().manual_seed(seed)).float()
    generators = [torch.Generator().manual_seed(seed + i) for i in range(3)]
    for boxes in (greedy_crops(maps, sides, full="repeat"), random_crops(size, sides, generators)):
        left, top, right, bottom = boxes.unbind(dim=2)
        assert (boxes[..., :2] >= 0).all()
        assert (right <= size[1]).all()
        assert (bottom <= size[0]).all()
        assert (right - left == bottom - top).all()
        for row in boxes.tolist():
            distinct = list(dict.fromkeys(map(tuple, row)))  # where there was no room, the one before came again
            area = inside_boxes(torch.tensor([distinct]), size).sum().item()
            assert area == sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in distinct)
        assert (right - left)[:, 0].tolist() == 3 * sides[:1]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), power=st.integers(-100, 100))
def test_neither_the_scale_of_a_map_nor_its_neighbours_matter(seed, power):
    maps = torch.rand(4, 12, 12, generator=torch.Generator().manual_seed(seed))
    found = greedy_crops(maps, [5, 3])
    assert torch.equal(greedy_crops(maps * 2.0**power, [5, 3]), found)
    alone = torch.cat([greedy_crops(one[None], [5, 3]) for one in maps])
    assert torch.equal(alone, found)


def test_ties_go_to_the_first_in_reading_order():
    even = torch.full((1, 8, 8), 1 / 64)
    assert as_tuples(greedy_crops(even, [4, 4, 4, 4])[0]) == [(0, 0, 4, 4), (4, 0, 8, 4), (0, 4, 4, 8), (4, 4, 8, 8)]


def test_without_room_it_is_an_error_or_repeats_the_crop_before():
    peak = torch.zeros(2, 8, 8)
    peak[0, 3:5, 3:5] = 1  # in the middle: no second square of 4 beside it
    peak[1, 0, 0] = 1
    with pytest.raises(ValueError, match="no room for a crop of 4 pixels"):
        greedy_crops(peak, [4, 4])
    boxes = greedy_crops(peak, [4, 4], full="repeat")
    assert torch.equal(boxes[0, 0], boxes[0, 1])
    assert not torch.equal(boxes[1, 0], boxes[1, 1])
    with pytest.raises(ValueError, match="does not fit"):
        greedy_crops(peak, [9])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("full", ["raise", "repeat"])
def test_a_map_that_is_not_finite_is_an_error(value, full):
    maps = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    greedy_crops(maps, [4, 3], full="repeat")
    maps[1, 6, 6] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        greedy_crops(maps, [4, 3], full=full)


def test_sides_are_fractions_or_pixels():
    assert [side_in_pixels(side, (224, 448)) for side in (2 / 7, 1.0, 64, 0.001)] == [64, 224, 64, 1]


def test_the_crop_holds_more_attention_than_any_other(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, 32, 32, generator=generator)
    sight = CropSight(vit, (12,), layer=1, heads=2)
    attention = F.interpolate(cls_attention_map(vit, images, 1, 2)[:, None], (32, 32), mode="bilinear")[:, 0]
    for boxes, each in zip(sight.look(images).boxes, attention.double(), strict=True):
        assert as_tuples(boxes) == brute_force(each, [12])
    assert torch.equal(sight.maps(images)["attention"], cls_attention_map(vit, images, 1, 2))


def test_a_selector_sees_images_no_larger_than_its_input_size(generator):
    vit = small_vit(classes=0)  # patches of 8; made for 224 pixels
    large = torch.rand(1, 3, 448, 448, generator=generator)
    odd = torch.rand(1, 3, 36, 44, generator=generator)
    sight = CropSight(vit, (0.5, 0.25))
    assert sight.maps(large)["attention"].shape == (1, 28, 28)
    assert sight.maps(odd)["attention"].shape == (1, 4, 5)
    assert (sight.look(large).boxes[0, :, 2] - sight.look(large).boxes[0, :, 0]).tolist() == [224, 112]
    assert sight.look(odd).visible((36, 44)).any()


class GivenMap(CropSight):
    """Attends to true masks: what the crops are worth when attention is perfect."""

    masks: torch.Tensor

    def attention(self, images):
        return F.avg_pool2d(self.masks[:, None].float(), 8)[:, 0] + 1e-3


def test_perfect_attention_finds_birds_that_stand_anywhere():
    toy = make_toy(32, size=96, seed=5, displacement=0.3)
    images, masks = toy.images.float() / 255, toy.masks
    given = GivenMap(small_vit(classes=0), (0.5,))
    given.masks = masks

    def found(where: Look) -> float:
        inside = where.look(images).visible((96, 96)) & masks
        return (inside.sum(dim=(1, 2)) / masks.sum(dim=(1, 2))).mean().item()

    centre, chance = found(CentreSight(0.5)), found(RandomSight((0.5,)))
    assert found(given) > max(centre, chance) + 0.15
    exact = greedy_crops(masks.float(), [48])
    best = (inside_boxes(exact, (96, 96)) & masks).sum(dim=(1, 2)) / masks.sum(dim=(1, 2))
    assert found(given) > best.mean().item() - 0.05, "a grid of 8 pixels is nearly as good as the mask itself"


def test_the_centre_is_the_centre():
    boxes = CentreSight(128).look(torch.zeros(2, 3, 224, 256)).boxes
    assert as_tuples(boxes[1]) == [(64, 48, 192, 176)]


def test_random_crops_depend_on_the_image_and_the_seed_alone(generator):
    images = (torch.rand(6, 3, 32, 32, generator=generator) * 255).round() / 255
    where = RandomSight((8, 8), seed=1)
    boxes = where.look(images).boxes
    assert torch.equal(where.look(images[2:4]).boxes, boxes[2:4])
    assert torch.equal(where.look(images.double()).boxes, boxes)
    assert not torch.equal(RandomSight((8, 8), seed=2).look(images).boxes, boxes)
    assert len({tuple(row) for row in boxes[:, 0].tolist()}) > 1
    assert torch.equal(RandomSight((8,), seed=1).look(images).boxes, boxes[:, :1]), "earlier ones do not heed later"


def test_random_crops_are_uniform():
    generators = [torch.Generator().manual_seed(seed) for seed in range(4000)]
    left = random_crops((4, 8), [4], generators)[:, 0, 0]
    counts = torch.bincount(left, minlength=5)
    assert (counts - 800).abs().max() < 5 * (800 * 0.8) ** 0.5
