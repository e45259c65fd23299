"""CUB, Waterbirds and Waterbird200."""

import numpy as np
import pytest

from sightline.data.rows import SPLITS
from sightline.datasets.cub import WATERBIRDS, read_cub, read_waterbird200
from sightline.datasets.waterbirds import read_waterbirds
from sightline.errors import UserError

from .published import BIRDS, counted, make_cub, make_waterbirds, make_waterbirds_in_cub, put


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


def test_cub_without_segmentations_has_no_masks_and_a_note(tmp_path):
    make_cub(tmp_path)
    (tmp_path / "segmentations").rename(tmp_path / "elsewhere")
    rows = read_cub(tmp_path)
    assert rows.masks is None
    assert any("no segmentations" in note for note in rows.notes)


def test_a_listed_image_that_is_missing_is_an_error_with_its_line(tmp_path):
    make_cub(tmp_path)
    (tmp_path / "images" / BIRDS[8][0]).unlink()
    with pytest.raises(UserError, match=r"images\.txt:3: .*c\.jpg does not exist"):
        read_cub(tmp_path)


def test_a_bad_line_in_a_table_of_cub_is_an_error_with_its_line(tmp_path):
    make_cub(tmp_path)
    put(tmp_path, "bounding_boxes.txt", content="3 1 2 3 4\n5 1 two 3 4\n")
    with pytest.raises(UserError, match=r"bounding_boxes\.txt:2: expected 5 numbers"):
        read_cub(tmp_path)
    put(tmp_path, "bounding_boxes.txt", content="3 1 2 3 4\n")
    with pytest.raises(UserError, match=r"bounding_boxes\.txt: no line for image 5 of .*images\.txt:2"):
        read_cub(tmp_path)


def test_waterbirds_groups_are_twice_the_label_plus_the_background(tmp_path):
    make_waterbirds(tmp_path / WATERBIRDS)
    rows = read_waterbirds(tmp_path)
    assert rows.group_names == ("landbird/land", "landbird/water", "waterbird/land", "waterbird/water")
    assert rows.groups.tolist() == [2, 3, 3, 1]
    assert [SPLITS[split] for split in rows.splits] == ["test", "train", "train", "val"]
    assert rows.boxes is rows.masks is rows.keypoints is None
    assert any(note.startswith("images of landbirds (Eastern Towhee") for note in rows.notes)


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
    ("old", "new", "message"),
    [
        ("9,021.Eastern_Towhee/d.jpg,0,", "9,021.Eastern_Towhee/d.jpg,2,", r"metadata\.csv:5: y is '2'"),
        ("d.jpg", "lost.jpg", r"metadata\.csv:5: .*lost\.jpg does not exist"),
        (",split,", ",part,", r"metadata\.csv:1: column 'split' is missing; found img_id"),
        ("9,021", "021", r"metadata\.csv:5: 5 cells for 6 columns"),
    ],
)
def test_errors_in_the_table_of_waterbirds_name_the_line(old, new, message, tmp_path):
    make_waterbirds(tmp_path)
    table = tmp_path / "metadata.csv"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        read_waterbirds(tmp_path)


def test_waterbird200_has_the_species_and_split_of_cub_on_other_images(tmp_path):
    make_waterbirds_in_cub(tmp_path)
    rows, cub = read_waterbird200(tmp_path / WATERBIRDS), read_cub(tmp_path)
    assert rows.images == [image.replace("images/", f"{WATERBIRDS}/") for image in cub.images]
    assert rows.classes == cub.classes
    assert np.array_equal(rows.labels, cub.labels)
    assert np.array_equal(rows.splits, cub.splits)
    assert rows.masks == cub.masks
    assert any("only the test split" in note for note in rows.notes)
