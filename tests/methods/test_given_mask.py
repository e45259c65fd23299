"""Early and late masking: where to look is given, by true masks, files, or masks made once by a saliency method."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from sightline.config import EarlyMask, LateMask
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods import given_mask
from sightline.methods.erm import Classifier
from sightline.methods.given_mask import GivenMask, MaskSettings, require_masks, with_masks
from sightline.train import train
from sightline.verify.verify import verify
from sightline.vit.weights import load_backbone, save_backbone
from sightline.what.masked import MaskedViT
from sightline.what.pool import LateMaskedViT

from ..commands import QUICK, typed
from ..conftest import shared, small_vit


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=16, val=8, test=8)


@pytest.fixture(scope="module")
def without_masks(toy, tmp_path_factory) -> Path:
    """The same images and labels, and no mask column."""
    folder = tmp_path_factory.mktemp("bare")
    for split in ("train", "val", "test"):
        shutil.copytree(toy / split, folder / split)
    lines = [line.split(",") for line in (toy / "rows.csv").read_text().splitlines()]
    place = lines[0].index("mask")
    (folder / "rows.csv").write_text("".join(",".join(w[:place] + w[place + 1 :]) + "\n" for w in lines))
    return folder


def small(data: Path, out: Path, kind: type[EarlyMask] = EarlyMask, **changes) -> EarlyMask:
    settings = {"backbone": "random:nano", "epochs": 1, "batch": 8, "workers": 0, "device": "cpu"}
    return kind(data, out=out, **settings | changes)


def predictions_of(folder: Path) -> bytes:
    return (folder / "predictions" / "test.csv").read_bytes()


def masks_of(toy: Path, split: str) -> list[Path]:
    return sorted((toy / "masks" / split).glob("*.png"))


def masked_method(what, **changes) -> GivenMask:
    return GivenMask(
        what, replace(MaskSettings("data", 0.5, False), **changes), add_masks=require_masks, where=None
    ).eval()


def recording(function, results: list):
    """The same function; what it returns is also appended to `results`."""

    def call(*arguments, **settings):
        results.append(function(*arguments, **settings))
        return results[-1]

    return call


@pytest.fixture
def images(generator):
    return torch.rand(4, 3, 32, 32, generator=generator)


@pytest.fixture
def masks(generator):
    """Blobs that cut through patches."""
    coarse = torch.rand(4, 1, 5, 5, generator=generator)
    return torch.nn.functional.interpolate(coarse, (32, 32), mode="bilinear")[:, 0] > 0.5


# ---- what is seen ----------------------------------------------------------------------------------------------------


def test_early_is_blind_and_late_leaks(images, masks):
    early, late = masked_method(MaskedViT(small_vit())), masked_method(LateMaskedViT(small_vit(classes=0), 5))
    assert verify(early, images, early.look_at(images, masks), draws=1).verdict == "blind"
    assert verify(late, images, late.look_at(images, masks), draws=1).verdict == "leaks"
    assert (early.blind, late.blind) == (True, False)


@torch.no_grad()
def test_hidden_pixels_of_kept_patches_are_seen_without_pixel_masks(images, masks):
    other = torch.where(masks[:, None], images, 1 - images)
    for pixels in (False, True):
        model = masked_method(MaskedViT(small_vit()), patch_threshold=0.1, pixels=pixels)
        sight = model.look_at(images, masks)
        assert (sight.visible((32, 32)) & ~masks).any() != pixels
        one, two = (model.judge(seen, sight).logits for seen in (images, other))
        assert torch.equal(one, two) == pixels
    assert verify(model, images, sight, draws=1).verdict == "blind"


def test_a_patch_is_kept_from_the_threshold_on(images):
    masks = torch.zeros(4, 32, 32, dtype=torch.bool)
    masks[:, :8, :4] = True  # half of the first patch
    kept = [
        masked_method(MaskedViT(small_vit()), patch_threshold=share).look_at(images, masks).keep.sum()
        for share in (0.5, 0.6)
    ]
    assert kept == [4, 0]


def test_it_predicts_only_with_masks(images):
    model = masked_method(MaskedViT(small_vit()))
    assert model.needs_masks
    assert model.accepts_masks
    with pytest.raises(UserError, match="needs a mask for every image"):
        model.look(images)


# ---- masks in the data, and in folders -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "code", "word"), [(EarlyMask, 0, "blind"), (LateMask, 1, "leaks")])
def test_a_run_with_true_masks_can_be_loaded(toy, tmp_path, kind, code, word):
    folder = train(small(toy, tmp_path / "run", kind))
    before = predictions_of(folder)
    assert typed("evaluate", folder, *QUICK)[0] == 0
    assert predictions_of(folder) == before
    masks = ("--masks", toy / "masks" / "test")
    found, out, err = typed("verify", folder, toy / "test", *masks, "--draws", 1, "--limit", 4)
    assert (found, word in out) == (code, True), out + err
    found, out, err = typed("localize", folder, *QUICK)
    assert found == 0, err


def test_without_masks_the_error_says_what_is_needed(toy, without_masks, tmp_path):
    with pytest.raises(UserError, match="has no masks; give a mask column, or --masks FOLDER"):
        train(small(without_masks, tmp_path / "run"))
    folder = train(small(toy, tmp_path / "with-masks"))
    code, _, err = typed("evaluate", folder, without_masks, *QUICK)
    assert (code, "has no masks" in err) == (2, True), err
    code, _, err = typed("predict", folder, toy / "test", "--device", "cpu")
    assert (code, "needs a mask for every image" in err) == (2, True), err
    code, _, err = typed("verify", folder, toy / "test")
    assert (code, "--masks FOLDER" in err) == (2, True), err


def test_a_folder_of_masks_is_as_good_as_a_column(toy, without_masks, tmp_path, monkeypatch):
    column = train(small(toy, tmp_path / "column"))
    folder = train(small(without_masks, tmp_path / "folder", masks=str(toy / "masks")))
    assert predictions_of(folder) == predictions_of(column)
    monkeypatch.chdir(tmp_path)
    assert typed("evaluate", folder, *QUICK)[0] == 0
    assert predictions_of(folder) == predictions_of(column)
    assert typed("evaluate", folder, without_masks, *QUICK)[0] == 0


def test_a_folder_of_masks_is_found_from_another_working_directory(toy, without_masks, tmp_path, monkeypatch):
    shutil.copytree(toy / "masks", tmp_path / "masks")
    monkeypatch.chdir(tmp_path)
    train(small(without_masks, tmp_path / "run", masks="masks"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = typed("evaluate", tmp_path / "run", *QUICK)
    assert code == 0, err


def test_with_other_masks_it_is_measured_against_the_true_ones(toy, tmp_path):
    """Masks of everything: seen is all, and the overlap with the truth is the birds' own share."""
    for path in sorted((toy / "masks").rglob("*.png")):
        other = tmp_path / "all" / path.relative_to(toy / "masks").with_suffix(".bmp")
        other.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64), 255).save(other)
    folder = train(small(toy, tmp_path / "run", masks=str(tmp_path / "all")))
    assert typed("localize", folder, *QUICK)[0] == 0
    figures = json.loads((folder / "localization.json").read_text())["splits"]["test"]["figures"]
    birds = [Image.open(path).convert("L").resize((1, 1), Image.Resampling.BOX) for path in masks_of(toy, "test")]
    assert figures["coverage"]["value"] == 1.0
    assert figures["pixel_iou"]["value"] == pytest.approx(sum(b.getpixel((0, 0)) for b in birds) / 255 / 8, abs=0.01)


