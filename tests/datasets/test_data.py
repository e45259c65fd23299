"""Building datasets: complete, reproducible, resumable, and never left half-finished under their name."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sightline.data.rows import SPLITS, read_rows
from sightline.datasets import data as builder
from sightline.datasets.data import BUILDERS, Build, build
from sightline.datasets.paste import paste
from sightline.errors import UserError
from tests.conftest import shared
from tests.datasets.miniature import array, contents, rows_of

NAMES = list(BUILDERS)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_an_image_a_mask_of_its_size_and_a_box_inside(name, options):
    built = build(name, replace(options, limit=20))
    rows = rows_of(built.folder)
    assert len(rows) == built.images == sum(sum(groups.values()) for groups in built.counts.values())
    assert len({row["image"] for row in rows}) == len(rows)
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    for row in rows:
        image, mask = array(built.folder / row["image"]), array(built.folder / row["mask"])
        assert image.shape == (*mask.shape, 3)
        assert mask.dtype == bool
        assert mask.any()
        left, top, right, bottom = map(float, row["box"].split())
        assert 0 <= left < right <= mask.shape[1]
        assert 0 <= top < bottom <= mask.shape[0]
    files = {p for p in contents(built.folder) if p not in ("rows.csv", "about.json")}
    assert files == {row[key] for row in rows for key in ("image", "mask", "object_mask") if row.get(key)}


@pytest.mark.parametrize("name", NAMES)
def test_a_limited_dataset_is_a_subset_of_the_whole_one(name, options, tmp_path):
    some = build(name, replace(options, limit=6, out=tmp_path / "some")).folder
    more = build(name, replace(options, limit=14, out=tmp_path / "more")).folder
    assert len({row["bird"] for row in rows_of(some)}) == 6
    few, many = contents(some), contents(more)
    assert all(many[file] == few[file] for file in few if file not in ("rows.csv", "about.json"))
    assert all(row in rows_of(more) for row in rows_of(some))


def test_the_same_seed_gives_the_same_dataset(options, tmp_path):
    once = build("displaced", replace(options, limit=10, out=tmp_path / "once")).folder
    again = build("displaced", replace(options, limit=10, out=tmp_path / "again")).folder
    other = build("displaced", replace(options, limit=10, out=tmp_path / "other", seed=1)).folder
    assert contents(once) == contents(again)
    assert {row["scene"] for row in rows_of(once)} != {row["scene"] for row in rows_of(other)}


def test_two_processes_build_the_same_dataset_as_one(options, tmp_path):
    one = build("mixed", replace(options, out=tmp_path / "one")).folder
    two = build("mixed", replace(options, out=tmp_path / "two", workers=2)).folder
    assert len(rows_of(one)) >= builder.MIN_FOR_POOL
    assert contents(one) == contents(two)


def test_about_json_has_recipe_seed_sources_and_counts_but_no_paths(options):
    built = build("waterbirds", options)
    text = (built.folder / "about.json").read_text()
    about = json.loads(text)
    assert about["recipe"] == "waterbirds"
    assert about["options"]["seed"] == 0
    assert about["sources"]["birds"] | {"sha256": ""} == {"name": "CUB_200_2011", "birds": 56, "sha256": ""}
    assert about["counts"] == built.counts
    counted = Counter((r["split"], f"{r['label']}/{r['group_place']}") for r in rows_of(built.folder))
    assert counted == {(split, group): n for split, groups in built.counts.items() for group, n in groups.items()}
    assert str(options.cub.parent) not in text
    assert str(options.out.parent) not in text


@pytest.mark.parametrize("name", NAMES)
def test_read_rows_reads_every_built_dataset(name, options):
    built = build(name, replace(options, limit=20))
    rows = read_rows(built.folder)
    assert len(rows) == built.images
    counted = Counter((SPLITS[s], rows.group_names[g]) for s, g in zip(rows.splits, rows.groups, strict=True))
    assert counted == {(split, group): n for split, groups in built.counts.items() for group, n in groups.items()}
    assert rows.masks is not None
    assert rows.boxes is not None


def stop_after(monkeypatch, number: int, error: BaseException) -> None:
    made = []

    def interrupted(*arguments):
        made.append(1)
        if len(made) > number:
            raise error
        return paste(*arguments)

    monkeypatch.setattr(builder, "paste", interrupted)


def test_an_interrupted_build_leaves_no_dataset_and_continues_where_it_stopped(options, tmp_path, monkeypatch):
    options = replace(options, limit=12)
    whole = build("displaced", replace(options, out=tmp_path / "whole")).folder
    with monkeypatch.context() as patch:
        stop_after(patch, 7, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build("displaced", options)
    assert not options.out.exists()
    partial = tmp_path / "set.partial"
    assert len(list((partial / "images").rglob("*.jpg"))) == 7
    next(partial.rglob("*.jpg")).with_suffix(".jpg.host-4711-0.partial").write_bytes(b"half an image")
    with monkeypatch.context() as patch:
        stop_after(patch, len(rows_of(whole)) - 7, AssertionError("made again what was there"))
        build("displaced", options)
    assert contents(options.out) == contents(whole)
    assert not partial.exists()


KILLED = """
import os, sys
from pathlib import Path
from sightline.datasets import data as builder

