"""The same things before other backgrounds: who lends one, what the pictures look like, and what the answers are."""

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.rows import read_rows
from sightline.errors import UserError
from sightline.explain.background_swaps import (
    Held,
    difference,
    kinds_of_background,
    painted_over,
    partner,
    spread_over,
    swaps,
)
from sightline.sight import Prediction, Sight
from sightline.training.distributed import make_accelerator
from sightline.vit.model import Input

SIDE = 16
EXPECTS = Input(size=(SIDE, SIDE), mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0), crop=1.0)
THINGS, PLACES = {"dark": 40, "light": 215}, {"red": (200, 20, 20), "blue": (20, 20, 200)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A grey square, dark or light, in the middle of a red or a blue place."""
    folder = tmp_path_factory.mktemp("squares")
    lines = ["image,label,group,mask,split"]
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[4:12, 4:12] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    for i in range(24):
        thing, place = list(THINGS)[i % 2], list(PLACES)[i // 2 % 2]
        picture = np.full((SIDE, SIDE, 3), PLACES[place], dtype=np.uint8)
        picture[4:12, 4:12] = THINGS[thing]
        Image.fromarray(picture).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{thing},{place},mask.png,test")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return read_rows(folder)


class Answering(torch.nn.Module):
    """Judges by the middle of a picture, or by its corner, where red stands for dark."""

    def __init__(self, by: str, sees: Sight | None = None):
        super().__init__()
        self.by, self.sees = by, sees

    def look(self, images):
        return Sight.everything(images) if self.sees is None else self.sees[[0] * len(images)]

    def judge(self, images, sight):
        light = images[:, :, 8, 8].mean(dim=1) - 0.5 if self.by == "thing" else images[:, 2, 0, 0] - images[:, 0, 0, 0]
        return Prediction(torch.stack([-light, light], dim=1), sight)

    def maps(self, images):
        return {}


def asked(method, rows, **settings):
    return swaps(method, rows, rows.where("test"), EXPECTS, make_accelerator("cpu"), batch=7, **settings)


def test_one_who_judges_by_the_thing_does_not_mind_the_background(rows):
    found = asked(Answering("thing"), rows)
    assert (found.source, found.by, found.kinds, found.n) == ("given", "group", ("blue", "red"), 24)
    for kind in ("original", "same", "random", "other", "foreground"):
        assert found.answers[kind].correct.all()
        assert found.changed(kind).value == 0
    assert found.gap.value == 0


def test_one_who_judges_by_the_background_is_found_out(rows):
    found = asked(Answering("place"), rows)
    original = found.answers["original"].correct
    assert original.mean() == 0.5, "red stands for dark, which is so half of the time"
    assert np.array_equal(found.answers["same"].correct, original)
    assert np.array_equal(found.answers["other"].correct, ~original), "another place, another answer"
    assert np.array_equal(found.answers["background"].correct, original), "it needs no thing at all"
    assert found.changed("other").value == 1
    assert found.changed("other").n == 24
    assert -1 <= found.gap.low <= found.gap.value <= found.gap.high <= 1


def test_without_masks_the_models_own_sight_is_the_foreground_and_without_either_there_is_none(rows):
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[:, 1:3, 1:3] = True
    bare = read_rows(rows.root)
    bare = type(bare)(**{**vars(bare), "masks": None})
    found = asked(Answering("thing", Sight(keep=keep)), bare)
    assert found.source == "discovered"
    assert found.answers["other"].correct.all()
    with pytest.raises(UserError, match="no masks, and the model's sight hides nothing"):
        asked(Answering("thing"), bare)


def test_the_same_seed_gives_the_same_pictures_and_a_limit_is_kept(rows):
    one, two, other = (asked(Answering("place"), rows, seed=seed, most=10) for seed in (3, 3, 4))
    assert one.n == 10
    assert one.answers["random"].images == two.answers["random"].images
    assert np.array_equal(one.answers["random"].probabilities, two.answers["random"].probabilities)
    assert one.answers["random"].images != other.answers["random"].images
    assert all(torch.equal(one.examples[kind], two.examples[kind]) for kind in one.examples)


def test_pictures_are_made_of_the_right_pieces(rows):
    decoded = torch.stack([torch.from_numpy(np.array(Image.open(rows.image_path(i)))).movedim(2, 0) for i in range(24)])
    masks = torch.zeros(24, SIDE, SIDE, dtype=torch.bool)
    masks[:, 4:12, 4:12] = True
    held, at = Held(np.arange(24), decoded, masks), np.array([0])
    lender = np.full(24, 3)  # a light square in a blue place
    mixed, mask = held.mixed(at, "other", lender, EXPECTS.mean, "cpu")
    assert torch.equal((mixed[0, :, 8, 8] * 255).round(), torch.full((3,), 40.0))
    assert torch.allclose(mixed[0][:, ~mask[0]].mean(dim=1) * 255, torch.tensor([20.0, 20.0, 200.0]), atol=1e-3)
    alone, _ = held.mixed(at, "foreground", None, EXPECTS.mean, "cpu")
    assert torch.allclose(alone[0][:, ~mask[0]], torch.tensor(0.5))
    gone, _ = held.mixed(at, "background", None, EXPECTS.mean, "cpu")
    assert torch.allclose(gone[0] * 255, torch.tensor([200.0, 20.0, 20.0]).view(3, 1, 1), atol=1e-2)


def test_what_is_painted_over_comes_from_around_and_the_rest_stays():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 21, 13, generator=generator)
    gone = torch.rand(2, 21, 13, generator=generator) < 0.6
    painted = painted_over(images, gone)
    assert torch.equal(painted.masked_select(~gone[:, None]), images.masked_select(~gone[:, None]))
    changed = torch.where(gone[:, None], torch.full_like(images, 7.0), images)
    assert torch.equal(painted_over(changed, gone), painted), "what is gone has no say"
    assert painted.isfinite().all()
    assert painted.min() >= 0
    assert painted.max() <= 1
    assert torch.allclose(painted_over(images, torch.ones_like(gone)), torch.tensor(0.5))


def test_partners_are_of_the_kind_asked_for_and_never_oneself():
    kinds = np.array([0, 1, 0, 2, 1, 0, 2, 0])
    for seed in range(50):
        generator = np.random.default_rng(seed)
        same, anyone, other = (partner(kinds, which, generator) for which in ("same", "random", "other"))
        assert (kinds[same] == kinds).all()
        assert (kinds[other] != kinds).all()
        assert (same != np.arange(8)).all()
        assert (anyone != np.arange(8)).all()
    alone = np.array([0, 0, 1])
    assert partner(alone, "same", np.random.default_rng(0))[2] == -1
    assert (partner(np.zeros(3, dtype=int), "other", np.random.default_rng(0)) == -1).all()


def test_kinds_are_what_groups_say_besides_the_class(rows):
    numbers, by, names = kinds_of_background(rows, np.arange(4))
    assert (by, names) == ("group", ("blue", "red"))
    assert numbers.tolist() == [1, 1, 0, 0]


def test_examples_come_from_different_groups_first():
    assert spread_over(np.array([0, 0, 0, 1, 2]), 3).tolist() == [0, 3, 4]


def test_a_difference_of_accuracies_is_paired(rows):
    found = asked(Answering("place"), rows)
    same = difference(found.answers["original"], found.answers["original"])
    assert same.value == 0
    assert same.n == 24
    assert same.high - same.low < 0.35
