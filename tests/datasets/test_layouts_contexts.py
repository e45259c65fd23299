"""CelebA, MetaShift and Spawrious: attributes that are correlated with the class in training, not in the test."""

import pickle
from collections import Counter

import pytest

from sightline.data.rows import read_rows
from sightline.datasets.celeba import read_celeba
from sightline.datasets.metashift import (
    ANIMALS,
    read_metashift_animals,
    read_metashift_disc,
    read_metashift_indoor_outdoor,
)
from sightline.datasets.pickles import pickle_to_json
from sightline.datasets.spawrious import read_spawrious_m2m, read_spawrious_o2o
from sightline.errors import UserError

from .published import (
    counted,
    make_celeba,
    make_metashift_animals,
    make_metashift_disc,
    make_metashift_indoor_outdoor,
    make_spawrious,
    put,
)


def test_celeba_groups_are_blond_hair_by_sex(tmp_path):
    make_celeba(tmp_path)
    rows = read_celeba(tmp_path)
    assert counted(rows, "label", "group") == {
        ("train", "blond", "blond/woman"): 1,
        ("train", "not blond", "not blond/man"): 1,
        ("val", "blond", "blond/man"): 1,
        ("test", "not blond", "not blond/woman"): 1,
    }
    assert rows.groups.tolist() == [2, 1, 3, 0]


def test_a_celeba_image_without_a_split_is_an_error_with_its_line(tmp_path):
    make_celeba(tmp_path)
    put(tmp_path, "list_eval_partition.csv", content="image_id,partition\n1.jpg,0\n")
    with pytest.raises(UserError, match=r"list_attr_celeba\.csv:3: 2\.jpg has no split in list_eval_partition\.csv"):
        read_celeba(tmp_path)


def test_metashift_disc_trains_on_furniture_and_tests_on_shelves(tmp_path):
    make_metashift_disc(tmp_path / "MetaDatasetCatDog")
    rows = read_metashift_disc(tmp_path)
    train = {("train", group): 2 for group in ("cat/bed", "cat/sofa", "dog/bench", "dog/bike")}
    assert counted(rows, "group") == train | {("test", "cat/shelf"): 1, ("test", "dog/shelf"): 1}
    assert "images in two contexts of one class, counted in both: 4" in rows.notes
    assert any("dog(boat)" in note for note in rows.notes)


def test_metashift_indoor_outdoor_swaps_the_contexts_in_the_test(tmp_path):
    make_metashift_indoor_outdoor(tmp_path)
    expected = {("train", "cat/indoor"), ("train", "dog/outdoor"), ("test", "cat/outdoor"), ("test", "dog/indoor")}
    assert set(counted(read_metashift_indoor_outdoor(tmp_path), "group")) == expected


def test_metashift_indoor_outdoor_without_context_folders(tmp_path):
    folders = ("train/cat", "train/dog", "val_out_of_domain/cat", "val_out_of_domain/dog")
    put(tmp_path, *(f"{path}/{number}.jpg" for number, path in enumerate(folders)))
    expected = {("train", "cat/indoor"), ("train", "dog/outdoor"), ("test", "cat/outdoor"), ("test", "dog/indoor")}
    assert set(counted(read_metashift_indoor_outdoor(tmp_path), "group")) == expected
    put(tmp_path, "imageID_to_group.pkl", content=pickle.dumps({"0": ["cat(outdoor)"]}))
    with pytest.raises(UserError, match=r"`sightline convert metashift-indoor-outdoor .*`"):
        read_metashift_indoor_outdoor(tmp_path)
    pickle_to_json(tmp_path / "imageID_to_group.pkl", tmp_path / "imageID_to_group.json")
    with pytest.raises(UserError, match=r"0\.jpg: is cat\(outdoor\) .*mixed variant"):
        read_metashift_indoor_outdoor(tmp_path)