cub, scenes, out = map(Path, sys.argv[1:])
made, paste = [], builder.paste
builder.paste = lambda *a: os.kill(os.getpid(), 9) if len(made) == 5 else made.append(1) or paste(*a)
builder.build("waterbirds", builder.Build(cub, out, scenes, workers=1))
"""


def test_a_killed_build_leaves_no_dataset_and_can_be_finished(options):
    command = [sys.executable, "-c", KILLED, options.cub, options.scenes, options.out]
    assert subprocess.run(command, check=False).returncode == -9
    assert not options.out.exists()
    assert build("waterbirds", options).images == 56


def test_a_finished_dataset_is_reused_and_another_one_is_not_overwritten(options, monkeypatch):
    options = replace(options, limit=5)
    first = build("waterbirds", options)
    stop_after(monkeypatch, 0, AssertionError("made again"))
    again = build("waterbirds", options)
    assert (first.reused, again.reused) == (False, True)
    assert (again.images, again.counts) == (first.images, first.counts)
    with pytest.raises(UserError, match="its seed is 0, not 1"):
        build("waterbirds", replace(options, seed=1))
    with pytest.raises(UserError, match="its recipe is waterbirds, not mixed"):
        build("mixed", options)
    (options.out / "about.json").unlink()
    with pytest.raises(UserError, match="it is not a dataset built by sightline data"):
        build("waterbirds", options)


def test_other_birds_make_another_dataset(options, cub, tmp_path):
    build("waterbirds", replace(options, limit=5))
    changed = shutil.copytree(cub, tmp_path / "changed")
    lists = changed / "CUB_200_2011/images.txt"
    lists.write_text("".join(lists.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="its birds is"):
        build("waterbirds", replace(options, cub=changed, limit=5))


def test_an_interrupted_build_with_other_options_is_not_continued(options, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build("waterbirds", options)
    with pytest.raises(UserError, match=r"set\.partial: an interrupted build, and its seed"):
        build("waterbirds", replace(options, seed=3))


def test_an_unwritable_folder_is_a_user_error(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        build("waterbirds", replace(options, out=tmp_path / "file" / "set"))


def test_a_full_disk_is_a_user_error_and_finished_images_are_kept(options, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4, OSError(28, "No space left on device"))
        with pytest.raises(UserError, match="No space left"):
            build("waterbirds", options)
    assert not options.out.exists()
    assert build("waterbirds", options).images == 56


ERRORS = {
    "no dataset is called 'ducks'": ("ducks", {}),
    "needs scene photographs": ("waterbirds", {"scenes": None}),
    "no scene folder is named 'lake'; the folders are buildings, forest": ("waterbirds", {"water": ("lake",)}),
    "cannot be both land and water": ("waterbirds", {"water": ("forest",)}),
    "does not use --distance; it belongs to displaced": ("waterbirds", {"distance": 0.1}),
    "--distance 0.4": ("displaced", {"distance": 0.4}),
    "--types names 5 scene folders": ("scenes-o2o", {"types": ("sea", "forest", "street", "glacier", "mountain")}),
    "no object is called hat": ("spurious-object", {"objects": ("none", "hat")}),
    "both classes have the same object": ("spurious-object", {"objects": ("tag", "tag")}),
    "--quality 0": ("waterbirds", {"quality": 0}),
    "--limit 0": ("waterbirds", {"limit": 0}),
    "--correlation 95": ("waterbirds", {"correlation": 95}),
    "nowhere: no such folder": ("waterbirds", {"cub": Path("nowhere")}),
    "elsewhere: no such folder": ("waterbirds", {"scenes": Path("elsewhere")}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_wrong_options_are_an_error_before_anything_is_written(message, options, tmp_path):
    name, changes = ERRORS[message]
    with pytest.raises(UserError, match=message):
        build(name, replace(options, **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_can_be_built_from_real_photographs(name, tmp_path):
    folder = shared("data", "cub224.zip").parent
    shared("data", "scenes.zip")
    built = build(name, Build(folder, tmp_path / name, folder, limit=3, workers=1))
    for row in rows_of(built.folder):
        assert array(built.folder / row["image"]).shape[:2] == array(built.folder / row["mask"]).shape