def test_missing_masks_are_named(toy, tmp_path):
    rows = read_rows(toy)
    with pytest.raises(UserError, match="nowhere: no such folder of masks"):
        with_masks(rows, tmp_path / "nowhere")
    shutil.copytree(toy / "masks", tmp_path / "masks")
    (tmp_path / "masks" / "val" / "00003.png").unlink()
    with pytest.raises(UserError, match=r"no mask for 1 images, such as val/00003.png; add val/00003.png"):
        with_masks(rows, tmp_path / "masks")
    with pytest.raises(UserError, match="no mask for 32 images"):
        with_masks(rows, toy / "train")  # a folder too deep
    gaps = replace(rows, masks=["", *rows.masks[1:]])
    with pytest.raises(UserError, match=r"for 1 images, such as train/00000\.png; .* robustvit"):
        require_masks(gaps)


def test_two_masks_for_an_image_are_an_error(toy, tmp_path):
    shutil.copytree(toy / "masks", tmp_path / "masks")
    shutil.copy(tmp_path / "masks/val/00003.png", tmp_path / "masks/val/00003.bmp")
    with pytest.raises(UserError, match=r"00003.bmp and 00003.png are both masks of val/00003.png; keep one"):
        with_masks(read_rows(toy), tmp_path / "masks")


