"""Each published layout in miniature, as its authors lay it out; and folders that are not what they should be."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.celeba import read_celeba
from sightline.data.cub import WATERBIRDS, read_cub, read_waterbird200
from sightline.data.imagenet import (
    IMAGENET9_CLASSES,
    IMAGENET9_RANGES,
    imagenet_classes,
    imagenet_labels,
    imagenet_to_imagenet9,
    objectnet_answers,
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
from sightline.data.images import read_mask
from sightline.data.metashift import (
    ANIMALS,
    read_metashift_animals,
    read_metashift_disc,
    read_metashift_indoor_outdoor,
)
from sightline.data.pickles import pickle_to_json, read_pickle
from sightline.data.rows import LAYOUTS, SPLITS, TEST, Rows, read_rows
from sightline.data.siim import read_dicom, read_siim, write_masks
from sightline.data.spawrious import read_spawrious_m2m, read_spawrious_o2o
from sightline.data.waterbirds import read_waterbirds
from sightline.errors import UserError
from tests.conftest import shared


def an_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(file, "PNG")
    return file.getvalue()


IMAGE = an_image()


def put(root: Path, *paths: str, content: bytes | str = IMAGE) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def counted(rows: Rows, *columns: str) -> dict:
    """How many rows there are of each (split, class or group)."""
    names = {"label": (rows.labels, rows.classes), "group": (rows.groups, rows.group_names)}
    read = [[SPLITS[split] for split in rows.splits]]
    read += [[names[column][1][number] for number in names[column][0]] for column in columns]
    return dict(Counter(zip(*read, strict=True)))


# ---- miniatures ------------------------------------------------------------------------------------------------------

BIRDS = {  # id: name, class, trains
    3: ("001.Black_footed_Albatross/a.jpg", 1, 1),
    5: ("001.Black_footed_Albatross/b.jpg", 1, 0),
    8: ("021.Eastern_Towhee/c.jpg", 21, 1),
    9: ("021.Eastern_Towhee/d.jpg", 21, 0),
}


def make_cub(root: Path) -> None:
    lines = {
        "images.txt": [f"{key} {name}" for key, (name, _, _) in BIRDS.items()],
        "image_class_labels.txt": [f"{key} {label}" for key, (_, label, _) in BIRDS.items()],
        "train_test_split.txt": [f"{key} {trains}" for key, (_, _, trains) in BIRDS.items()],
        "bounding_boxes.txt": [f"{key} {key}.0 1.0 4.0 5.5" for key in reversed(BIRDS)],
        "parts/parts.txt": ["1 back", "11 right eye"],
        "parts/part_locs.txt": [f"{key} {part} {key}.5 {part}.0 {part % 2}" for key in BIRDS for part in (1, 11)],
    }
    for path, text in lines.items():
        put(root, path, content="\n".join(text) + "\n")
    for name, _, _ in BIRDS.values():
        put(root, f"images/{name}", f"segmentations/{name[:-4]}.png")


def make_waterbirds(root: Path) -> None:
    places = {5: (1, 0, 2), 3: (1, 1, 0), 8: (1, 1, 0), 9: (0, 1, 1)}  # y, place, split
    lines = ["img_id,img_filename,y,split,place,place_filename"]
    lines += [f"{key},{BIRDS[key][0]},{y},{split},{place},/o/ocean/1.jpg" for key, (y, place, split) in places.items()]
    put(root, "metadata.csv", content="\n".join(lines))
    put(root, *(name for name, _, _ in BIRDS.values()))


def make_waterbirds_in_cub(root: Path) -> None:
    make_cub(root)
    make_waterbirds(root / WATERBIRDS)


def make_celeba(root: Path) -> None:
    people = {"1.jpg": (1, -1, 0), "2.jpg": (-1, 1, 0), "3.jpg": (1, 1, 1), "4.jpg": (-1, -1, 2)}
    attributes = [f"{name},1,{blond},{male}" for name, (blond, male, _) in people.items()]
    put(root, "list_attr_celeba.csv", content="\n".join(["image_id,Bald,Blond_Hair,Male", *attributes]))
    partition = [f"{name},{split}" for name, (_, _, split) in people.items()]
    put(root, "list_eval_partition.csv", content="\n".join(["image_id,partition", *partition]))
    put(root, *(f"img_align_celeba/{name}" for name in people))


def make_metashift_disc(root: Path) -> None:
    for path in ("train/cat/cat(sofa)", "train/cat/cat(bed)", "train/dog/dog(bench)", "train/dog/dog(bike)"):
        put(root, f"{path}/1.jpg", f"{path}/2.jpg")
    put(root, "test/cat/cat(shelf)/3.jpg", "test/dog/dog(shelf)/4.jpg", "train/dog/dog(boat)/5.jpg")


def make_metashift_indoor_outdoor(root: Path) -> None:
    for path in ("train/cat/cat(indoor)", "train/dog/dog(outdoor)", "test/cat/cat(outdoor)", "test/dog/dog(indoor)"):
        put(root, f"{path}/{len(path)}.jpg")


def animal_subsets() -> dict[str, list[str]]:
    """Three large contexts for each animal, one too small, and one of an animal that is not asked for."""
    subsets = {}
    for number, animal in enumerate(ANIMALS):
        for place, context in enumerate(("grass", "water", "fence")):
            subsets[f"{animal}({context})"] = [f"{number}{place}{picture:02}" for picture in range(30)]
        subsets[f"{animal}(hat)"] = [f"{number}9{picture:02}" for picture in range(24)]
    for context in ("grass", "water", "fence"):  # one picture that all of the bear's contexts share
        subsets[f"bear({context})"].append("shared")
    return subsets | {"cat(sofa)": ["1"] * 40}


def make_metashift_animals(root: Path) -> None:
    subsets = animal_subsets()
    put(root, "full-candidate-subsets.json", content=json.dumps(subsets))
    put(root, *{f"images/{picture}.jpg" for name in subsets if "cat" not in name for picture in subsets[name]})


def make_spawrious(root: Path, count: int = 10) -> None:
    for half in "01":
        for place in ("desert", "jungle", "dirt", "mountain", "snow", "beach"):
            for breed in ("bulldog", "corgi", "dachshund", "labrador"):
                put(root, *(f"{half}/{place}/{breed}/{n:03}.png" for n in range(count)), content=b"")


def make_siim_prepared(root: Path) -> None:
    put(root, "train_set/0/a.dcm", "train_set/1/b.dcm", "train_set/1/c.dcm")
    put(root, "full_test_set/0/d.dcm", "full_test_set/0/e.dcm", "full_test_set/1/f.dcm", "full_test_set/1/g.dcm")
    put(root, "robust_test_set/0/d.dcm", "robust_test_set/1/f.dcm")
    put(root, "non_robust_test_set/0/e.dcm", "non_robust_test_set/1/g.dcm")
    put(root, "all_masks/a.png", "all_masks/f.png")


def make_siim_kaggle(root: Path) -> None:
    lines = ["ImageId, EncodedPixels", "a, -1", "b, 1 2 2 1", "b, 9 1", "c, 0 3", "d, -1", "e,-1"]
    put(root, "train-rle.csv", content="\n".join(lines))
    put(root, *(f"dicom-images-train/{name}1/{name}2/{name}.dcm" for name in "abcdex"))
    put(root, "cxr_tube_dict.json", content='{"c": false, "d": true, "elsewhere": true}')


def make_imagenet(root: Path) -> None:
    put(root, "train/n01440764/n01440764_1.JPEG", "train/n15075141/n15075141_1.JPEG")
    put(root, "val/n01440764/ILSVRC2012_val_00000002.JPEG", "val/n02012849/ILSVRC2012_val_00000001.JPEG")
    box = "<bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>6</xmax><ymax>7.5</ymax></bndbox>"
    objects = "".join(f"<object><name>n01440764</name>{box.format(left)}</object>" for left in (1, 3))
    put(root, "Annotations/CLS-LOC/val/ILSVRC2012_val_00000002.xml", content=f"<annotation>{objects}</annotation>")


def make_imagenet9(root: Path) -> None:
    for variant in ("original", "mixed_rand"):
        for number, name in enumerate(IMAGENET9_CLASSES):
            put(root, f"{variant}/val/{number:02}_{name}/{variant}.JPEG")


def make_imagenet_v2(root: Path) -> None:
    put(root, "0/a.jpeg", "10/b.jpeg", "9/c.jpeg", "999/d.jpeg", "999/e.jpeg")


def make_wnids(root: Path) -> None:
    put(root, "n15075141/a.jpg", "n01440764/b.jpg", "README.txt")


def make_imagenet_s(root: Path) -> None:
    put(root, "train-semi/n01440764/a.JPEG", "validation/n01440764/b.JPEG", "test/n01440764/c.JPEG")
    numbers = np.zeros((8, 8, 3), np.uint8)
    numbers[2, :, 0] = 5  # class 5
    numbers[3, :, 1] = 1  # class 256
    numbers[4] = (1000 % 256, 1000 // 256, 0)  # to be ignored
    file = io.BytesIO()
    Image.fromarray(numbers).save(file, "PNG")
    for path in ("train-semi-segmentation/n01440764/a.png", "validation-segmentation/n01440764/b.png"):
        put(root, path, content=file.getvalue())


def make_imagenet_segmentation(root: Path) -> None:
    for name in ("n01440764/a", "n02012849/b", "n00007846/c"):  # the last is a person: no class of the 1,000
        put(root, f"images/{name}.png", f"masks/{name}.png")


def make_objectnet(root: Path) -> None:
    titles = ["tench, Tinca tinca", "analog clock", "digital clock", "backpack"]
    put(root, "mappings/imagenet_to_label_2012_v2", content="\n".join(titles) + "\n")
    files = {
        "folder_to_objectnet_label": {"alarm_clock": "Alarm clock", "backpack": "Backpack", "air_freshener": "Air"},
        "objectnet_to_imagenet_1k": {"Alarm clock": "digital clock; analog clock", "Backpack": "backpack"},
        "pytorch_to_imagenet_2012_id": {"0": 0, "409": 1, "530": 2, "414": 3},
    }
    for name, content in files.items():
        put(root, f"mappings/{name}.json", content=json.dumps(content))
    put(
        root, "images/alarm_clock/a.png", "images/backpack/b.png", "images/backpack/c.png", "images/air_freshener/d.png"
    )


def make_si_score(root: Path) -> None:
    put(root, "ambulance/1.jpg", "polar bear/2.jpg", "pitcher (container)/3.jpg")
    put(root, "foreground_classes.csv", content="int,label\n407,ambulance\n")


MINIATURES = {
    "celeba": (make_celeba, read_celeba),
    "cub": (make_cub, read_cub),
    "imagenet": (make_imagenet, read_imagenet),
    "imagenet-a": (make_wnids, read_imagenet_a),
    "imagenet-r": (make_wnids, read_imagenet_r),
    "imagenet-s": (make_imagenet_s, read_imagenet_s),
    "imagenet-segmentation": (make_imagenet_segmentation, read_imagenet_segmentation),
    "imagenet-sketch": (make_wnids, read_imagenet_sketch),
    "imagenet-v2": (make_imagenet_v2, read_imagenet_v2),
    "imagenet9": (make_imagenet9, read_imagenet9),
    "metashift-animals": (make_metashift_animals, read_metashift_animals),
    "metashift-disc": (make_metashift_disc, read_metashift_disc),
    "metashift-indoor-outdoor": (make_metashift_indoor_outdoor, read_metashift_indoor_outdoor),
    "objectnet": (make_objectnet, read_objectnet),
    "si-score-location": (make_si_score, read_si_score_location),
    "si-score-rotation": (make_si_score, read_si_score_rotation),
    "si-score-size": (make_si_score, read_si_score_size),
    "siim": (make_siim_kaggle, read_siim),
    "siim prepared": (make_siim_prepared, read_siim),
    "spawrious-m2m": (make_spawrious, read_spawrious_m2m),
    "spawrious-o2o": (make_spawrious, read_spawrious_o2o),
    "waterbird200": (make_waterbirds_in_cub, read_waterbird200),
    "waterbirds": (make_waterbirds, read_waterbirds),
    "waterbirds in cub": (lambda root: make_waterbirds_in_cub(root), lambda root: read_waterbirds(root / WATERBIRDS)),
}
layouts = pytest.mark.parametrize("layout", MINIATURES)


def attempt(read, root: Path) -> tuple[Rows | None, str]:
    """The rows, or what the user is told instead; nothing else may happen."""
    try:
        return read(root), ""
    except UserError as error:
        return None, str(error)


# ---- what holds for all ----------------------------------------------------------------------------------------------


@layouts
def test_every_listed_file_exists_and_all_columns_fit(layout, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    rows = read(tmp_path)
    assert rows.name == layout.split(" ")[0]
    assert all(rows.image_path(i).is_file() for i in range(len(rows)))
    assert all((rows.root / mask).is_file() for mask in rows.masks or () if mask)
    assert (rows.labels.dtype, rows.splits.dtype) == (np.int64, np.int8)
    assert rows.labels.max() < len(rows.classes) == len(set(rows.classes))
    assert all(box.dtype == np.float32 and box.shape[1:] == (4,) for box in rows.boxes or ())
    if rows.groups is not None:
        assert rows.groups.dtype == np.int64
        assert rows.groups.max() < len(rows.group_names) == len(set(rows.group_names))
        for label, group in zip(rows.labels, rows.groups, strict=True):
            assert rows.group_names[group].startswith(f"{rows.classes[label]}/")


def test_every_layout_that_can_be_asked_for_is_tested_here():
    assert {name.split(" ")[0] for name in MINIATURES} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_by_its_name_and_val_never_comes_from_test(layout, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    rows, published = read_rows(tmp_path, layout=layout), read(tmp_path)
    assert rows.images == published.images
    assert np.array_equal(rows.splits == TEST, published.splits == TEST)


@layouts
def test_a_wrong_folder_is_refused_with_what_was_expected_and_found(layout, tmp_path):
    read = MINIATURES[layout][1]
    put(tmp_path, "holiday/1.jpg")
    put(tmp_path / WATERBIRDS, "beach/1.jpg")
    with pytest.raises(UserError, match="expected") as refusal:
        read(tmp_path)
    assert "holiday" in str(refusal.value) or "beach" in str(refusal.value)
    for nothing in (tmp_path / "nothing", tmp_path / "holiday/1.jpg"):
        with pytest.raises(UserError, match=nothing.name):
            read(nothing)


@layouts
def test_whatever_is_missing_the_user_is_told(layout, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    whole = len(read(tmp_path))
    everything = sorted(tmp_path.rglob("*"))
    aside = tmp_path.with_name("aside")
    for path in everything[:: max(1, len(everything) // 40)]:
        path.rename(aside)
        rows, told = attempt(read, tmp_path)
        assert str(tmp_path) in told or 0 < len(rows) <= whole
        aside.rename(path)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[1, 2]\n", b"1\n", b"{}", b"<a>"])
@layouts
def test_damaged_tables_are_refused_by_name(layout, damage, tmp_path):
    make, read = MINIATURES[layout]
    make(tmp_path)
    texts = (".txt", ".csv", ".json", ".xml", "_v2")
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(texts)]:
        before = path.read_bytes()
        path.write_bytes(damage)
        rows, told = attempt(read, tmp_path)
        assert rows or path.name in told or path.parent.name in told
        path.write_bytes(before)


# ---- birds -----------------------------------------------------------------------------------------------------------


def test_cub_has_species_masks_boxes_and_key_points(tmp_path):
    make_cub(tmp_path / "CUB_200_2011")
    rows = read_cub(tmp_path)
    assert rows.classes == ("Black footed Albatross", "Eastern Towhee")
    assert counted(rows, "label") == {(split, name): 1 for split in ("train", "test") for name in rows.classes}
    second = rows.images.index("images/001.Black_footed_Albatross/b.jpg")
    assert SPLITS[rows.splits[second]] == "test"
    assert rows.masks[second] == "segmentations/001.Black_footed_Albatross/b.png"
    assert np.array_equal(rows.boxes[second], [[5, 1, 9, 6.5]])
    assert rows.keypoint_names == ("back", "right eye")
    assert np.array_equal(rows.keypoints[second], [[5.5, 1, 1], [5.5, 11, 1]])
    assert rows.groups is None
    assert any("no validation split" in note for note in rows.notes)


def test_cub_without_segmentations_says_so(tmp_path):
    make_cub(tmp_path)
    (tmp_path / "segmentations").rename(tmp_path / "elsewhere")
    rows = read_cub(tmp_path)
    assert rows.masks is None
    assert any("no segmentations" in note for note in rows.notes)


def test_a_bird_that_is_listed_but_missing_is_named_by_line(tmp_path):
    make_cub(tmp_path)
    (tmp_path / "images" / BIRDS[8][0]).unlink()
    with pytest.raises(UserError, match=r"images\.txt:3: .*c\.jpg is listed, but not there"):
        read_cub(tmp_path)


def test_a_bad_line_in_a_table_of_cub_is_named(tmp_path):
    make_cub(tmp_path)
    put(tmp_path, "bounding_boxes.txt", content="3 1 2 3 4\n5 1 two 3 4\n")
    with pytest.raises(UserError, match=r"bounding_boxes\.txt:2: expected 5 numbers"):
        read_cub(tmp_path)
    put(tmp_path, "bounding_boxes.txt", content="3 1 2 3 4\n")
    with pytest.raises(UserError, match=r"bounding_boxes\.txt: nothing on image 5 of .*images\.txt:2"):
        read_cub(tmp_path)


def test_waterbirds_groups_are_twice_the_label_plus_the_place(tmp_path):
    make_waterbirds(tmp_path / WATERBIRDS)
    rows = read_waterbirds(tmp_path)
    assert rows.group_names == ("landbird/land", "landbird/water", "waterbird/land", "waterbird/water")
    assert rows.groups.tolist() == [2, 3, 3, 1]
    assert [SPLITS[split] for split in rows.splits] == ["test", "train", "train", "val"]
    assert rows.boxes is rows.masks is rows.keypoints is None
    assert any(note.startswith("1 pictures of landbirds (Eastern Towhee") for note in rows.notes)


def test_waterbirds_inside_cub_have_its_masks_boxes_and_key_points(tmp_path):
    make_waterbirds_in_cub(tmp_path)
    for given in (tmp_path, tmp_path / WATERBIRDS):
        rows = read_waterbirds(given)
        assert rows.images[0] == f"{WATERBIRDS}/{BIRDS[5][0]}"
        assert rows.masks[0] == f"segmentations/{BIRDS[5][0][:-4]}.png"
        assert np.array_equal(rows.boxes[0], [[5, 1, 9, 6.5]])
        assert np.array_equal(rows.keypoints[:, 0, 0], [5.5, 3.5, 8.5, 9.5])
    table = tmp_path / WATERBIRDS / "metadata.csv"
    table.write_text(table.read_text().replace("\n5,", "\n8,"))
    with pytest.raises(UserError, match=r"metadata\.csv:2: image 8 is 001\..*but 021\."):
        read_waterbirds(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("9,021.Eastern_Towhee/d.jpg,0,", "9,021.Eastern_Towhee/d.jpg,2,", r"metadata\.csv:5: y is '2'"),
        ("d.jpg", "lost.jpg", r"metadata\.csv:5: .*lost\.jpg is listed, but not there"),
        (",split,", ",part,", r"metadata\.csv:1: no column 'split' among img_id"),
        ("9,021", "021", r"metadata\.csv:5: 5 cells under 6 columns"),
    ],
)
def test_what_is_wrong_with_the_table_of_waterbirds_is_told_by_line(old, new, told, tmp_path):
    make_waterbirds(tmp_path)
    table = tmp_path / "metadata.csv"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(UserError, match=told):
        read_waterbirds(tmp_path)


def test_waterbird200_has_the_species_and_split_of_cub_on_other_pictures(tmp_path):
    make_waterbirds_in_cub(tmp_path)
    rows, cub = read_waterbird200(tmp_path / WATERBIRDS), read_cub(tmp_path)
    assert rows.images == [image.replace("images/", f"{WATERBIRDS}/") for image in cub.images]
    assert rows.classes == cub.classes
    assert np.array_equal(rows.labels, cub.labels)
    assert np.array_equal(rows.splits, cub.splits)
    assert rows.masks == cub.masks
    assert any("only the test split" in note for note in rows.notes)


# ---- faces, cats and dogs --------------------------------------------------------------------------------------------


def test_celeba_is_blond_hair_by_sex(tmp_path):
    make_celeba(tmp_path)
    rows = read_celeba(tmp_path)
    assert counted(rows, "label", "group") == {
        ("train", "blond", "blond/woman"): 1,
        ("train", "not blond", "not blond/man"): 1,
        ("val", "blond", "blond/man"): 1,
        ("test", "not blond", "not blond/woman"): 1,
    }
    assert rows.groups.tolist() == [2, 1, 3, 0]


def test_celeba_without_a_split_for_a_picture_names_its_line(tmp_path):
    make_celeba(tmp_path)
    put(tmp_path, "list_eval_partition.csv", content="image_id,partition\n1.jpg,0\n")
    with pytest.raises(UserError, match=r"list_attr_celeba\.csv:3: 2\.jpg is in no split"):
        read_celeba(tmp_path)


def test_metashift_disc_trains_on_furniture_and_tests_on_shelves(tmp_path):
    make_metashift_disc(tmp_path / "MetaDatasetCatDog")
    rows = read_metashift_disc(tmp_path)
    train = {("train", group): 2 for group in ("cat/bed", "cat/sofa", "dog/bench", "dog/bike")}
    assert counted(rows, "group") == train | {("test", "cat/shelf"): 1, ("test", "dog/shelf"): 1}
    assert any(note.startswith("4 pictures are in two contexts") for note in rows.notes)
    assert any("dog(boat)" in note for note in rows.notes)


def test_metashift_indoor_outdoor_flips_the_place_in_the_test(tmp_path):
    make_metashift_indoor_outdoor(tmp_path)
    expected = {("train", "cat/indoor"), ("train", "dog/outdoor"), ("test", "cat/outdoor"), ("test", "dog/indoor")}
    assert set(counted(read_metashift_indoor_outdoor(tmp_path), "group")) == expected


def test_metashift_indoor_outdoor_without_context_folders(tmp_path):
    folders = ("train/cat", "train/dog", "val_out_of_domain/cat", "val_out_of_domain/dog")
    put(tmp_path, *(f"{path}/{number}.jpg" for number, path in enumerate(folders)))
    expected = {("train", "cat/indoor"), ("train", "dog/outdoor"), ("test", "cat/outdoor"), ("test", "dog/indoor")}
    assert set(counted(read_metashift_indoor_outdoor(tmp_path), "group")) == expected
    put(tmp_path, "imageID_to_group.pkl", content=pickle.dumps({"0": ["cat(outdoor)"]}))
    with pytest.raises(UserError, match=r"python -m sightline\.data\.pickles"):
        read_metashift_indoor_outdoor(tmp_path)
    pickle_to_json(tmp_path / "imageID_to_group.pkl", tmp_path / "imageID_to_group.json")
    with pytest.raises(UserError, match=r"0\.jpg: is cat\(outdoor\) .*mixed variant"):
        read_metashift_indoor_outdoor(tmp_path)


def test_each_of_the_two_splits_of_metashift_refuses_the_other(tmp_path):
    make_metashift_disc(tmp_path / "disc")
    make_metashift_indoor_outdoor(tmp_path / "places")
    with pytest.raises(UserError, match=r"expected cat\(bed\), cat\(sofa\).*found cat\(indoor\)"):
        read_metashift_disc(tmp_path / "places")
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
    train, test = ({rows.images[i] for i in rows.where(split)} for split in ("train", "test"))
    assert not train & test
    assert rows.images.count("images/shared.jpg") == 2  # a row for each test context, and none in train
    assert len(rows) == 8 * 3 * 30 + 2


def test_metashift_animals_are_divided_by_the_seed_alone(tmp_path):
    make_metashift_animals(tmp_path)
    drawn = [counted(read_metashift_animals(tmp_path, seed=seed), "group") for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_metashift_animals_name_the_subset_whose_picture_is_missing(tmp_path):
    make_metashift_animals(tmp_path)
    (tmp_path / "images/3105.jpg").unlink()
    with pytest.raises(UserError, match=r"subsets\.json: elephant\(water\) lists images/3105\.jpg"):
        read_metashift_animals(tmp_path)


def test_spawrious_o2o_takes_the_published_shares(tmp_path):
    make_spawrious(tmp_path / "spawrious224", count=100)
    rows = read_spawrious_o2o(tmp_path)
    own = {"bulldog": "jungle", "corgi": "desert", "dachshund": "mountain", "labrador": "snow"}
    test = {"bulldog": "mountain", "corgi": "jungle", "dachshund": "snow", "labrador": "desert"}
    expected = {("train", f"{breed}/{place}"): 97 + 87 for breed, place in own.items()}
    expected |= {("train", f"{breed}/beach"): 3 + 13 for breed in own}
    expected |= {("test", f"{breed}/{place}"): 200 for breed, place in test.items()}
    assert counted(rows, "group") == expected
    train = Counter(image[:1] for image in (rows.images[i] for i in rows.where("train")) if "beach" not in image)
    assert train == {"0": 4 * 97, "1": 4 * 87}
    assert rows.classes == ("bulldog", "corgi", "dachshund", "labrador")
    assert any("not 3,168" in note for note in rows.notes)


def test_spawrious_shares_of_a_full_folder_are_the_published_counts():
    assert [97 * 3168 // 100, 87 * 3168 // 100] == [3072, 2756]


def test_spawrious_m2m_exchanges_places_between_pairs_of_breeds(tmp_path):
    make_spawrious(tmp_path, count=2)
    rows = read_spawrious_m2m(tmp_path)
    one, other = ("dirt", "jungle"), ("beach", "snow")
    expected = {}
    for breed in rows.classes:
        train, test = (one, other) if breed in ("bulldog", "dachshund") else (other, one)
        expected |= {("train", f"{breed}/{place}"): 2 for place in train}
        expected |= {("test", f"{breed}/{place}"): 2 for place in test}
    assert counted(rows, "group") == expected
    assert all(image.startswith("0/") for image in rows.images)


# ---- radiographs -----------------------------------------------------------------------------------------------------


def test_siim_as_on_kaggle_tests_where_the_tubes_are_known(tmp_path):
    make_siim_kaggle(tmp_path)
    rows = read_siim(tmp_path)
    assert counted(rows, "group") == {
        ("train", "no pneumothorax/tube unknown"): 2,
        ("train", "pneumothorax/tube unknown"): 1,
        ("test", "pneumothorax/no tube"): 1,
        ("test", "no pneumothorax/tube"): 1,
    }
    assert rows.images[0] == "dicom-images-train/a1/a2/a.dcm"
    assert {"1 pictures without a label are left out"} < set(rows.notes)
    assert any(note.startswith("1 pictures with a tube label") for note in rows.notes)


def test_siim_as_prepared_tells_tubes_by_the_robust_set(tmp_path):
    make_siim_prepared(tmp_path)
    rows = read_siim(tmp_path)
    group_of = dict(zip(rows.images, (rows.group_names[group] for group in rows.groups), strict=True))
    assert group_of == {
        "train_set/0/a.dcm": "no pneumothorax/tube unknown",
        "train_set/1/b.dcm": "pneumothorax/tube unknown",
        "train_set/1/c.dcm": "pneumothorax/tube unknown",
        "full_test_set/0/d.dcm": "no pneumothorax/tube",
        "full_test_set/0/e.dcm": "no pneumothorax/no tube",
        "full_test_set/1/f.dcm": "pneumothorax/no tube",
        "full_test_set/1/g.dcm": "pneumothorax/tube",
    }
    masks = dict(zip(rows.images, rows.masks, strict=True))
    assert (masks["train_set/0/a.dcm"], masks["train_set/1/b.dcm"]) == ("all_masks/a.png", "")
    put(tmp_path, "robust_test_set/0/z.dcm")
    with pytest.raises(UserError, match=r"full_test_set/0: does not hold the pictures of"):
        read_siim(tmp_path)


def test_siim_says_what_to_do_about_the_pickle_and_without_tubes(tmp_path):
    make_siim_kaggle(tmp_path)
    (tmp_path / "cxr_tube_dict.json").unlink()
    with pytest.raises(UserError, match=r"no cxr_tube_dict\.json"):
        read_siim(tmp_path)
    put(tmp_path, "cxr_tube_dict.pkl", content=pickle.dumps({"c": False, "d": True}))
    with pytest.raises(UserError, match=r"python -m sightline\.data\.pickles .*cxr_tube_dict\.pkl"):
        read_siim(tmp_path)
    pickle_to_json(tmp_path / "cxr_tube_dict.pkl", tmp_path / "cxr_tube_dict.json")
    assert len(read_siim(tmp_path).where("test")) == 2


def test_siim_names_the_line_of_a_picture_that_is_not_there(tmp_path):
    make_siim_kaggle(tmp_path)
    (tmp_path / "dicom-images-train/c1/c2/c.dcm").unlink()
    with pytest.raises(UserError, match=r"train-rle\.csv:5: c\.dcm is in no folder"):
        read_siim(tmp_path)


def test_siim_masks_come_from_all_runs_down_the_columns(tmp_path):
    make_siim_kaggle(tmp_path)
    assert write_masks(tmp_path) == 5
    rows = read_siim(tmp_path)
    mask = np.asarray(read_mask(tmp_path / "all_masks/b.png"))
    assert mask.shape == (1024, 1024)
    assert np.argwhere(mask).tolist() == [[1, 0], [2, 0], [5, 0], [9, 0]]  # the last from the second line
    assert not np.asarray(read_mask(tmp_path / "all_masks/a.png")).any()
    assert all(rows.masks)
    put(tmp_path, "train-rle.csv", content="ImageId, EncodedPixels\na, 1048570 10\n")
    with pytest.raises(UserError, match=r"train-rle\.csv:2: '1048570 10' are no runs"):
        write_masks(tmp_path)


def write_dicom(path: Path, pixels: np.ndarray, **tags) -> Path:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.Rows, data.Columns = pixels.shape[:2]
    data.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    data.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = 8 * pixels.itemsize
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    data.HighBit = data.BitsStored - 1
    data.save_as(path, enforce_file_format=True)
    return path


RAMP = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


@pytest.mark.parametrize(
    ("pixels", "tags", "expected"),
    [
        (RAMP, {}, RAMP),
        (RAMP, {"PhotometricInterpretation": "MONOCHROME1"}, 255 - RAMP),
        (RAMP.astype(np.uint16) * 16, {"BitsStored": 12}, np.round(RAMP * (255 / 252))),  # stretched to what is there
        (RAMP.astype(np.uint16) * 256, {}, np.round(RAMP * (255 / 252))),
        (RAMP.astype(np.int16) - 100, {}, np.round(RAMP * (255 / 252))),
        (RAMP.astype(np.uint16), {"BitsStored": 12, "WindowCenter": 128, "WindowWidth": 256}, RAMP),
        (RAMP.astype(np.uint16), {"WindowCenter": [65, 9], "WindowWidth": [2, 9]}, np.where(RAMP > 64, 255, 0)),
        (
            RAMP.astype(np.uint16),
            {"RescaleSlope": 2, "RescaleIntercept": -10, "WindowCenter": 246, "WindowWidth": 511},
            RAMP,
        ),
        (np.full((8, 8), 700, np.uint16), {}, np.zeros((8, 8))),
    ],
    ids=["8 bits", "inverted", "12 bits", "16 bits", "signed", "window", "narrow window", "rescaled", "one shade"],
)
def test_dicom_becomes_rgb(pixels, tags, expected, tmp_path):
    pytest.importorskip("pydicom")
    path = write_dicom(tmp_path / "a.dcm", pixels, **tags)
    for source in (path, io.BytesIO(path.read_bytes())):
        image = read_dicom(source)
        assert image.mode == "RGB"
        shades = np.asarray(image)
        assert (shades == shades[..., :1]).all()
        assert (
            np.abs(shades[..., 0] - expected).max() <= 1
            if "RescaleSlope" in tags
            else (shades[..., 0] == expected).all()
        )


def test_dicom_is_read_when_compressed_as_siim_is(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    path = write_dicom(tmp_path / "a.dcm", RAMP)
    compressed = io.BytesIO()
    Image.fromarray(RAMP).save(compressed, "JPEG", quality=95)
    data = pydicom.dcmread(path)
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
    data.PixelData = pydicom.encaps.encapsulate([compressed.getvalue()])
    data.save_as(path)
    shades = np.asarray(read_dicom(path))[..., 0].astype(int)
    assert np.abs(shades - RAMP).max() <= 2


def test_dicom_in_colour_stays_as_it_is(tmp_path):
    pytest.importorskip("pydicom")
    colours = np.stack([RAMP, RAMP.T, 255 - RAMP], axis=2)
    assert np.array_equal(np.asarray(read_dicom(write_dicom(tmp_path / "a.dcm", colours))), colours)


def test_what_is_no_dicom_picture_is_refused(tmp_path):
    pytest.importorskip("pydicom")
    put(tmp_path, "a.dcm")
    with pytest.raises(UserError, match=r"a\.dcm: not a DICOM picture"):
        read_dicom(tmp_path / "a.dcm")
    with pytest.raises(UserError, match=r"b\.dcm: no such file"):
        read_dicom(tmp_path / "b.dcm")
    several = write_dicom(tmp_path / "c.dcm", RAMP, NumberOfFrames=2, PixelData=RAMP.tobytes() * 2)
    with pytest.raises(UserError, match=r"MONOCHROME2 of 2 x 8 x 8"):
        read_dicom(several)


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pip install 'sightline\[medical\]'"):
        read_dicom(tmp_path / "a.dcm")


# ---- ImageNet --------------------------------------------------------------------------------------------------------


def test_the_thousand_classes_are_those_of_the_samples():
    with zipfile.ZipFile(shared("data", "imagenet1k_samples.zip")) as archive:
        lines = archive.read("samples.csv").decode().splitlines()[1:]
    assert {line.split(",")[1]: int(line.split(",")[2]) for line in lines} == imagenet_labels()


def test_the_thousand_classes_are_sorted_and_named_apart():
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
    assert any("1 pictures of the test split have no box" in note for note in rows.notes)
    assert any("3 of the 1,000" in note for note in rows.notes)


def test_imagenet_as_unpacked_from_kaggle_finds_the_boxes_beside_the_data(tmp_path):
    make_imagenet(tmp_path / "ILSVRC/Data/CLS-LOC")
    (tmp_path / "ILSVRC/Data/CLS-LOC/Annotations").rename(tmp_path / "ILSVRC/Annotations")
    assert sum(len(boxes) for boxes in read_imagenet(tmp_path).boxes) == 2


def test_imagenet_without_annotations_has_no_boxes(tmp_path):
    make_imagenet(tmp_path)
    (tmp_path / "Annotations").rename(tmp_path / "elsewhere")
    assert read_imagenet(tmp_path).boxes is None


def test_imagenet_with_a_flat_val_or_a_strange_class_is_refused(tmp_path):
    make_imagenet(tmp_path)
    put(tmp_path, "train/n99999999/a.JPEG")
    with pytest.raises(UserError, match=r"train: .*named by its wnid .*n99999999"):
        read_imagenet(tmp_path)
    flat = tmp_path / "flat"
    put(flat, "train/n01440764/a.JPEG", "val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(UserError, match=r"val: .*found ILSVRC2012_val_00000001\.JPEG"):
        read_imagenet(flat)


def test_imagenet9_reads_the_variant_asked_for(tmp_path):
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
    with pytest.raises(UserError, match="mixed_up: no variant"):
        read_imagenet9(tmp_path, "mixed_up")
    with pytest.raises(UserError, match=r"expected val/00_dog to val/08_fish; found mixed_rand, original"):
        read_imagenet9(tmp_path, "only_fg")


def released_map() -> dict[str, int]:
    nine = {str(label): -1 for label in range(1000)}
    for name, ranges in IMAGENET9_RANGES.items():
        for first, last in ranges:
            nine |= {str(label): IMAGENET9_CLASSES.index(name) for label in range(first, last + 1)}
    return nine | {"407": 2, "402": 6}


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


@pytest.mark.parametrize("change", [{"151": 1}, {"151": 12}, {"151": [0]}, {"1000": 0}])
def test_imagenet9_refuses_another_map(change, tmp_path):
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
def test_test_sets_by_wnid_keep_the_thousand_labels(read, tmp_path):
    make_wnids(tmp_path)
    rows = read(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {"n01440764/b.jpg": 0, "n15075141/a.jpg": 999}
    assert len(rows.classes) == 1000
    assert any(note.startswith("2 of the ") for note in rows.notes)


def test_imagenet_s_masks_are_made_from_class_numbers(tmp_path):
    make_imagenet_s(tmp_path / "ImageNetS919")
    rows = read_imagenet_s(tmp_path)
    assert rows.masks is None
    assert any("write_imagenet_s_masks" in note for note in rows.notes)
    assert write_imagenet_s_masks(rows.root) == 2
    rows = read_imagenet_s(tmp_path)
    assert [SPLITS[split] for split in rows.splits] == ["train", "val", "test"]
    assert rows.masks == ["train-semi-mask/n01440764/a.png", "validation-mask/n01440764/b.png", ""]
    mask = np.asarray(read_mask(rows.root / rows.masks[0]))
    assert mask[2:4].all()
    assert mask.sum() == 16  # neither the rest nor the row to be ignored


def test_imagenet_segmentation_is_read_from_files(tmp_path):
    put(tmp_path, "gtsegs_ijcv.mat")
    with pytest.raises(UserError, match=r"gtsegs_ijcv\.mat: MATLAB 7\.3 files are not read.*images/WNID/NAME\.png"):
        read_imagenet_segmentation(tmp_path)
    make_imagenet_segmentation(tmp_path)
    rows = read_imagenet_segmentation(tmp_path)
    assert rows.labels.tolist() == [1000, 0, 134]
    assert rows.masks[1] == "masks/n01440764/a.png"
    assert any(note.startswith("1 classes are not among") for note in rows.notes)
    (tmp_path / "masks/n01440764/a.png").unlink()
    with pytest.raises(UserError, match=r"masks/n01440764/a\.png: no mask"):
        read_imagenet_segmentation(tmp_path)


def test_objectnet_keeps_the_objects_that_imagenet_has(tmp_path):
    make_objectnet(tmp_path / "objectnet-1.0")
    rows = read_objectnet(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {
        "images/alarm_clock/a.png": 530,
        "images/backpack/b.png": 414,
        "images/backpack/c.png": 414,
    }
    assert objectnet_answers(rows.root) == {"alarm_clock": (530, 409), "backpack": (414,)}
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
def test_si_score_names_objects_in_its_own_words(read, folder, tmp_path):
    make_si_score(tmp_path / folder)
    rows = read(tmp_path)
    assert dict(zip(rows.images, rows.labels.tolist(), strict=True)) == {
        "ambulance/1.jpg": 407,
        "pitcher (container)/3.jpg": 725,
        "polar bear/2.jpg": 296,
    }


# ---- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_published_pickles_become_json(protocol, tmp_path):
    subsets = defaultdict(set, {"dog(frisbee)": {"2", "1", "10"}, "cat(sofa)": set()})
    content = {"tubes": {"a": True, "b": False}, "subsets": subsets, ("cat", 3): (1, None, 2.5), 7: frozenset({3, 1})}
    put(tmp_path, "a.pkl", content=pickle.dumps(content, protocol=protocol))
    pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "tubes": {"a": True, "b": False},
        "subsets": {"dog(frisbee)": ["1", "10", "2"], "cat(sofa)": []},
        "cat,3": [1, None, 2.5],
        "7": [1, 3],
    }


class Malicious:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_does_nothing_and_is_refused_by_name(protocol, tmp_path):
    trace = tmp_path / "trace"
    touch = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    for function, arguments, name in (
        (exec, (touch,), "exec"),
        (eval, (touch,), "eval"),
        (os.system, (f"touch {trace}",), r"\.system"),
        (getattr, (dict, "get"), "getattr"),
        (np.float64, (1.0,), r"numpy\.\w+"),
    ):
        put(tmp_path, "a.pkl", content=pickle.dumps({"x": Malicious(function, *arguments)}, protocol=protocol))
        with pytest.raises(UserError, match=rf"a\.pkl: it asks for .*{name}"):
            pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")
    assert not trace.exists()
    assert not (tmp_path / "a.json").exists()


def test_the_pickle_would_have_done_it(tmp_path):
    trace = tmp_path / "trace"
    harm = pickle.dumps(Malicious(exec, f"__import__('pathlib').Path({str(trace)!r}).touch()"))
    pickle.loads(harm)
    assert trace.exists()


def test_a_pickle_leaves_no_trace_on_what_it_may_name(tmp_path):
    # defaultdict, then BUILD with a state for its slots: sets an attribute on whatever stands for defaultdict
    put(
        tmp_path,
        "a.pkl",
        content=b"\x80\x02ccollections\ndefaultdict\nN}U\x05tracek\x01s\x86b.".replace(b"k\x01", b"K\x01"),
    )
    found = read_pickle(tmp_path / "a.pkl")
    put(tmp_path, "b.pkl", content=b"\x80\x02ccollections\ndefaultdict\n.")
    assert found.trace == 1
    assert not hasattr(read_pickle(tmp_path / "b.pkl"), "trace")


def itself() -> list:
    inside: list = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "damaged"),
        (b"not a pickle", "damaged"),
        (pickle.dumps({"a": 1})[:-3], "damaged"),
        (pickle.dumps({"a": b"bytes"}), "(it asks for|a value of type bytes)"),
        (pickle.dumps({1: "a", "1": "b"}), "two of its keys"),
        (pickle.dumps(float("nan")), "no form in JSON"),
        (pickle.dumps({frozenset({1}): 1}), "a key of type frozenset"),
        (pickle.dumps(itself()), "contains itself"),
    ],
)
def test_what_has_no_form_in_json_is_refused(content, told, tmp_path):
    put(tmp_path, "a.pkl", content=content)
    with pytest.raises(UserError, match=told):
        pickle_to_json(tmp_path / "a.pkl", tmp_path / "a.json")


def test_the_converter_runs_as_a_program(tmp_path):
    put(tmp_path, "a.pkl", content=pickle.dumps({"b": {2, 1}}))
    call = [sys.executable, "-m", "sightline.data.pickles", "a.pkl"]
    done = subprocess.run([*call, "a.json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2]}
    done = subprocess.run([*call, "no/a.json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "no/a.json: cannot be written (No such file or directory)\n"
