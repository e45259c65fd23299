"""ImageNet and the test sets made for it."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sightline.data.images import read_mask
from sightline.data.rows import SPLITS, read_rows
from sightline.datasets.imagenet import (
    IMAGENET9_CLASSES,
    imagenet_classes,
    imagenet_labels,
    imagenet_to_imagenet9,
    objectnet_labels,
    read_imagenet,
    read_imagenet9,
    read_imagenet_a,
    read_imagenet_r,
    read_imagenet_s,
    read_imagenet_segmentation,
    read_imagenet_sketch,
    read_imagenet_v2,
    read_objectnet,
    read_si_score_location,
    read_si_score_rotation,
    read_si_score_size,
    write_imagenet_s_masks,
)
from sightline.errors import UserError
from tests.conftest import shared

from .published import (
    counted,
    make_imagenet,
    make_imagenet9,
    make_imagenet_s,
    make_imagenet_segmentation,
    make_imagenet_v2,
    make_objectnet,
    make_si_score,
    make_wnids,
    put,
    released_map,
)


def test_the_thousand_classes_match_the_sample_images():
    with zipfile.ZipFile(shared("data", "imagenet1k_samples.zip")) as archive:
        lines = archive.read("samples.csv").decode().splitlines()[1:]
    assert {line.split(",")[1]: int(line.split(",")[2]) for line in lines} == imagenet_labels()


def test_the_thousand_classes_are_sorted_and_have_distinct_names():
    wnids = list(imagenet_classes())
    assert wnids == sorted(wnids)
    assert len(set(imagenet_classes().values())) == 1000


def test_imagenet_val_is_the_test_split_with_boxes(tmp_path):
    make_imagenet(tmp_path)
    rows = read_imagenet(tmp_path)
    names = [rows.classes[label] for label in rows.labels]
    assert names == ["tench", "toilet tissue", "tench", "crane (bird)"]
    assert rows.labels.tolist() == [0, 999, 0, 134]
    assert [SPLITS[split] for split in rows.splits] == ["train", "train", "test", "test"]
    assert [len(boxes) for boxes in rows.boxes] == [0, 0, 2, 0]
    assert np.array_equal(rows.boxes[2], [[1, 2, 6, 7.5], [3, 2, 6, 7.5]])
    assert "no box file for 1 of the test images" in rows.notes
    assert any("3 of the 1,000" in note for note in rows.notes)


def test_imagenet_as_unpacked_from_kaggle_finds_the_boxes_beside_the_data(tmp_path):
    make_imagenet(tmp_path / "ILSVRC/Data/CLS-LOC")
    (tmp_path / "ILSVRC/Data/CLS-LOC/Annotations").rename(tmp_path / "ILSVRC/Annotations")
    assert sum(len(boxes) for boxes in read_imagenet(tmp_path).boxes) == 2


def test_imagenet_without_annotations_has_no_boxes(tmp_path):
    make_imagenet(tmp_path)
    (tmp_path / "Annotations").rename(tmp_path / "elsewhere")
    assert read_imagenet(tmp_path).boxes is None


def test_imagenet_with_a_flat_val_folder_or_an_unknown_class_is_an_error(tmp_path):
    make_imagenet(tmp_path)
    put(tmp_path, "train/n99999999/a.JPEG")
    with pytest.raises(UserError, match=r"train: .*named by its wnid .*n99999999"):
        read_imagenet(tmp_path)
    flat = tmp_path / "flat"
    put(flat, "train/n01440764/a.JPEG", "val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(UserError, match=r"val: .*found ILSVRC2012_val_00000001\.JPEG"):
        read_imagenet(flat)


def test_imagenet9_reads_the_given_variant(tmp_path):
    make_imagenet9(tmp_path)
    given = {
        "original": read_imagenet9(tmp_path),
        "mixed_rand": read_imagenet9(tmp_path, "mixed_rand"),
    }
    given |= {f"{name} itself": read_imagenet9(tmp_path / name) for name in ("original", "mixed_rand")}
    given |= {f"{name} val": read_imagenet9(tmp_path / name / "val") for name in ("original", "mixed_rand")}
    for name, rows in given.items():
        assert rows.classes == IMAGENET9_CLASSES
        assert rows.labels.tolist() == list(range(9))
        assert {Path(image).stem for image in rows.images} == {name.split(" ")[0]}
        assert set(counted(rows)) == {("test",)}
    with pytest.raises(UserError, match="mixed_up: not a variant"):
        read_imagenet9(tmp_path, "mixed_up")
    with pytest.raises(UserError, match=r"expected only_fg/val/00_dog to only_fg/val/08_fish; found mixed_rand"):
        read_imagenet9(tmp_path, "only_fg")


def test_imagenet9_has_both_mixed_variants_as_groups(tmp_path):
    make_imagenet9(tmp_path)
    rows = read_rows(tmp_path, layout="imagenet9:mixed")
    assert rows.group_names[:2] == ("dog/mixed_rand", "dog/mixed_same")
    assert set(counted(rows, "group").values()) == {1}
    assert len(rows) == 18
    named = zip(rows.images, rows.groups, strict=True)
    assert all(rows.group_names[group].endswith(f"/{Path(image).stem}") for image, group in named)


def test_imagenet9_maps_a_thousand_classes_by_the_released_file(tmp_path):
    make_imagenet9(tmp_path)
    with pytest.raises(UserError, match=r"no in_to_in9\.json here or above"):
        imagenet_to_imagenet9(tmp_path)
    put(tmp_path, "in_to_in9.json", content=json.dumps(released_map()))
    nine = imagenet_to_imagenet9(tmp_path / "original")
    assert nine.shape == (1000,)
    sizes = dict(zip(IMAGENET9_CLASSES, np.bincount(nine[nine >= 0], minlength=9).tolist(), strict=True))
    assert sizes | {"wheeled vehicle": 42, "musical instrument": 26} == {
        "dog": 116, "bird": 52, "wheeled vehicle": 42, "reptile": 36, "carnivore": 35,
        "insect": 27, "musical instrument": 26, "primate": 20, "fish": 16,
    }  # fmt: skip
    assert (nine[151], nine[407], nine[999]) == (0, 2, -1)


@pytest.mark.parametrize("change", [{"407": -1}, {"151": 1}, {"151": 12}, {"151": [0]}, {"1000": 0}])
def test_imagenet9_rejects_a_mapping_that_is_not_the_released_one(change, tmp_path):
    put(tmp_path, "in_to_in9.json", content=json.dumps(released_map() | change))
    with pytest.raises(UserError, match=r"in_to_in9\.json: (not the released file|expected every class)"):
        imagenet_to_imagenet9(tmp_path)


def test_imagenet_v2_folders_are_labels(tmp_path):
    make_imagenet_v2(tmp_path)
    rows = read_imagenet_v2(tmp_path)
    assert rows.labels.tolist() == [0, 9, 10, 999, 999]
    assert rows.images[:3] == ["0/a.jpeg", "9/c.jpeg", "10/b.jpeg"]
    assert set(counted(rows)) == {("test",)}


@pytest.mark.parametrize("read", [read_imagenet_a, read_imagenet_r, read_imagenet_sketch])
def test_test_sets_with_wnid_folders_keep_the_thousand_labels(read, tmp_path):
    make_wnids(tmp_path)
    rows = read(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {"n01440764/b.jpg": 0, "n15075141/a.jpg": 999}
    assert len(rows.classes) == 1000
    assert any(note.startswith("2 of the ") for note in rows.notes)


def test_imagenet_s_masks_are_converted_from_class_numbers(tmp_path):
    make_imagenet_s(tmp_path / "ImageNetS919")
    rows = read_imagenet_s(tmp_path)
    assert rows.masks is None
    assert any(f"`sightline convert imagenet-s {rows.root}`" in note for note in rows.notes)
    assert write_imagenet_s_masks(rows.root) == 2
    rows = read_imagenet_s(tmp_path)
    assert [SPLITS[split] for split in rows.splits] == ["train", "val", "test"]
    assert rows.masks == ["train-semi-mask/n01440764/a.png", "validation-mask/n01440764/b.png", ""]
    mask = np.asarray(read_mask(rows.root / rows.masks[0]))
    assert mask[2:4].all()
    assert mask.sum() == 16  # neither the rest nor the row to be ignored


def test_imagenet_segmentation_is_read_from_files(tmp_path):
    put(tmp_path, "gtsegs_ijcv.mat")
    with pytest.raises(UserError, match=r"`sightline convert imagenet-segmentation .*/gtsegs_ijcv\.mat`"):
        read_imagenet_segmentation(tmp_path)
    make_imagenet_segmentation(tmp_path)
    rows = read_imagenet_segmentation(tmp_path)
    assert rows.labels.tolist() == [1000, 0, 134]
    assert rows.masks[1] == "masks/n01440764/a.png"
    assert any(note.startswith("1 classes are not among") for note in rows.notes)
    (tmp_path / "masks/n01440764/a.png").unlink()
    with pytest.raises(UserError, match=r"masks/n01440764/a\.png: the mask of an image does not exist"):
        read_imagenet_segmentation(tmp_path)


def test_objectnet_keeps_the_objects_with_an_imagenet_class(tmp_path):
    make_objectnet(tmp_path / "objectnet-1.0")
    rows = read_objectnet(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {
        "images/alarm_clock/a.png": 530,
        "images/backpack/b.png": 414,
        "images/backpack/c.png": 414,
    }
    assert objectnet_labels(rows.root) == {"alarm_clock": (530, 409), "backpack": (414,)}
    assert rows.notes[0] == "1 objects without an ImageNet class are left out"
    assert rows.notes[1].startswith("1 objects have several")


@pytest.mark.parametrize(
    ("read", "folder"),
    [
        (read_si_score_location, "location20_area02_min0pc"),
        (read_si_score_rotation, "rotation"),
        (read_si_score_size, "area"),
    ],
)
def test_si_score_names_are_mapped_to_imagenet_labels(read, folder, tmp_path):
    make_si_score(tmp_path / folder)
    rows = read(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {
        "ambulance/1.jpg": 407,
        "pitcher (container)/3.jpg": 725,
        "polar bear/2.jpg": 296,
    }