@pytest.mark.parametrize(
    ("settings", "share"), [({}, 0.5), ({"sight": "pixels"}, 0.1), ({"sight": "pixels", "patch_threshold": 0.3}, 0.3)]
)
def test_default_patch_thresholds_are_a_half_and_with_pixels_a_tenth(settings, share):
    assert MaskSettings.of(EarlyMask(Path("data"), **settings)).patch_threshold == share


@pytest.mark.parametrize(("size", "near"), [(24, 32), (8, 32)])
def test_the_saliency_methods_patches_must_divide_the_images(toy, tmp_path, size, near):
    save_backbone(small_vit(patch=16), tmp_path / "other.safetensors")
    settings = {"masks": f"tokencut:{tmp_path / 'other.safetensors'}", "size": size}
    with pytest.raises(
        UserError, match=rf"16-pixel patches do not divide images of {size}×{size}; choose --size {near}"
    ):
        train(small(toy, tmp_path / "run", **settings))


def test_noise_is_that_of_the_training_at_any_size(toy, tmp_path, monkeypatch):
    """The noise has the images' size in training as well as afterwards; of a ViT's own size it would be tiled."""
    trained = []
    monkeypatch.setattr(given_mask, "make_predictor", recording(given_mask.make_predictor, trained))
    folder = train(small(toy, tmp_path / "run", sight="pixels", fill="noise", size=64))
    in_training, afterwards = trained[0].colour, load(folder).method.what.colour
    assert in_training.shape[1:] == (64, 64)
    assert torch.equal(in_training, afterwards)


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (EarlyMask, {"patch_threshold": 0.0}, "--patch-threshold 0.0"),
        (LateMask, {"sight": "pixels"}, "--sight pixels: late masking sees every pixel"),
        (LateMask, {"zoom": True}, "--zoom: late masking sees every pixel"),
        (LateMask, {"fill": "black"}, "--fill: late masking sees every pixel"),
        (EarlyMask, {"fill": "noise"}, "--fill noise: no pixel of a kept patch is hidden"),
        (EarlyMask, {"masks": "nowhere"}, "nowhere: no such folder of masks"),
        (EarlyMask, {"masks": "found:nothing"}, "nothing: no such file"),
    ],
)
def test_invalid_settings_are_errors(toy, tmp_path, kind, wrong, message):
    with pytest.raises(UserError, match=message):
        train(small(toy, tmp_path / "run", kind, **wrong))


# ---- masks made once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["found", "tokencut"])
def test_masks_are_made_once_for_all_epochs_and_runs(without_masks, tmp_path, kind):
    settings = {"masks": f"{kind}:random:nano", "cache": tmp_path / "cache", "epochs": 2}
    folder = train(small(without_masks, tmp_path / "run", **settings))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob(f"{kind}-*/**/*.png")}
    assert len(made) == 32
    train(small(without_masks, tmp_path / "other", LateMask, **settings))
    assert {path: path.stat().st_mtime_ns for path in made} == made

    model = load(folder)
    assert not model.method.needs_masks, "it looks for itself now"
    before = predictions_of(folder)
    assert typed("evaluate", folder, *QUICK)[0] == 0
    assert predictions_of(folder) == before, "the masks it makes now are those it made then"
    code, out, err = typed("predict", folder, without_masks / "test", "--device", "cpu")
    assert (code, out.count("\n")) == (0, 9), err
    code, out, err = typed("verify", folder, without_masks / "test", "--draws", 1, "--limit", 4)
    assert (code, "blind" in out) == (0, True), out + err


def test_saliency_weights_are_not_saved_with_the_method(without_masks, tmp_path):
    folder = train(small(without_masks, tmp_path / "run", masks="found:random:nano"))
    assert (folder / "masks").is_dir()
    model = load(folder).method
    assert all(name.startswith("what.") for name in model.state_dict())
    assert len(list(model.parameters())) == len(list(model.what.parameters()))


