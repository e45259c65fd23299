"""Every kind of picture a folder may hold."""

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.images import find_images, mask_to_tensor, read_image, read_mask, to_tensor
from sightline.errors import UserError
from sightline.vit import Input


def test_modes(tmp_path):
    ramp = np.linspace(0, 255, 12).round().astype(np.uint8).reshape(3, 4)
    pictures = {
        "grey.png": Image.fromarray(ramp),
        "deep.png": Image.fromarray(ramp.astype(np.uint16) * 257),
        "float.tif": Image.fromarray((ramp / 255).astype(np.float32)),
        "colour.png": Image.fromarray(np.stack([ramp] * 3, axis=2)),
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
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


def test_photographs_stand_upright(tmp_path):
    image = Image.new("RGB", (4, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to view
    image.save(tmp_path / "turned.png", exif=exif)
    upright = read_image(tmp_path / "turned.png")
    assert upright.size == (2, 4)
    assert upright.getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize("size", [(50, 40), (40, 50), (30, 30), (300, 20)])
def test_geometry_is_the_same_for_an_image_and_its_mask(size, generator):
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
    """The recipe of ImageNet: the short side to size / crop, then the centre."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    ours = to_tensor(image, Input(size=(224, 224), crop=0.875))
    by_hand = image.resize((341, 256), Image.Resampling.BICUBIC).crop((58, 16, 282, 240))
    assert torch.equal(ours, torch.from_numpy(np.asarray(by_hand).copy()).permute(2, 0, 1) / 255)


def test_masks_are_read_at_half_brightness(tmp_path):
    Image.fromarray(np.array([[0, 127, 128, 255]], dtype=np.uint8)).save(tmp_path / "mask.png")
    Image.fromarray(np.array([[False, True]])).save(tmp_path / "bits.png")
    assert mask_to_tensor(read_mask(tmp_path / "mask.png"), Input(size=(1, 4))).tolist() == [[False, False, True, True]]
    assert mask_to_tensor(read_mask(tmp_path / "bits.png"), Input(size=(1, 2))).tolist() == [[False, True]]


def test_damage_is_named(tmp_path):
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:700])
    with pytest.raises(UserError, match=r"cut.jpg: a damaged image .* restore it or remove it"):
        read_image(cut)
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(UserError, match=r"text.png: not an image"):
        read_image(tmp_path / "text.png")
    with pytest.raises(UserError, match=r"none.png: no such file"):
        read_image(tmp_path / "none.png")
    wild = Image.fromarray(np.array([[-3.0, 900.0]], dtype=np.float32))
    wild.save(tmp_path / "wild.tif")
    with pytest.raises(UserError, match="pixel values from -3 to 900"):
        read_image(tmp_path / "wild.tif")


def test_folders_are_searched_in_order(tmp_path):
    for name in ("b.png", "a.JPG", "notes.txt", "sub/c.webp"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert [p.name for p in find_images([tmp_path])] == ["a.JPG", "b.png", "c.webp"]
