"""Background swaps: partners, composed images, and the predictions in every condition."""

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.rows import read_rows
from sightline.data.sampling import interleave_groups
from sightline.errors import UserError
from sightline.explain.background_swaps import (
    MaskedImages,
    background_kinds,
    choose_partners,
    inpaint,
    swap_backgrounds,
)
from sightline.explain.estimates import accuracy_difference
from sightline.sight import Method, Prediction, Sight
from sightline.training.distributed import make_accelerator
from sightline.vit.model import Input

SIDE = 16
EXPECTS = Input(size=(SIDE, SIDE), mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0), crop=1.0)
OBJECTS, BACKGROUNDS = {"dark": 40, "light": 215}, {"red": (200, 20, 20), "blue": (20, 20, 200)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A grey square, dark or light, in the middle of a red or a blue background."""
    folder = tmp_path_factory.mktemp("squares")
    lines = ["image,label,group,mask,split"]
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[4:12, 4:12] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    for i in range(24):
        object_, background = list(OBJECTS)[i % 2], list(BACKGROUNDS)[i // 2 % 2]
        image = np.full((SIDE, SIDE, 3), BACKGROUNDS[background], dtype=np.uint8)
        image[4:12, 4:12] = OBJECTS[object_]
        Image.fromarray(image).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{object_},{background},mask.png,test")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return read_rows(folder)


class Stub(Method):
    """Predicts from the middle of an image, or from its corner, where red means dark."""

    blind = False

    def __init__(self, by: str, sees: Sight | None = None):
        super().__init__()
        self.by, self.sees = by, sees

    def look(self, images):
        return Sight.everything(images) if self.sees is None else self.sees[[0] * len(images)]

    def judge(self, images, sight):
        light = images[:, :, 8, 8].mean(dim=1) - 0.5 if self.by == "object" else images[:, 2, 0, 0] - images[:, 0, 0, 0]
        return Prediction(torch.stack([-light, light], dim=1), sight)

    def maps(self, images):
        return {}


def swap(method, rows, **settings):
    indices = rows.split_indices("test")
    return swap_backgrounds(method, rows, indices, EXPECTS, make_accelerator("cpu"), batch=7, **settings)


def test_a_model_that_uses_the_object_is_invariant_to_the_background(rows):
    found = swap(Stub("object"), rows)
    assert (found.source, found.by, found.kinds, found.n) == ("given", "group", ("blue", "red"), 24)
    for kind in ("original", "same", "random", "other", "foreground"):
        assert found.predictions[kind].correct.all()
        assert found.changed(kind).value == 0
    assert found.gap.value == 0


def test_a_model_that_uses_the_background_is_detected(rows):
    found = swap(Stub("background"), rows)
    original = found.predictions["original"].correct
    assert original.mean() == 0.5, "red means dark, which is so half of the time"
    assert np.array_equal(found.predictions["same"].correct, original)
    assert np.array_equal(found.predictions["other"].correct, ~original), "another background, another prediction"
    assert np.array_equal(found.predictions["background"].correct, original), "it needs no object at all"
    assert found.changed("other").value == 1
    assert found.changed("other").n == 24
    assert -1 <= found.gap.low <= found.gap.value <= found.gap.high <= 1


def test_without_masks_the_sight_is_the_foreground_and_a_model_that_sees_everything_has_none(rows):
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[:, 1:3, 1:3] = True
    bare = read_rows(rows.root)
    bare = type(bare)(**{**vars(bare), "masks": None})
    found = swap(Stub("object", Sight(keep=keep)), bare)
    assert found.source == "discovered"
    assert found.predictions["other"].correct.all()
    with pytest.raises(UserError, match="no masks and the model sees the whole image"):
        swap(Stub("object"), bare)


def test_the_same_seed_gives_the_same_sample_and_limits_apply(rows):
    one, two, other = (swap(Stub("background"), rows, seed=seed, most=10) for seed in (3, 3, 4))
    assert one.n == 10
    assert one.predictions["random"].images == two.predictions["random"].images
    assert np.array_equal(one.predictions["random"].probabilities, two.predictions["random"].probabilities)
    assert one.predictions["random"].images != other.predictions["random"].images
    assert all(torch.equal(one.examples[kind], two.examples[kind]) for kind in one.examples)


def test_composites_take_foreground_and_background_from_the_right_images(rows):
    decoded = torch.stack([torch.from_numpy(np.array(Image.open(rows.image_path(i)))).movedim(2, 0) for i in range(24)])
    masks = torch.zeros(24, SIDE, SIDE, dtype=torch.bool)
    masks[:, 4:12, 4:12] = True
    images, at = MaskedImages(np.arange(24), decoded, masks), np.array([0])
    lender = np.full(24, 3)  # a light square on a blue background
    mixed, mask = images.composite(at, "other", lender, EXPECTS.mean, "cpu")
    assert torch.equal((mixed[0, :, 8, 8] * 255).round(), torch.full((3,), 40.0))
    assert torch.allclose(mixed[0][:, ~mask[0]].mean(dim=1) * 255, torch.tensor([20.0, 20.0, 200.0]), atol=1e-3)
    alone, _ = images.composite(at, "foreground", None, EXPECTS.mean, "cpu")
    assert torch.allclose(alone[0][:, ~mask[0]], torch.tensor(0.5))
    gone, _ = images.composite(at, "background", None, EXPECTS.mean, "cpu")
    assert torch.allclose(gone[0] * 255, torch.tensor([200.0, 20.0, 20.0]).view(3, 1, 1), atol=1e-2)


def test_inpainting_uses_only_the_surroundings():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 21, 13, generator=generator)
    gone = torch.rand(2, 21, 13, generator=generator) < 0.6
    painted = inpaint(images, gone)
    assert torch.equal(painted.masked_select(~gone[:, None]), images.masked_select(~gone[:, None]))
    changed = torch.where(gone[:, None], torch.full_like(images, 7.0), images)
    assert torch.equal(inpaint(changed, gone), painted), "masked content is not used"
    assert painted.isfinite().all()
    assert painted.min() >= 0
    assert painted.max() <= 1
    assert torch.allclose(inpaint(images, torch.ones_like(gone)), torch.tensor(0.5))


def test_partners_are_of_the_requested_kind_and_never_the_image_itself():
    kinds = np.array([0, 1, 0, 2, 1, 0, 2, 0])
    for seed in range(50):
        generator = np.random.default_rng(seed)
        same, anyone, other = (choose_partners(kinds, which, generator) for which in ("same", "random", "other"))
        assert (kinds[same] == kinds).all()
        assert (kinds[other] != kinds).all()
        assert (same != np.arange(8)).all()
        assert (anyone != np.arange(8)).all()
    alone = np.array([0, 0, 1])
    assert choose_partners(alone, "same", np.random.default_rng(0))[2] == -1
    assert (choose_partners(np.zeros(3, dtype=int), "other", np.random.default_rng(0)) == -1).all()


def test_background_kinds_are_the_group_attributes_besides_the_class(rows):
    numbers, by, names = background_kinds(rows, np.arange(4))
    assert (by, names) == ("group", ("blue", "red"))
    assert numbers.tolist() == [1, 1, 0, 0]


def test_examples_come_from_different_groups_first():
    assert interleave_groups(np.array([0, 0, 0, 1, 2]))[:3].tolist() == [0, 3, 4]


def test_a_difference_of_accuracies_is_paired(rows):
    found = swap(Stub("background"), rows)
    same = accuracy_difference(found.predictions["original"], found.predictions["original"])
    assert same.value == 0
    assert same.n == 24
    assert same.high - same.low < 0.35