def test_the_selector_moves_to_the_images_device(images):
    where = given_mask.saliency("found:random:nano").to("meta")
    model = GivenMask(MaskedViT(small_vit()), MaskSettings("", 0.5, False), add_masks=None, where=where)
    asked = []
    where.to = lambda device: asked.append(device) or given_mask.saliency("found:random:nano")
    assert model.maps(images)
    assert asked == [images.device]


def test_changed_saliency_weights_are_an_error(without_masks, tmp_path):
    weights = tmp_path / "looks.safetensors"
    save_backbone(load_backbone("random:nano"), weights)
    config = small(without_masks, tmp_path / "run", masks=f"found:{weights}")
    folder = train(config)
    assert len(json.loads((folder / "run.json").read_text())["saliency_sha256"]) == 64
    load(folder)
    save_backbone(load_backbone("random:nano", seed=1), weights)
    with pytest.raises(UserError, match=r"looks\.safetensors: not the weights that made this run's masks"):
        load(folder)
    with pytest.raises(UserError, match="restore them, or train again"):
        train(replace(config, resume=True))


@pytest.mark.parametrize("masks", ["data", "found:random:nano"])
def test_an_ema_of_the_weights_can_be_kept(toy, tmp_path, masks):
    folder = train(small(toy, tmp_path / "run", masks=masks, ema=0.9))
    assert load(folder).method.what.vit.head is not None


def test_masks_are_transformed_with_their_images(toy, tmp_path, monkeypatch):
    """Pictures that are their own masks stay so under augmentation."""
    rows = read_rows(toy)
    data = tmp_path / "data"
    lines = ["image,label,mask,split"]
    for i, (image, mask) in enumerate(zip(rows.images, rows.masks, strict=True)):
        (data / image).parent.mkdir(parents=True, exist_ok=True)
        Image.open(toy / mask).convert("RGB").save(data / image)
        lines.append(f"{image},{'ab'[i % 2]},{image},{image.split('/')[0]}")
    (data / "rows.csv").write_text("\n".join(lines) + "\n")
    seen, real = [], GivenMask.forward

    def watched(self, train_batch):
        seen.append((train_batch.images, train_batch.masks))
        return real(self, train_batch)

    monkeypatch.setattr(GivenMask, "forward", watched)
    train(small(data, tmp_path / "run", epochs=2))
    bright = torch.cat([images.mean(dim=1) > 0.75 for images, _ in seen])
    masked = torch.cat([masks for _, masks in seen])
    agreement = (bright == masked).float().mean()
    assert 0.02 < masked.float().mean() < 0.6
    assert agreement > 0.97
    assert not torch.equal(seen[0][1], seen[2][1]), "another view in every epoch"


def test_u2net_makes_masks(toy, tmp_path):
    pytest.importorskip("onnxruntime")
    weights = shared("data", "weights", "u2netp.onnx")
    few = tmp_path / "few"
    few.mkdir()
    for name in ("train/00000.png", "train/00001.png", "val/00000.png", "test/00000.png"):
        (few / name).parent.mkdir(exist_ok=True)
        shutil.copy(toy / name, few / name)
    lines = ["image,label,split", "train/00000.png,a,train", "train/00001.png,b,train"]
    (few / "rows.csv").write_text("\n".join([*lines, "val/00000.png,a,val", "test/00000.png,b,test"]) + "\n")
    folder = train(small(few, tmp_path / "run", masks=f"u2net:{weights}", sight="pixels", patch_threshold=0.1, ema=0.9))
    assert len(list((folder / "masks").rglob("*.png"))) == 4
    before = predictions_of(folder)
    assert typed("evaluate", folder, *QUICK)[0] == 0
    assert predictions_of(folder) == before
    prediction = load(folder).predict(few / "test" / "00000.png")
    assert prediction.sight.keep_pixels is not None


def test_rows_of_a_method_without_given_masks_stay_unchanged(toy):
    rows = read_rows(toy)
    assert Classifier(small_vit()).with_masks(rows) is rows
    assert given_mask.saliency("data") is None
    assert given_mask.saliency("some/folder") is None
