"""SIIM-ACR, and reading DICOM."""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.dicom import read_dicom
from sightline.data.images import read_mask
from sightline.datasets.pickles import pickle_to_json
from sightline.datasets.siim import read_siim, write_masks
from sightline.errors import UserError

from .published import (
    counted,
    make_siim_kaggle,
    make_siim_prepared,
    put,
)


def test_siim_from_kaggle_uses_the_images_with_tube_labels_as_test_split(tmp_path):
    make_siim_kaggle(tmp_path)
    rows = read_siim(tmp_path)
    assert counted(rows, "group") == {
        ("train", "no pneumothorax/tube unknown"): 2,
        ("train", "pneumothorax/tube unknown"): 1,
        ("test", "pneumothorax/no tube"): 1,
        ("test", "no pneumothorax/tube"): 1,
    }
    assert rows.images[0] == "dicom-images-train/a1/a2/a.dcm"
    assert "images without a label, left out: 1" in rows.notes
    assert "images with a tube label and no class label, left out: 1" in rows.notes


def test_siim_as_prepared_derives_tubes_from_the_robust_test_set(tmp_path):
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
    assert "no mask for 5 of the images" in rows.notes
    put(tmp_path, "robust_test_set/0/z.dcm")
    with pytest.raises(UserError, match=r"full_test_set/0: does not contain exactly the images of"):
        read_siim(tmp_path)


def test_siim_without_tube_labels_or_with_the_pickle_only_is_an_error_with_the_command(tmp_path):
    make_siim_kaggle(tmp_path)
    (tmp_path / "cxr_tube_dict.json").unlink()
    with pytest.raises(UserError, match=r"cxr_tube_dict\.json, .* is missing.*`sightline convert siim .*`"):
        read_siim(tmp_path)
    put(tmp_path, "cxr_tube_dict.pkl", content=pickle.dumps({"c": False, "d": True}))
    with pytest.raises(UserError, match=r"cxr_tube_dict\.pkl: convert it first: `sightline convert siim "):
        read_siim(tmp_path)
    pickle_to_json(tmp_path / "cxr_tube_dict.pkl", tmp_path / "cxr_tube_dict.json")
    assert len(read_siim(tmp_path).split_indices("test")) == 2


def test_a_missing_siim_image_is_an_error_with_its_line(tmp_path):
    make_siim_kaggle(tmp_path)
    (tmp_path / "dicom-images-train/c1/c2/c.dcm").unlink()
    with pytest.raises(UserError, match=r"train-rle\.csv:5: c\.dcm is in no folder"):
        read_siim(tmp_path)


def test_siim_masks_are_decoded_from_all_runs_column_by_column(tmp_path):
    make_siim_kaggle(tmp_path)
    assert any("`sightline convert siim " in note for note in read_siim(tmp_path).notes)
    assert write_masks(tmp_path) == 5
    rows = read_siim(tmp_path)
    mask = np.asarray(read_mask(tmp_path / "all_masks/b.png"))
    assert mask.shape == (1024, 1024)
    assert np.argwhere(mask).tolist() == [[1, 0], [2, 0], [5, 0], [9, 0]]  # the last from the second line
    assert not np.asarray(read_mask(tmp_path / "all_masks/a.png")).any()
    assert all(rows.masks)
    put(tmp_path, "train-rle.csv", content="ImageId, EncodedPixels\na, 1048570 10\n")
    with pytest.raises(UserError, match=r"train-rle\.csv:2: '1048570 10' is not a run-length encoding"):
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


def test_dicom_with_jpeg_compression_as_in_siim_is_read(tmp_path):
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


def test_dicom_in_colour_is_unchanged(tmp_path):
    pytest.importorskip("pydicom")
    colours = np.stack([RAMP, RAMP.T, 255 - RAMP], axis=2)
    assert np.array_equal(np.asarray(read_dicom(write_dicom(tmp_path / "a.dcm", colours))), colours)


def test_a_file_that_is_not_a_dicom_image_is_an_error(tmp_path):
    pytest.importorskip("pydicom")
    put(tmp_path, "a.dcm")
    with pytest.raises(UserError, match=r"a\.dcm: not a readable DICOM image"):
        read_dicom(tmp_path / "a.dcm")
    with pytest.raises(UserError, match=r"b\.dcm: no such file"):
        read_dicom(tmp_path / "b.dcm")
    several = write_dicom(tmp_path / "c.dcm", RAMP, NumberOfFrames=2, PixelData=RAMP.tobytes() * 2)
    with pytest.raises(UserError, match=r"MONOCHROME2 of 2 x 8 x 8"):
        read_dicom(several)


def test_the_error_without_pydicom_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pip install 'sightline\[medical\]'"):
        read_dicom(tmp_path / "a.dcm")


@pytest.mark.parametrize("image", ["../outside", "a/../../outside", "{outside}"])
def test_masks_are_not_written_outside_their_folder(tmp_path, image):
    image = image.format(outside=tmp_path / "outside")
    root = tmp_path / "siim"
    put(root, "train-rle.csv", content=f"ImageId, EncodedPixels\ngood, 0 10\n{image}, 0 10\n")
    with pytest.raises(UserError, match=r"outside.png: is outside .*all_masks, where it was to be written"):
        write_masks(root)
    assert [path.name for path in tmp_path.rglob("*.png")] == [], "refused before anything is written"
