"""`sightline convert`: published files are converted into those that the readers need."""

import json
import pickle
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from sightline.config import CONVERTIBLE
from sightline.data.images import read_image, read_mask
from sightline.data.layouts import LAYOUTS
from sightline.data.rows import read_rows
from sightline.datasets.convert import CONVERTERS, convert
from sightline.errors import UserError
from tests.commands import typed

from .published import (
    animal_subsets,
    make_imagenet_s,
    make_metashift_animals,
    make_metashift_indoor_outdoor,
    make_siim_kaggle,
    put,
)

NAMES = ("n01440764_18", "n02012849_7", "n01440764_2")
WNIDS = ("n01440764", "n02012849", "n01440764")
RNG = np.random.default_rng(0)
PIXELS = [RNG.integers(0, 256, (5 + n, 7, 3), dtype=np.uint8) for n in range(3)]
MASKS = [RNG.integers(0, 2, (5 + n, 7), dtype=np.uint8) for n in range(3)]


def write_mat(file: Path, masks=MASKS, pixels=PIXELS, ids=NAMES, targets=WNIDS) -> Path:
    """A small gtsegs_ijcv.mat: columns of references, arrays and text as MATLAB stores them."""
    h5py = pytest.importorskip("h5py")
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as content:
        references = content.create_group("#refs#")

        def refer(array):
            return references.create_dataset(str(len(references)), data=array).ref

        def cell(members):
            return references.create_dataset(str(len(references)), data=np.array([members], dtype=h5py.ref_dtype)).ref

        def text(word):
            return refer(np.frombuffer(word.encode("utf-16-le"), np.uint16)[:, None])

        columns = {
            "img": [refer(image.transpose(2, 1, 0)) for image in pixels],
            "gt": [
                cell([refer(annotation.T) for annotation in (mask if isinstance(mask, list) else [mask])])
                for mask in masks
            ],
            "id": [text(word) for word in ids or ()],
            "target": [text(word) for word in targets or ()],
        }
        for name, column in columns.items():
            if column:
                content[f"value/{name}"] = np.array([column], dtype=h5py.ref_dtype).T
    return file


def test_every_convertible_layout_has_a_reader():
    assert set(get_args(CONVERTIBLE)) == set(CONVERTERS) <= set(LAYOUTS)


# ---- ImageNet-Segmentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [WNIDS, None])
def test_the_matlab_file_becomes_identical_images_and_masks(targets, tmp_path):
    file = write_mat(tmp_path / "gtsegs_ijcv.mat", targets=targets)
    for given in (file, tmp_path):
        with pytest.raises(UserError, match=rf"convert it first: `sightline convert imagenet-segmentation {file}`"):
            read_rows(given, layout="imagenet-segmentation")
    assert convert("imagenet-segmentation", tmp_path) == [f"{tmp_path}/images and masks: 3 images and their masks"]
    rows = read_rows(tmp_path, layout="imagenet-segmentation")
    assert sorted(rows.images) == sorted(f"images/{wnid}/{name}.png" for name, wnid in zip(NAMES, WNIDS, strict=True))
    for name, wnid, pixels, mask in zip(NAMES, WNIDS, PIXELS, MASKS, strict=True):
        row = rows.images.index(f"images/{wnid}/{name}.png")
        assert rows.classes[rows.labels[row]] == {"n01440764": "tench", "n02012849": "crane (bird)"}[wnid]
        assert np.array_equal(np.asarray(read_image(rows.image_path(row))), pixels)
        assert np.array_equal(np.asarray(read_mask(rows.root / rows.masks[row])) > 0, mask == 1)


def test_images_without_a_class_are_read_for_their_masks(tmp_path):
    made = convert("imagenet-segmentation", write_mat(tmp_path / "gtsegs_ijcv.mat", ids=None, targets=None))
    assert made[1] == "3 of them have no class in the file: they can evaluate masks, not predictions"
    rows = read_rows(tmp_path, layout="imagenet-segmentation")
    assert rows.images == [f"images/unknown/0000{number}.png" for number in range(3)]
    assert {rows.classes[label] for label in rows.labels} == {"unknown"}
    assert np.array_equal(np.asarray(read_mask(tmp_path / rows.masks[1])) > 0, MASKS[1] == 1)
    assert any("the class of some images is unknown" in note for note in rows.notes)


def test_the_first_of_several_annotations_is_used_and_reported(tmp_path):
    file = write_mat(tmp_path / "gtsegs_ijcv.mat", masks=[[MASKS[0], 1 - MASKS[0]], *MASKS[1:]])
    assert "1 were annotated several times: the first mask is used, as in the papers" in convert(
        "imagenet-segmentation", file
    )
    assert np.array_equal(np.asarray(read_mask(tmp_path / "masks/n01440764/n01440764_18.png")) > 0, MASKS[0] == 1)


