"""Reading and preprocessing image files of all kinds."""

import io
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from sightline.data.formats import is_image
from sightline.data.images import (
    Preprocess,
    ResizeCrop,
    decode,
    find_images,
    mask_to_tensor,
    open_file,
    read_image,
    read_mask,
    read_row_image,
    read_row_mask,
    to_tensor,
    to_upright_rgb,
)
from sightline.data.inspection import inspect_image
from sightline.data.rows import Rows, read_folder
from sightline.data.unlabelled import read_unlabelled
from sightline.errors import UserError
from sightline.vit.model import Input
from tests.conftest import shared


def test_modes(tmp_path):
    ramp = np.linspace(0, 255, 12).round().astype(np.uint8).reshape(3, 4)
    images = {
        "grey.png": Image.fromarray(ramp),
        "deep.png": Image.fromarray(ramp.astype(np.uint16) * 257),
        "float.tif": Image.fromarray((ramp / 255).astype(np.float32)),
        "colour.png": Image.fromarray(np.stack([ramp] * 3, axis=2)),
    }
    for name, original in images.items():
        original.save(tmp_path / name)
        image = read_image(tmp_path / name)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image)[..., 0], ramp), name


def test_transparency_becomes_white(tmp_path):
    Image.new("RGBA", (2, 2), (200, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(tmp_path / "palette.png", transparency=0)
    assert read_image(tmp_path / "palette.png").getpixel((0, 0)) == (255, 255, 255)


def test_an_opened_image_is_converted_like_its_file_and_not_modified(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (4, 6, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise[..., :3]).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(noise).save(tmp_path / "clear.png")
    Image.fromarray(noise[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    for name in ("turned.png", "clear.png", "deep.png"):
        with Image.open(tmp_path / name) as image:
            before = np.asarray(image)
            converted = to_upright_rgb(image)
            assert (converted.mode, np.asarray(converted).tolist()) == (
                "RGB",
                np.asarray(read_image(tmp_path / name)).tolist(),
            )
            assert np.array_equal(np.asarray(image), before), name
    with Image.open(tmp_path / "turned.png") as image:
        assert to_upright_rgb(image).size == image.size[::-1]


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (4, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to view
    image.save(tmp_path / "turned.png", exif=exif)
    upright = read_image(tmp_path / "turned.png")
    assert upright.size == (2, 4)
    assert upright.getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize("size", [(50, 40), (40, 50), (30, 30), (300, 20)])
def test_image_and_mask_have_the_same_geometry(size, generator):
    mask = np.zeros((size[1], size[0]), dtype=np.uint8)
    mask[size[1] // 3 : 2 * size[1] // 3, size[0] // 3 : 2 * size[0] // 3] = 255
    expects = Input(size=(32, 48), crop=0.875)
    image = to_tensor(Image.fromarray(np.stack([mask] * 3, axis=2)), expects)
    fitted = mask_to_tensor(Image.fromarray(mask), expects)
    assert image.shape == (3, 32, 48)
    assert fitted.dtype == torch.bool
    assert ((image[0] > 0.5) != fitted).float().mean() < 0.05
    assert image.min() >= 0
    assert image.max() <= 1


def test_resize_then_centre_crop():
    """The ImageNet evaluation recipe: short side to size / crop, then a centre crop."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    ours = to_tensor(image, Input(size=(224, 224), crop=0.875))
    by_hand = image.resize((341, 256), Image.Resampling.BICUBIC).crop((58, 16, 282, 240))
    assert torch.equal(ours, torch.from_numpy(np.asarray(by_hand).copy()).permute(2, 0, 1) / 255)


def test_an_odd_margin_is_rounded_to_the_even_pixel():
    """3 pixels too wide: 2 are cropped on the left; 1 too wide: none."""
    for width, left in ((227, 2), (225, 0)):
        pixels = np.random.default_rng(0).integers(0, 255, (224, width, 3), dtype=np.uint8)
        ours = to_tensor(Image.fromarray(pixels), Input(size=(224, 224)))
        assert torch.equal(ours, torch.from_numpy(pixels[:, left : left + 224].copy()).permute(2, 0, 1) / 255)


def test_masks_are_thresholded_at_half_brightness(tmp_path):
    Image.fromarray(np.array([[0, 127, 128, 255]], dtype=np.uint8)).save(tmp_path / "mask.png")
    Image.fromarray(np.array([[False, True]])).save(tmp_path / "bits.png")
    assert mask_to_tensor(read_mask(tmp_path / "mask.png"), Input(size=(1, 4))).tolist() == [[False, False, True, True]]
    assert mask_to_tensor(read_mask(tmp_path / "bits.png"), Input(size=(1, 2))).tolist() == [[False, True]]


def test_unreadable_files_are_explained(tmp_path):
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:700])
    with pytest.raises(UserError, match=r"cut.jpg: damaged image .* restore or remove it"):
        read_image(cut)
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(UserError, match=r"text.png: not a readable image"):
        read_image(tmp_path / "text.png")
    with pytest.raises(UserError, match=r"none.png: no such file"):
        read_image(tmp_path / "none.png")
    wild = Image.fromarray(np.array([[-3.0, 900.0]], dtype=np.float32))
    wild.save(tmp_path / "wild.tif")
    with pytest.raises(UserError, match="pixel values from -3 to 900"):
        read_image(tmp_path / "wild.tif")


def test_folders_are_searched_recursively_in_sorted_order(tmp_path):
    for name in ("b.png", "a.JPG", "notes.txt", "sub/c.webp"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert [p.name for p in find_images([tmp_path])] == ["a.JPG", "b.png", "c.webp"]


def write_rows(folder: Path, count: int = 10, *, masks: bool = True, seed: int = 0) -> Rows:
    """Noise images of many sizes with all annotations; the last image has no mask."""
    generator = np.random.default_rng(seed)
    images, mask_files, boxes, keypoints = [], [], [], []
    for i in range(count):
        h, w = (int(side) for side in generator.integers(24, 60, 2))
        pixels = generator.integers(0, 256, (h // 4, w // 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((w, h), Image.Resampling.BILINEAR).save(folder / f"{i}.png")
        mask = np.zeros((h, w), dtype=bool)
        mask[h // 4 : h // 2, w // 3 : w - 2] = True
        Image.fromarray(mask).save(folder / f"{i}-mask.png")
        images.append(f"{i}.png")
        mask_files.append(f"{i}-mask.png" if i < count - 1 else "")
        boxes.append(np.array([[w // 3, h // 4, w - 2, h // 2], [0, 0, 5, 5]][: i % 3], dtype=np.float32))
        keypoints.append([[w / 2, h / 2, 1], [0, 0, 0]])
    return Rows(
        name="noise",
        root=folder,
        images=images,
        labels=np.arange(count) % 3,
        classes=("a", "b", "c"),
        splits=np.zeros(count, dtype=np.int8),
        groups=np.arange(count) % 2,
        group_names=("x", "y"),
        masks=mask_files if masks else None,
        boxes=boxes,
        keypoints=np.array(keypoints, dtype=np.float32),
        keypoint_names=("middle", "gone"),
    )


def one_row(folder: Path, image: str, **known) -> Rows:
    return Rows("one", folder, [image], np.zeros(1, dtype=np.int64), ("a",), np.zeros(1, dtype=np.int8), **known)


def zipped(folder: Path, name: str = "pack.zip") -> Path:
    """All PNG files of a folder in an archive beside them, under images/."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".png"]
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path in files:
            archive.write(path, f"images/{path.name}")
    return folder / name


@pytest.mark.parametrize("crop", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("size", [(224, 224), (32, 48), (31, 17)])
def test_decode_equals_to_tensor_bit_for_bit(tmp_path, crop, size):
    rows = write_rows(tmp_path, 6)
    for resample in ("bicubic", "bilinear"):
        expects = Input(size=size, crop=crop, resample=resample)
        for i in range(6):
            sample = decode(rows, i, Preprocess.of(expects))
            assert sample.image.dtype == torch.uint8
            assert torch.equal(sample.image.float() / 255, to_tensor(read_image(tmp_path / rows.images[i]), expects))
            if i < 5:
                assert torch.equal(sample.mask, mask_to_tensor(read_mask(tmp_path / rows.masks[i]), expects))
    assert sample.mask is None


def test_decode_agrees_with_to_tensor_on_photographs():
    root = shared("data", "cub224.zip").parent
    path = "images/017.Cardinal/Cardinal_0001_17057.webp"
    rows = one_row(root, f"cub224.zip/{path}", masks=[f"cub224.zip/{path[:-5].replace('images', 'masks', 1)}.png"])
    expects = Input(size=(224, 224), crop=0.9)
    with zipfile.ZipFile(root / "cub224.zip") as archive:
        image = read_image(io.BytesIO(archive.read(path)))
    sample = decode(rows, 0, Preprocess.of(expects))
    assert torch.equal(sample.image.float() / 255, to_tensor(image, expects))
    assert 0.05 < sample.mask.float().mean() < 0.9


def test_squash_shows_the_whole_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    rows = one_row(tmp_path, "wide.png")
    whole = decode(rows, 0, Preprocess((16, 16), fit="squash")).image
    by_hand = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BICUBIC))
    assert torch.equal(whole, torch.from_numpy(by_hand.copy()).permute(2, 0, 1))
    centre = decode(rows, 0, Preprocess((16, 16), fit="squash", crop=0.8)).image
    larger = decode(rows, 0, Preprocess((20, 20), fit="squash")).image
    assert torch.equal(centre, larger[:, 2:18, 2:18])


@pytest.mark.parametrize(
    "preprocess", [Preprocess((32, 48)), Preprocess((48, 32), "squash"), Preprocess((24, 24), crop=0.8)]
)
@pytest.mark.parametrize("size", [(60, 90), (90, 60), (48, 200)])
def test_mask_box_and_keypoint_stay_on_the_object(tmp_path, preprocess, size):
    """A white rectangle: mask, box and centre still fit it after any geometry."""
    h, w = size
    inside = np.zeros((h, w), dtype=np.uint8)
    top, left, bottom, right = h // 2 - 9, w // 2 - 6, h // 2 + 12, w // 2 + 9
    inside[top:bottom, left:right] = 255
    Image.fromarray(inside).save(tmp_path / "object.png")
    rows = one_row(
        tmp_path,
        "object.png",
        masks=["object.png"],
        boxes=[np.array([[left, top, right, bottom]], dtype=np.float32)],
        keypoints=np.array([[[(left + right - 1) / 2, (top + bottom - 1) / 2, 1]]], dtype=np.float32),
    )
    sample = decode(rows, 0, preprocess)
    bright = sample.image[0] >= 128
    assert (bright != sample.mask).float().mean() < 0.05
    y, x = torch.nonzero(bright, as_tuple=True)
    found = torch.tensor([x.min(), y.min(), x.max() + 1, y.max() + 1])
    assert (sample.boxes[0] - found).abs().max() <= 1
    assert (sample.keypoints[0, :2] - torch.stack([x.float().mean(), y.float().mean()])).abs().max() <= 0.6
    assert sample.keypoints[0, 2] == 1
    assert sample.size == (w, h)


def test_boxes_and_keypoints_outside_the_crop():
    """200×100 pixels to 50×50: the left and right quarters are cropped away."""
    geometry = ResizeCrop.of((200, 100), Preprocess((50, 50)))
    boxes = geometry.boxes(np.array([[0, 0, 100, 40], [0, 0, 50, 100], [150, 20, 200, 30], [60, 10, 80, 30]]))
    assert boxes[0].tolist() == [0, 0, 25, 20]
    assert boxes[1:3].isnan().all()
    assert boxes[3].tolist() == [5, 5, 15, 15]
    points = geometry.keypoints(np.array([[50, 0, 1], [49, 50, 1], [149, 99, 1], [150, 50, 1], [100, 50, 0]]))
    assert points[:, 2].tolist() == [1, 0, 1, 0, 0]
    assert points[0, :2].tolist() == [-0.25, -0.25]
    assert (points[points[:, 2] == 0] == 0).all()
    assert geometry.boxes(np.empty(0, dtype=np.float32)).shape == (0, 4)


def test_masks_may_be_coarser_than_their_image_but_not_of_another_aspect_ratio(tmp_path):
    Image.new("RGB", (101, 67), "red").save(tmp_path / "a.png")
    Image.new("L", (50, 33), 255).save(tmp_path / "coarse.png")
    Image.new("L", (67, 101), 255).save(tmp_path / "turned.png")
    assert decode(one_row(tmp_path, "a.png", masks=["coarse.png"]), 0, Preprocess((32, 32))).mask.all()
    rows = one_row(tmp_path, "a.png", masks=["turned.png"])
    with pytest.raises(UserError, match=r"a.png: 101×67 pixels, but its mask turned.png has 67×101"):
        decode(rows, 0, Preprocess((32, 32)))
    assert decode(rows, 0, Preprocess((32, 32)), mask=False).mask is None


def test_images_are_read_from_archives(tmp_path):
    rows = write_rows(tmp_path, 3)
    zipped(tmp_path)
    packed = replace(
        rows,
        images=[f"pack.zip/images/{path}" for path in rows.images],
        masks=[path and f"pack.zip/images/{path}" for path in rows.masks],
    )
    for i in range(3):
        assert read_row_image(packed, i).tobytes() == read_row_image(rows, i).tobytes()
    assert read_row_mask(packed, 0).tobytes() == read_row_mask(rows, 0).tobytes()
    assert read_row_mask(packed, 2) is None
    assert open_file(tmp_path, "0.png") == tmp_path / "0.png"


def test_a_folder_may_be_named_like_a_zip_file(tmp_path):
    (tmp_path / "odd.zip").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "odd.zip" / "a.png")
    assert read_row_image(one_row(tmp_path, "odd.zip/a.png"), 0).size == (2, 2)


def test_a_replaced_archive_is_reopened(tmp_path):
    for colour in ("red", "blue"):
        Image.new("RGB", (2, 2 if colour == "red" else 3), colour).save(tmp_path / "a.png")
        zipped(tmp_path)
        colours = read_row_image(one_row(tmp_path, "pack.zip/images/a.png"), 0).getcolors()
        assert colours[0][1] == ((255, 0, 0) if colour == "red" else (0, 0, 255))


def test_archive_errors_are_explained(tmp_path):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    archive = zipped(tmp_path)
    with pytest.raises(UserError, match=r"pack.zip: no member images/b.png"):
        open_file(tmp_path, "pack.zip/images/b.png")
    with pytest.raises(UserError, match=r"none.zip/a.png: no such file"):
        read_row_image(one_row(tmp_path, "none.zip/a.png"), 0)
    data = bytearray(archive.read_bytes())
    data[60] ^= 255
    (tmp_path / "hurt.zip").write_bytes(data)
    with pytest.raises(UserError, match=r"hurt.zip/images/a.png: damaged archive"):
        read_row_image(one_row(tmp_path, "hurt.zip/images/a.png"), 0)
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(UserError, match=r"text.zip: not a zip archive"):
        open_file(tmp_path, "text.zip/a.png")
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as file:
        file.writestr("a.png", "no image")
    with pytest.raises(UserError, match=r"odd.zip/a.png: not a readable image"):
        read_row_image(one_row(tmp_path, "odd.zip/a.png"), 0)


def test_a_forked_process_reopens_the_archive(tmp_path):
    """A shared handle would share its position, and both would read garbage."""
    rows = write_rows(tmp_path, 8, masks=False)
    zipped(tmp_path)
    packed = replace(rows, images=[f"pack.zip/images/{path}" for path in rows.images])
    expected = [read_row_image(packed, i).tobytes() for i in range(8)]
    child = os.fork()
    if child == 0:
        same = all(read_row_image(packed, i).tobytes() == expected[i] for _ in range(40) for i in range(8))
        os._exit(0 if same else 1)
    for _ in range(40):
        for i in reversed(range(8)):
            assert read_row_image(packed, i).tobytes() == expected[i]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_errors_about_a_mask_name_its_image(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"gone.png: no such file \(the mask of a.png\)"):
        read_row_mask(one_row(tmp_path, "a.png", masks=["gone.png"]), 0)


def test_dicom_files_are_read_from_folders_and_archives(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.SOPClassUID, data.SOPInstanceUID = pydicom.uid.SecondaryCaptureImageStorage, "1.2.3"
    data.Rows, data.Columns = pixels.shape
    data.SamplesPerPixel, data.PixelRepresentation, data.PhotometricInterpretation = 1, 0, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit = 8, 8, 7
    data.PixelData = pixels.tobytes()
    data.save_as(tmp_path / "chest.dcm", enforce_file_format=True)
    with zipfile.ZipFile(tmp_path / "chests.zip", "w") as archive:
        archive.write(tmp_path / "chest.dcm", "chest.dcm")
        archive.write(tmp_path / "chest.dcm", "chest")
        archive.writestr("text.dcm", "hello")
    ward = tmp_path / "data" / "ward"
    ward.mkdir(parents=True)
    for name in ("IM0001", "1.2.840.10008", "DICOMDIR", "notes.txt"):
        shutil.copy(tmp_path / "chest.dcm", ward / name)
    (ward / "README").write_text("hello")
    assert find_images([ward]) == [ward / "1.2.840.10008", ward / "IM0001"]
    assert read_folder(ward.parent).images == ["ward/1.2.840.10008", "ward/IM0001"]
    assert read_unlabelled(ward).images == ["1.2.840.10008", "IM0001"]
    names = ["data/ward/IM0001", "data/ward/1.2.840.10008", "chests.zip/chest"]
    for path in ("chest.dcm", "chests.zip/chest.dcm", *names):
        image = read_row_image(one_row(tmp_path, path), 0)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image)[..., 0], pixels)
        assert inspect_image(one_row(tmp_path, path), 0).kinds == ("DICOM",)
    with pytest.raises(UserError, match=r"chests.zip/text.dcm: not a readable DICOM image"):
        read_row_image(one_row(tmp_path, "chests.zip/text.dcm"), 0)


def test_avif_is_read_where_pillow_can():
    if not features.check("avif"):
        pytest.skip("needs a Pillow with AVIF")
    held = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 30)).save(held, "AVIF")
    assert read_image(io.BytesIO(held.getvalue()), "a.avif").size == (8, 6)
    assert is_image("a.AVIF")