def test_each_of_the_two_metashift_layouts_rejects_the_other(tmp_path):
    make_metashift_disc(tmp_path / "disc")
    make_metashift_indoor_outdoor(tmp_path / "indoor_outdoor")
    with pytest.raises(UserError, match=r"expected cat\(bed\), cat\(sofa\).*found cat\(indoor\)"):
        read_metashift_disc(tmp_path / "indoor_outdoor")
    with pytest.raises(UserError, match=r"expected cat\(indoor\).*found cat\(bed\), cat\(sofa\)"):
        read_metashift_indoor_outdoor(tmp_path / "disc")


def test_metashift_animals_are_tested_in_contexts_they_were_not_trained_in(tmp_path):
    make_metashift_animals(tmp_path)
    rows = read_metashift_animals(tmp_path)
    assert rows.classes == ANIMALS
    contexts = {split: {group for s, group in counted(rows, "group") if s == split} for split in ("train", "test")}
    assert not contexts["train"] & contexts["test"]
    assert len(contexts["train"]) == 8  # one of three contexts each, the odd one goes to the test
    assert len(contexts["test"]) == 16
    assert not any("hat" in name for name in rows.group_names)  # too small
    train, test = ({rows.images[i] for i in rows.split_indices(split)} for split in ("train", "test"))
    assert not train & test
    assert rows.images.count("images/shared.jpg") == 2  # a row for each test context, and none in train
    assert len(rows) == 8 * 3 * 30 + 2


def test_metashift_animals_contexts_are_divided_by_the_seed_of_the_variant(tmp_path):
    make_metashift_animals(tmp_path)
    names = ("metashift-animals", "metashift-animals:0", "metashift-animals:1")
    drawn = [sorted(set(counted(read_rows(tmp_path, layout=name, seed=7), "group"))) for name in names]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(counted(read_metashift_animals(tmp_path, 1), "group")) <= set(drawn[2])


def test_a_missing_image_of_metashift_animals_is_an_error_with_its_subset(tmp_path):
    make_metashift_animals(tmp_path)
    (tmp_path / "images/3105.jpg").unlink()
    with pytest.raises(UserError, match=r"subsets\.json: elephant\(water\) lists images/3105\.jpg"):
        read_metashift_animals(tmp_path)


def test_spawrious_o2o_uses_the_published_percentages(tmp_path):
    make_spawrious(tmp_path / "spawrious224", count=100)
    rows = read_spawrious_o2o(tmp_path)
    own = {"bulldog": "jungle", "corgi": "desert", "dachshund": "mountain", "labrador": "snow"}
    test = {"bulldog": "mountain", "corgi": "jungle", "dachshund": "snow", "labrador": "desert"}
    expected = {("train", f"{breed}/{background}"): 97 + 87 for breed, background in own.items()}
    expected |= {("train", f"{breed}/beach"): 3 + 13 for breed in own}
    expected |= {("test", f"{breed}/{background}"): 200 for breed, background in test.items()}
    assert counted(rows, "group") == expected
    train = Counter(
        image[:1] for image in (rows.images[i] for i in rows.split_indices("train")) if "beach" not in image
    )
    assert train == {"0": 4 * 97, "1": 4 * 87}
    assert rows.classes == ("bulldog", "corgi", "dachshund", "labrador")
    assert any("not 3,168" in note for note in rows.notes)


def test_spawrious_percentages_of_a_full_folder_are_the_published_counts():
    assert [97 * 3168 // 100, 87 * 3168 // 100] == [3072, 2756]


def test_spawrious_m2m_exchanges_backgrounds_between_pairs_of_breeds(tmp_path):
    make_spawrious(tmp_path, count=2)
    rows = read_spawrious_m2m(tmp_path)
    first, second = ("dirt", "jungle"), ("beach", "snow")
    expected = {}
    for breed in rows.classes:
        train, test = (first, second) if breed in ("bulldog", "dachshund") else (second, first)
        expected |= {("train", f"{breed}/{background}"): 2 for background in train}
        expected |= {("test", f"{breed}/{background}"): 2 for background in test}
    assert counted(rows, "group") == expected
    assert all(image.startswith("0/") for image in rows.images)