def test_converted_files_are_not_overwritten(tmp_path):
    file = write_mat(tmp_path / "gtsegs_ijcv.mat")
    convert("imagenet-segmentation", file)
    with pytest.raises(UserError, match=r"images: exists already; remove it to convert gtsegs_ijcv\.mat again"):
        convert("imagenet-segmentation", file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": [MASKS[0], MASKS[0], MASKS[2]]}, "image 1 of value/img .*a mask of the image's size"),
        ({"masks": [MASKS[0], MASKS[1] * 3, MASKS[2]]}, "image 1 .*with values 0 and 1 only"),
        ({"pixels": [*PIXELS[:2], PIXELS[2].astype(float)]}, "image 2 .*8-bit RGB, found 3 channels of float64"),
        ({"masks": MASKS[:2]}, "as many value/gt as value/img"),
        ({"masks": [], "pixels": PIXELS}, "expected value/img and value/gt; found #refs#, value"),
        ({"ids": ("n01440764_18",) * 3, "targets": ("n01440764",) * 3}, "two images have this name"),
    ],
)
def test_a_file_that_differs_from_the_published_one_leaves_no_converted_folder(change, message, tmp_path):
    file = write_mat(tmp_path / "gtsegs_ijcv.mat", **change)
    with pytest.raises(UserError, match=message):
        convert("imagenet-segmentation", file)
    assert not (tmp_path / "images").exists()
    file = write_mat(tmp_path / "gtsegs_ijcv.mat")  # nothing is left that would prevent a conversion
    convert("imagenet-segmentation", file)
    assert len(read_rows(tmp_path, layout="imagenet-segmentation")) == 3


def test_names_in_the_file_cannot_lead_out_of_the_folder(tmp_path):
    file = write_mat(tmp_path / "data/gtsegs_ijcv.mat", ids=("../../a", "/etc/b", "n02012849_7"), targets=None)
    convert("imagenet-segmentation", file)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.png")) == [
        f"data/{kind}/{name}.png"
        for kind in ("images", "masks")
        for name in ("n02012849/n02012849_7", "unknown/00000", "unknown/00001")
    ]


def test_a_file_that_is_not_matlab_and_a_missing_extra_are_errors(tmp_path, monkeypatch):
    put(tmp_path, "gtsegs_ijcv.mat")
    pytest.importorskip("h5py")
    with pytest.raises(UserError, match=r"not a MATLAB 7\.3 file"):
        convert("imagenet-segmentation", tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"pip install 'sightline\[matlab\]'"):
        convert("imagenet-segmentation", tmp_path)


# ---- the others ------------------------------------------------------------------------------------------------------


def test_siim_tube_labels_and_masks_are_converted(tmp_path):
    make_siim_kaggle(tmp_path)
    (tmp_path / "cxr_tube_dict.json").unlink()
    put(tmp_path, "cxr_tube_dict.pkl", content=pickle.dumps({"c": False, "d": True}))
    code, out, err = typed("convert", "siim", tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{tmp_path}/cxr_tube_dict.json", f"{tmp_path}/all_masks: 5 masks"]
    rows = read_rows(tmp_path, layout="siim")
    assert len(rows.split_indices("test")) == 2
    assert all(rows.masks)


def test_imagenet_s_masks_are_converted(tmp_path):
    make_imagenet_s(tmp_path / "ImageNetS919")
    code, out, _ = typed("convert", "imagenet-s", tmp_path)
    assert (code, out) == (0, f"{tmp_path}: 2 masks\n")
    assert read_rows(tmp_path, layout="imagenet-s").masks[:2] == [
        "train-semi-mask/n01440764/a.png",
        "validation-mask/n01440764/b.png",
    ]


def test_metashift_lists_are_converted(tmp_path):
    make_metashift_animals(tmp_path)
    (tmp_path / "full-candidate-subsets.json").unlink()
    subsets = {name: set(images) for name, images in animal_subsets().items()}
    put(tmp_path, "full-candidate-subsets.pkl", content=pickle.dumps(subsets))
    with pytest.raises(UserError, match=f"`sightline convert metashift-animals {tmp_path}`"):
        read_rows(tmp_path, layout="metashift-animals")
    code, out, _ = typed("convert", "metashift-animals", tmp_path)
    assert (code, out) == (0, f"{tmp_path}/full-candidate-subsets.json\n")
    assert len(read_rows(tmp_path, layout="metashift-animals:3")) > 0

    folder = tmp_path / "indoor_outdoor"
    make_metashift_indoor_outdoor(folder)
    put(folder, "imageID_to_group.pkl", content=pickle.dumps({"1": ["cat(indoor)"]}))
    assert typed("convert", "metashift-indoor-outdoor", folder)[0] == 0
    assert json.loads((folder / "imageID_to_group.json").read_text()) == {"1": ["cat(indoor)"]}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("imagenet-s", "expected train-semi-segmentation, validation-segmentation"),
        ("imagenet-segmentation", "expected gtsegs_ijcv.mat"),
        ("metashift-animals", "expected full-candidate-subsets.pkl"),
        ("metashift-indoor-outdoor", "expected imageID_to_group.pkl"),
        ("siim", "expected train-rle.csv or cxr_tube_dict.pkl"),
    ],
)
def test_a_wrong_folder_is_an_error_with_what_was_expected_and_found(layout, expected, tmp_path):
    put(tmp_path, "holiday/1.jpg")
    code, _, err = typed("convert", layout, tmp_path)
    assert code == 2
    assert expected in err
    assert "holiday" in err
    assert len(err.splitlines()) == 1
    code, _, err = typed("convert", layout, tmp_path / "nothing")
    assert (code, "nothing" in err) == (2, True)
