"""Masks without training: known predictions on made-up keys, real birds, and masks as files."""

import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from sightline.data.images import Preprocess, decode
from sightline.data.rows import Rows
from sightline.errors import UserError
from sightline.sight import Sight, cell_share
from sightline.training.distributed import make_accelerator
from sightline.vit.model import Input
from sightline.vit.weights import load_backbone
from sightline.where.mask_files import write_masks
from sightline.where.saliency import (
    Found,
    TokenCut,
    U2Net,
    coarse_found,
    component_with,
    second_eigenvector,
    tokencut,
)

from ..conftest import shared, small_vit
from ..test_real import birds

GRID = (6, 7)


def blobs(*boxes) -> torch.Tensor:
    """bool [1, 6, 7], True in (left, top, right, bottom)."""
    mask = torch.zeros(1, *GRID, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        mask[:, top:bottom, left:right] = True
    return mask


def keys_of(mask: torch.Tensor, generator, noise: float = 0.05) -> torch.Tensor:
    """[B, 3 heads, N, 8]: one direction inside the mask, another outside, and noise."""
    directions = F.normalize(torch.randn(2, 3, 8, generator=generator), dim=-1)
    directions[1] -= (directions[1] * directions[0]).sum(-1, keepdim=True) * directions[0]
    keys = directions[mask.flatten(1).long()].transpose(1, 2)
    return keys + noise * torch.randn(keys.shape, generator=generator)


def attention_on(mask: torch.Tensor, generator) -> torch.Tensor:
    """[B, 3, N]: more inside the mask, some everywhere."""
    noise = torch.rand(len(mask), 3, mask[0].numel(), generator=generator)
    return 0.01 + 0.001 * noise + 0.02 * mask.flatten(1)[:, None]


# ---- FOUND -----------------------------------------------------------------------------------------------------------


def test_found_measures_dissimilarity_to_the_least_attended_patch(generator):
    mask = torch.cat([blobs((1, 1, 4, 4)), blobs((0, 3, 2, 6), (4, 0, 7, 3))])
    unlike = coarse_found(keys_of(mask, generator), attention_on(mask, generator), GRID)
    assert torch.equal(unlike >= -0.3, mask)
    assert unlike.abs().max() <= 1 + 1e-6


def test_found_weighs_heads_as_published(generator):
    keys = torch.randn(1, 3, 42, 8, generator=generator)
    attention = torch.rand(1, 3, 42, generator=generator) * torch.tensor([1.0, 0.6, 2.0]).view(1, 3, 1)
    k, a = keys[0].double().numpy(), attention[0].double().numpy()
    busy = [(head > a.mean()).mean() for head in a]
    weights = [np.log(sum(busy) / one) for one in busy]
    seed = sum(w * head for w, head in zip(weights, a, strict=True)).argmin()
    patches = np.concatenate([w * head for w, head in zip(weights, k, strict=True)], axis=1)
    lengths = np.linalg.norm(patches, axis=1)
    expected = -(patches @ patches[seed]) / lengths / lengths[seed]
    np.testing.assert_allclose(coarse_found(keys, attention, GRID).flatten().numpy(), expected, atol=1e-5)


def test_found_keeps_fewer_patches_with_a_lower_threshold():
    vit, images = small_vit(), torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    few, many = (Found(vit, alike).look(images).keep for alike in (0.0, 0.5))
    assert (many | ~few).all()
    (unlike,) = Found(vit).maps(images).values()
    assert torch.equal(few, unlike >= 0.5)


# ---- TokenCut --------------------------------------------------------------------------------------------------------


def test_the_eigenvector_is_that_of_the_generalised_problem(generator):
    patches = torch.randn(2, 30, 6, generator=generator)
    ours = second_eigenvector(patches, 0.1).numpy()
    for one, found in zip(F.normalize(patches.double(), dim=-1).numpy(), ours, strict=True):
        edges = np.where(one @ one.T > 0.1, 1.0, 1e-5)
        degrees = np.diag(edges.sum(axis=1))
        values, vectors = scipy.linalg.eigh(degrees - edges, degrees)
        assert values[2] - values[1] > 1e-3, "or the vector is not determined"
        cosine = found @ vectors[:, 1] / np.linalg.norm(found) / np.linalg.norm(vectors[:, 1])
        assert abs(cosine) == pytest.approx(1, abs=1e-9)


def test_tokencut_takes_the_object_and_not_its_surroundings(generator):
    mask = torch.cat([blobs((1, 1, 4, 4)), blobs((3, 0, 7, 2))])
    values, keep = tokencut(keys_of(mask, generator), GRID)
    assert torch.equal(keep, mask)
    assert (values[mask].min() > values[~mask].max()).all()


def test_tokencut_takes_one_object_of_several(generator):
    both = blobs((0, 0, 2, 2), (4, 3, 7, 6))
    keep = tokencut(keys_of(both, generator), GRID)[1]
    assert any(torch.equal(keep, one) for one in (blobs((0, 0, 2, 2)), blobs((4, 3, 7, 6))))


def test_components_are_connected_by_edges_not_corners():
    keep = blobs((0, 0, 2, 2), (2, 2, 4, 4))
    assert torch.equal(component_with(keep, torch.tensor([0])), blobs((0, 0, 2, 2)))
    assert not component_with(keep, torch.tensor([41])).any()


def test_every_where_looks_and_has_a_map_in_0_1():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for where in (Found(small_vit()), TokenCut(small_vit())):
        assert where.look(images).keep.shape == (2, 4, 4)
        for name, each in where.maps(images).items():
            assert name
            assert 0 <= each.min() <= each.max() <= 1


# ---- U2-Net, and birds -----------------------------------------------------------------------------------------------


def mean_iou(found: torch.Tensor, true: torch.Tensor) -> float:
    found, true = found.flatten(1), true.flatten(1)
    return ((found & true).sum(dim=1) / (found | true).sum(dim=1)).mean().item()


@pytest.fixture(scope="module")
def u2net():
    return U2Net(shared("data", "weights", "u2netp.onnx"))


def test_u2net_finds_birds_to_the_pixel(u2net):
    images, masks = birds(Input(), 8, step=131)
    sight = u2net.look(images)
    assert mean_iou(sight.keep_pixels, masks) > 0.6
    assert mean_iou(sight.keep_pixels, masks) > 2 * mean_iou(torch.ones_like(masks), masks)


def test_u2net_does_not_depend_on_the_batch_and_always_keeps_something(u2net):
    images, _ = birds(Input(size=(112, 112)), 1)
    images = torch.cat([torch.zeros(1, 3, 112, 112), images])
    salience = u2net.maps(images)["salience"]
    assert salience.shape == (2, 112, 112)
    assert salience.isfinite().all()
    torch.testing.assert_close(salience[1:2], u2net.maps(images[1:2])["salience"])


@pytest.mark.slow
@torch.no_grad()
def test_unsupervised_masks_are_much_better_than_none():
    """0.42 and 0.41 on 100 training photographs, where everything visible gives 0.16."""
    vit = load_backbone(shared("data", "weights", "dino_s16_reg4.safetensors")).eval()
    images, masks = birds(vit.config.input, 12)
    true = cell_share(masks, (14, 14)) >= 0.5
    everything = mean_iou(torch.ones_like(true), true)
    for where in (Found(vit), TokenCut(vit)):
        assert mean_iou(where.look(images).keep, true) > 1.7 * everything


def test_u2net_reports_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such file"):
        U2Net(tmp_path / "u2net.onnx")
    (tmp_path / "u2net.onnx").write_bytes(b"not a network")
    with pytest.raises(UserError, match="not an ONNX file"):
        U2Net(tmp_path / "u2net.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'sightline\[saliency\]'"):
        U2Net(tmp_path / "u2net.onnx")


# ---- masks as files --------------------------------------------------------------------------------------------------

EXPECTS = Input(size=(32, 32))


class Bright(nn.Module):
    """Sees the bright pixels, and counts the images it was asked about."""

    def __init__(self, level: float = 0.5):
        super().__init__()
        self.level, self.asked = level, 0

    def look(self, images):
        self.asked += len(images)
        return Sight(keep_pixels=images.mean(dim=1) > self.level)

    def maps(self, images):
        return {}

    def extra_repr(self):
        return f"level={self.level}"


@pytest.fixture
def rows(tmp_path):
    """Pictures of several shapes, larger and smaller than the canvas, some in an archive, one of them twice."""
    generator = np.random.default_rng(0)
    (tmp_path / "data" / "a").mkdir(parents=True)
    names = []
    for i, (width, height) in enumerate([(32, 32), (80, 50), (33, 61), (20, 16), (100, 100), (32, 90)]):
        names.append(f"a/{i}.png")
        noise = generator.integers(0, 256, (height // 4 + 1, width // 4 + 1), dtype=np.uint8)
        Image.fromarray(noise).convert("RGB").resize((width, height)).save(tmp_path / "data" / names[-1])
    with zipfile.ZipFile(tmp_path / "data" / "more.zip", "w") as archive:
        archive.write(tmp_path / "data" / "a" / "1.png", "b/1.png")
    Image.new("RGB", (40, 40), "white").save(tmp_path / "beside.png")
    names += ["more.zip/b/1.png", "../beside.png", "a/0.png"]
    n = len(names)
    return Rows("noise", tmp_path / "data", names, np.zeros(n, np.int64), ("a",), np.zeros(n, np.int8))


@pytest.fixture(scope="module")
def accelerator():
    return make_accelerator("cpu")


def test_written_masks_are_read_back_exactly(rows, tmp_path, accelerator):
    where = Bright()
    masked = write_masks(where, rows, EXPECTS, tmp_path / "masks", accelerator, batch=3)
    assert where.asked == 8, "a photo that is there twice is looked at once"
    for i in range(len(rows)):
        sample = decode(masked, i, Preprocess.of(EXPECTS))
        assert torch.equal(sample.mask, sample.image.float().mean(dim=0) / 255 > 0.5), rows.images[i]
    assert masked.masks[0] == masked.masks[-1]
    assert masked.root == rows.root
    assert rows.masks is None


def test_pixels_outside_the_models_crop_are_not_in_the_mask(rows, tmp_path, accelerator):
    masked = write_masks(Bright(level=-1), rows, EXPECTS, tmp_path / "masks", accelerator)
    with Image.open(masked.root / masked.masks[1]) as file:
        assert (file.size, file.mode) == ((80, 50), "1")
        seen = np.asarray(file)
    assert seen[:, 17:65].all()  # 32 of 51 columns, when 50 rows become 32
    assert not seen[:, :15].any()
    assert not seen[:, 67:].any()


def test_masks_are_made_once(rows, tmp_path, accelerator):
    first, second = Bright(), Bright()
    one = write_masks(first, rows, EXPECTS, tmp_path / "masks", accelerator)
    other = write_masks(second, rows, EXPECTS, tmp_path / "masks", accelerator)
    assert (first.asked, second.asked) == (8, 0)
    assert one.masks == other.masks


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty", "other"])
def test_a_damaged_mask_is_made_again(rows, tmp_path, accelerator, damage):
    masked = write_masks(Bright(), rows, EXPECTS, tmp_path / "masks", accelerator)
    file = masked.root / masked.masks[4]
    whole = file.read_bytes()
    middle = whole.index(b"IDAT") + 10
    ruined = {
        "cut": whole[:-20],
        "changed": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
        "empty": b"",
        "other": (masked.root / masked.masks[0]).read_bytes(),  # a whole mask, but of another image
    }
    file.unlink()
    if damage in ruined:
        file.write_bytes(ruined[damage])
    again = Bright()
    write_masks(again, rows, EXPECTS, tmp_path / "masks", accelerator)
    assert again.asked == 1
    assert file.read_bytes() == whole


def test_other_settings_sizes_and_images_make_other_masks(rows, tmp_path, accelerator):
    folder = tmp_path / "masks"
    write_masks(Bright(), rows, EXPECTS, folder, accelerator)
    stricter, larger, later = Bright(0.6), Bright(), Bright()
    write_masks(stricter, rows, EXPECTS, folder, accelerator)
    write_masks(larger, rows, replace(EXPECTS, size=(48, 48)), folder, accelerator)
    assert (stricter.asked, larger.asked) == (8, 8)
    Image.new("RGB", (70, 50), "white").save(rows.root / "a/1.png")
    write_masks(later, rows, EXPECTS, folder, accelerator)
    assert later.asked == 1


def test_other_weights_make_other_masks(rows, tmp_path, accelerator):
    folders = set()
    for seed in (0, 0, 1):
        masked = write_masks(Found(small_vit(seed)), rows.take([0, 1]), EXPECTS, tmp_path / "masks", accelerator)
        folders.add(masked.masks[0])
    assert len(folders) == 2


def test_masks_that_cannot_be_written_are_an_error(rows, tmp_path, accelerator):
    (tmp_path / "masks").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        write_masks(Bright(), rows, EXPECTS, tmp_path / "masks", accelerator)
