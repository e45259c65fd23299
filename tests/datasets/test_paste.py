"""Pixels: the bird inside the mask, the scene outside it, and spurious objects."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from sightline.datasets import recipes
from sightline.datasets.birds import read_birds, read_scenes
from sightline.datasets.data import Build, build
from sightline.datasets.paste import MAX_COVERED, Pose, SpuriousObject, add_object, move, paste
from tests.conftest import shared
from tests.datasets.miniature import SPECIES, array, bird_photo, rows_of


@pytest.fixture(scope="module")
def real():
    folder = shared("data", "cub224.zip").parent
    shared("data", "scenes.zip")
    return folder, read_birds(folder), read_scenes(folder)


def test_inside_the_mask_is_the_bird_and_outside_it_the_scene(options, cub, scenes):
    built = build("waterbirds", replace(options, limit=12, quality=100))
    by_id = {str(bird.id): bird for bird in read_birds(cub).all}
    for row in rows_of(built.folder):
        bird = by_id[row["bird"]]
        image, mask = array(built.folder / row["image"]), array(built.folder / row["mask"])
        with Image.open(scenes / row["scene"]) as scene:
            background = np.asarray(ImageOps.fit(scene, image.shape[1::-1], Image.Resampling.BICUBIC))
        assert np.array_equal(mask, array(cub / "segmentations" / f"{bird.name}.png") > 127)
        assert np.array_equal(image[mask], array(cub / "CUB_200_2011/images" / f"{bird.name}.png")[mask])
        assert np.array_equal(image[~mask], background[~mask])
        assert tuple(map(float, row["box"].split())) == bird.box


def test_a_moved_bird_brings_nothing_of_its_old_background(options, scenes):
    built = build("displaced", replace(options, limit=12, quality=100))
    moved = [row for row in rows_of(built.folder) if row["group_position"] != "kept"]
    assert moved
    for row in moved:
        image, mask = array(built.folder / row["image"]), array(built.folder / row["mask"])
        with Image.open(scenes / row["scene"]) as scene:
            background = np.asarray(ImageOps.fit(scene, image.shape[1::-1], Image.Resampling.BICUBIC))
        colour = np.array(SPECIES[row["image"].split("/")[2]])
        assert np.abs(image[mask].astype(int) - colour).max() <= 3
        assert np.array_equal(image[~mask], background[~mask])


def test_birds_are_displaced_by_the_distance_and_their_boxes_follow(options):
    for distance in (0.3, 0.15):
        out = options.out.with_name(f"{distance}")
        rows = rows_of(build("displaced", replace(options, out=out, distance=distance)).folder)
        for row in rows:
            mask = Image.open(out / row["mask"])
            left, top, right, bottom = box = tuple(map(float, row["box"].split()))
            if row["group_position"] == "kept":
                assert row["split"] != "test"
                continue
            assert box == mask.getbbox()
            assert max((right - left) / mask.width, (bottom - top) / mask.height) <= 0.4 + 1 / 48
            x, y = (left + right) / 2 - mask.width / 2, (top + bottom) / 2 - mask.height / 2
            away = distance if row["group_position"] == "displaced" else 0
            assert np.hypot(x / mask.width, y / mask.height) == pytest.approx(away, abs=0.025)
        sizes = {}
        for row in rows:
            if row["split"] == "test":
                sizes.setdefault(row["bird"], []).append(array(out / row["mask"]).sum())
        assert all(displaced == centred for displaced, centred in sizes.values())


def test_all_birds_can_be_displaced(options):
    rows = rows_of(build("displaced", replace(options, moved="all", limit=20)).folder)
    assert {row["group_position"] for row in rows if row["split"] != "test"} == {"displaced"}


def test_poses_rotate_and_resize():
    photo, mask, _ = bird_photo(np.random.default_rng(3), (10, 200, 30))
    wide, tall = (move(photo, mask, Pose(0.4, angle=angle))[2] for angle in (0, 90))
    assert (wide[2] - wide[0], wide[3] - wide[1]) == pytest.approx((tall[3] - tall[1], tall[2] - tall[0]), abs=1)
    for extent in (0.1, 0.3, 0.8):
        left, top, right, bottom = move(photo, mask, Pose(extent))[2]
        assert max((right - left) / photo.width, (bottom - top) / photo.height) == pytest.approx(extent, abs=0.03)
    left, top, right, bottom = move(photo, mask, Pose(0.2, 0.8, 0.2))[2]
    assert ((left + right) / 2, (top + bottom) / 2) == pytest.approx((0.8 * photo.width, 0.2 * photo.height), abs=1)


def test_a_bird_of_one_thin_line_can_be_made_tiny():
    mask = Image.new("1", (100, 80))
    ImageDraw.Draw(mask).line((10, 10, 90, 10), fill=1)
    _, moved, box = move(Image.new("RGB", (100, 80), "red"), mask, Pose(0.1))
    assert moved.getbbox() == box


@pytest.mark.parametrize("kind", ["tag", "buoy", "post"])
def test_an_object_changes_only_its_own_pixels_and_covers_little_of_the_bird(kind):
    rng = np.random.default_rng(5)
    near = []
    for seed in range(30):
        photo, mask, _ = bird_photo(rng, (10, 200, 30))
        image, added_mask = add_object(photo, mask, SpuriousObject(kind, seed))
        bird, object_mask = np.asarray(mask), np.asarray(added_mask)
        before, after = np.asarray(photo), np.asarray(image)
        assert object_mask.sum() >= 20
        assert np.array_equal(before[~object_mask], after[~object_mask])
        assert (before[object_mask] != after[object_mask]).any(axis=1).mean() > 0.7
        assert (bird & object_mask).sum() <= MAX_COVERED * bird.sum()
        near.append((bird & object_mask).any())
    assert np.mean(near) > 0.3


def test_an_object_covers_little_of_a_bird_that_fills_the_image():
    photo, everything = Image.new("RGB", (80, 60), "green"), Image.new("1", (80, 60), 1)
    for kind in ("tag", "buoy", "post"):
        _, object_mask = add_object(photo, everything, SpuriousObject(kind, 1))
        assert 0 < np.asarray(object_mask).mean() <= MAX_COVERED


def test_objects_have_masks_and_covered_pixels_leave_the_bird_mask(options, cub):
    rows = rows_of(build("spurious-object", replace(options, scenes=None, quality=100)).folder)
    with_tag = [row for row in rows if row["object_mask"]]
    assert {row["group_object"] for row in with_tag} == {"tag"}
    assert {row["group_object"] for row in rows if not row["object_mask"]} == {"none"}
    names = {str(bird.id): bird.name for bird in read_birds(cub).all}
    for row in with_tag:
        bird, object_mask = array(options.out / row["mask"]), array(options.out / row["object_mask"])
        whole = array(cub / "segmentations" / f"{names[row['bird']]}.png") > 127
        assert np.array_equal(bird, whole & ~object_mask)


def test_composites_of_real_photographs_follow_the_documented_recipe(real):
    folder, birds, scenes = real
    cub, scene_zip = zipfile.ZipFile(folder / "cub224.zip"), zipfile.ZipFile(folder / "scenes.zip")
    plans = {p.bird.id: p for p in recipes.waterbirds(birds, scenes, Build(Path(), Path()))}
    for number in (1, 2, 5007, 11788):
        plan = plans[number]
        pool = sorted(n for n in scene_zip.namelist() if n.startswith(plan.scene.split("/")[0] + "/"))
        low, high = {"train": (0, 750), "val": (750, 900), "test": (900, 1500)}[plan.split]
        digest = hashlib.sha256(f"0:{number}".encode()).digest()
        expected = pool[low:high][int.from_bytes(digest[:8], "big") % (high - low)]
        photo = Image.open(cub.open(plan.bird.photo)).convert("RGB")
        mask = Image.open(cub.open(f"masks/{plan.bird.name}.png"))
        background = Image.open(scene_zip.open(expected)).convert("RGB")
        background = ImageOps.fit(background, photo.size, Image.Resampling.BICUBIC)
        pasted = paste(plan, birds, scenes)
        assert np.array_equal(np.asarray(pasted.image), np.asarray(Image.composite(photo, background, mask)))
        assert np.array_equal(np.asarray(pasted.mask), np.asarray(mask))


def test_objects_cover_little_of_real_birds(real):
    _, birds, scenes = real
    plans = recipes.spurious_object(birds, scenes, Build(Path(), Path(), objects=("buoy", "tag")))
    for plan in recipes.limit_birds(plans, 40):
        whole, pasted = np.asarray(birds.mask(plan.bird)), paste(plan, birds, scenes)
        assert pasted.object_mask is not None
        assert (whole & np.asarray(pasted.object_mask)).sum() <= MAX_COVERED * whole.sum()
