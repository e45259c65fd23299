"""The recipes, without any pixels."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sightline.datasets import recipes
from sightline.datasets.birds import is_waterbird, read_birds, read_scenes
from sightline.datasets.data import BUILDERS, Build
from tests.conftest import shared
from tests.datasets.miniature import SPECIES, birds_without_images, draw_scenes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return draw_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def real():
    folder = shared("data", "cub224.zip").parent
    shared("data", "scenes.zip")
    return folder, read_birds(folder), read_scenes(folder)


def shares(plans, split: str, key: str) -> dict[str, dict[str, float]]:
    """For each label, the share of its images in each group."""
    counts = Counter((p.label, p.groups[key]) for p in plans if p.split == split)
    totals = Counter(p.label for p in plans if p.split == split)
    table: dict[str, dict[str, float]] = {label: {} for label in totals}
    for (label, group), number in counts.items():
        table[label][group] = number / totals[label]
    return table


def plan(name: str, scenes: Path, **changes):
    return BUILDERS[name].plan(birds_without_images(200), read_scenes(scenes), Build(Path(), Path(), **changes))


def test_waterbirds_without_a_label_file_is_drawn_as_published(scenes):
    plans = plan("waterbirds", scenes)
    assert {p.bird.species for p in plans if p.label == "waterbird"} == set(list(SPECIES)[:3])
    splits = Counter(p.split for p in plans)
    assert splits == {"train": 560, "val": 140, "test": 700}
    own = {"landbird": "land", "waterbird": "water"}
    for label, background in own.items():
        assert shares(plans, "train", "place")[label][background] == pytest.approx(0.95, abs=0.005)
        assert shares(plans, "val", "place")[label][background] == 0.5
        assert shares(plans, "test", "place")[label][background] == 0.5
    assert all(p.scene.split("/")[0] == {"land": "forest", "water": "sea"}[p.groups["place"]] for p in plans)


def test_a_given_correlation_overrides_the_label_file(scenes):
    labelled = birds_without_images(200, split="train", background="land")
    options = Build(Path(), Path())
    given = BUILDERS["waterbirds"].plan(labelled, read_scenes(scenes), options)
    assert {(p.split, p.groups["place"]) for p in given} == {("train", "land")}
    drawn = BUILDERS["waterbirds"].plan(labelled, read_scenes(scenes), replace(options, correlation=0.7))
    assert shares(drawn, "train", "place")["waterbird"]["water"] == pytest.approx(0.7, abs=0.005)


def test_the_spurious_object_is_correlated_with_the_class_in_training_only(scenes):
    plans = plan("spurious-object", scenes, objects=("post", "buoy"))
    train, test = (shares(plans, split, "object") for split in ("train", "test"))
    assert train["waterbird"]["buoy"] == pytest.approx(0.95, abs=0.005)
    assert train["landbird"]["post"] == pytest.approx(0.95, abs=0.005)
    assert test["waterbird"] == test["landbird"] == {"buoy": 0.5, "post": 0.5}
    assert all(p.spurious and p.spurious.kind == p.groups["object"] and not p.scene for p in plans)


def test_cub_swapped_shows_test_birds_on_their_own_and_on_the_other_background(scenes):
    plans = plan("cub-swapped", scenes)
    assert {p.label for p in plans} == set(SPECIES)
    for split in ("train", "val"):
        assert {(p.groups["background"], p.scene) for p in plans if p.split == split} == {("original", "")}
    assert set(Counter(p.label for p in plans if p.split == "val").values()) == {12}
    swapped = [p for p in plans if p.groups["background"] == "swapped"]
    original = [p for p in plans if p.split == "test" and p.groups["background"] == "original"]
    assert [p.bird for p in swapped] == [p.bird for p in original]
    assert {(p.bird.waterbird, p.scene.split("/")[0]) for p in swapped} == {(True, "forest"), (False, "sea")}


def test_one_to_one_gives_each_family_its_own_scene_type_and_another_in_the_test(scenes):
    plans = plan("scenes-o2o", scenes)
    own = {"blackbird": "sea", "gull": "forest", "sparrow": "mountain", "warbler": "street"}
    for environment, share in (("0", 0.97), ("1", 0.87)):
        half = [p for p in plans if p.extra["environment"] == environment]
        for split in ("train", "val"):
            for label, table in shares(half, split, "scene").items():
                assert set(table) <= {own[label], "glacier"}
                assert table[own[label]] == pytest.approx(share, abs=0.06)
    test = shares(plans, "test", "scene")
    assert all(len(table) == 1 for table in test.values())
    assert {next(iter(test[label])) for label in own} == set(own.values())
    assert all(own[label] not in test[label] for label in own)


def test_families_are_equally_large(scenes):
    for name in ("scenes-o2o", "scenes-m2m", "scenes-disjoint"):
        plans = plan(name, scenes)
        for split in ("train", "val", "test"):
            assert len(set(Counter(p.label for p in plans if p.split == split).values())) == 1


def test_many_to_many_swaps_the_scene_types_of_the_pairs(scenes):
    plans = plan("scenes-m2m", scenes)
    train, test = (shares(plans, split, "scene") for split in ("train", "test"))
    assert set(train["gull"]) == set(train["blackbird"]) == set(test["sparrow"]) == set(test["warbler"])
    assert set(test["gull"]) == set(test["blackbird"]) == set(train["sparrow"]) == set(train["warbler"])
    assert not set(train["gull"]) & set(test["gull"])
    assert all(0.3 < share < 0.7 for table in (*train.values(), *test.values()) for share in table.values())


def test_disjoint_scenes_share_no_type_between_training_and_test(scenes):
    plans = plan("scenes-disjoint", scenes)
    types = {split: {p.groups["scene"] for p in plans if p.split == split} for split in ("train", "val", "test")}
    assert types["train"] == types["val"]
    assert len(types["train"]) == len(types["test"]) == 3
    assert not types["train"] & types["test"]


def test_mixed_shows_test_birds_on_original_same_class_and_random_backgrounds(scenes):
    plans = plan("mixed", scenes)
    land_or_sea = {True: "sea", False: "forest"}
    test = [p for p in plans if p.split == "test"]
    assert Counter(p.groups["background"] for p in test) == {"original": 700, "same": 700, "rand": 700}
    for p in plans:
        kind = p.scene.split("/")[0]
        if p.groups["background"] == "same":
            assert kind == land_or_sea[p.bird.waterbird]
        if p.groups["background"] == "other":
            assert p.split != "test"
            assert kind == land_or_sea[not p.bird.waterbird]
    as_waterbirds = {p.bird.id: p.scene for p in plan("waterbirds", scenes) if p.split != "test"}
    assert {p.bird.id: p.scene for p in plans if p.split != "test"} == as_waterbirds
    rand = [p.scene.startswith("sea") == p.bird.waterbird for p in test if p.groups["background"] == "rand"]
    assert 0.4 < np.mean(rand) < 0.6


def test_si_score_changes_one_factor_at_a_time_on_one_scene(scenes):
    plans = plan("si-score", scenes)
    assert {p.groups["shift"] for p in plans if p.split != "test"} == {"photograph"}
    of_bird: dict[int, list] = {}
    for p in plans:
        if p.split == "test":
            of_bird.setdefault(p.bird.id, []).append(p)
    for shown in of_bird.values():
        kinds = Counter(p.groups["shift"].split()[0] for p in shown)
        assert kinds == {"none": 1, "location": 2, "rotation": 2, "size": 2}
        assert len({p.scene for p in shown}) == 1
        for p in shown:
            usual = {"location": ("x", "y"), "rotation": ("angle",), "size": ("extent",), "none": ()}
            changed = {
                key for key in ("extent", "x", "y", "angle") if getattr(p.pose, key) != getattr(shown[0].pose, key)
            }
            assert changed <= set(usual[p.groups["shift"].split()[0]])
            assert bool(changed) == (p.groups["shift"] != "none")
    cells = Counter(p.groups["shift"] for p in plans if p.split == "test")
    assert len(cells) == 1 + 8 + 7 + 6


@pytest.mark.parametrize("name", BUILDERS)
def test_no_scene_is_in_two_splits(name, scenes):
    plans = BUILDERS[name].plan(birds_without_images(60), read_scenes(scenes), Build(Path(), Path()))
    splits = {}
    for image in plans:
        if image.scene:
            splits.setdefault(image.scene, set()).add(image.split)
    assert all(len(of) == 1 for of in splits.values())
    birds = {}
    for image in plans:
        birds.setdefault(image.bird.id, set()).add(image.split)
    assert all(len(of) == 1 for of in birds.values())


def test_waterbirds_rebuilt_has_the_documented_backgrounds_and_counts(real):
    _, birds, scenes = real
    plans = recipes.waterbirds(birds, scenes, Build(Path(), Path()))
    first = {p.bird.id: p.scene for p in plans if p.bird.id <= 6}
    assert [first[i] for i in range(1, 7)] == [
        *("sea/17822.webp", "forest/16453.webp", "sea/18940.webp"),
        *("forest/16241.webp", "sea/1035.webp", "forest/317.webp"),
    ]
    uses = Counter(p.scene for p in plans)
    assert (len(uses), max(uses.values())) == (2823, 13)
    counts = Counter((p.split, p.label, p.groups["place"]) for p in plans)
    cells = [(label, background) for label in ("landbird", "waterbird") for background in ("land", "water")]
    assert [counts["train", *cell] for cell in cells] == [3525, 186, 54, 1030]
    assert [counts["val", *cell] for cell in cells] == [452, 452, 147, 148]
    assert [counts["test", *cell] for cell in cells] == [2255, 2255, 642, 642]


def test_the_keyword_rule_and_counts_are_the_published_ones(real):
    _, birds, scenes = real
    assert all(bird.waterbird == is_waterbird(bird.name) for bird in birds.all)
    drawn = recipes.waterbirds(birds, scenes, Build(Path(), Path(), correlation=0.95))
    counts = Counter((p.split, p.label, p.groups["place"]) for p in drawn)
    assert Counter(p.split for p in drawn) == {"train": 4795, "val": 1199, "test": 5794}
    assert counts["test", "waterbird", "land"] == counts["test", "waterbird", "water"] == 642
    assert counts["test", "landbird", "land"] == counts["test", "landbird", "water"] == 2255
