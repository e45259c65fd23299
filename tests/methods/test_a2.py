"""A² from data to predictions: crops in, logistic regression out, and nothing but the crops in between."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.config import A2, CentreCrop, Probe, RandomCrop
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods import a2 as method_file
from sightline.methods.pair import Pair
from sightline.sight import Method, Sight
from sightline.train import train
from sightline.verify.verify import verify
from sightline.vit.weights import load_backbone, save_backbone
from sightline.what.masked import MaskedViT
from sightline.what.probe import BoxProbe, crop_and_resize
from sightline.where.crops import CropSight

from ..commands import SMALL, typed
from ..conftest import small_vit


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=32, val=16, test=16)


def settings(toy: Path, out: Path, **changes) -> dict:
    return {
        "data": toy, "out": out, "backbone": "random:nano", "workers": 0, "device": "cpu", "untuned": True, "batch": 16,
    } | changes  # fmt: skip


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def log_of(folder: Path) -> dict:
    (line,) = (folder / "log.jsonl").read_text().splitlines()
    return json.loads(line)


def two_boxes(generator: torch.Generator, count: int) -> Sight:
    corner = torch.randint(0, 5, (count, 2, 2), generator=generator) + torch.tensor([[0, 0], [16, 16]])
    return Sight(boxes=torch.cat([corner, corner + 12], dim=2))


# ---- what ------------------------------------------------------------------------------------------------------------


def test_a_box_is_cut_as_pillow_cuts_it(generator):
    image = torch.randint(0, 256, (2, 3, 40, 50), generator=generator, dtype=torch.uint8)
    boxes = torch.tensor([[3, 5, 19, 21], [30, 0, 50, 40]])  # of two sizes
    found = crop_and_resize(image.float(), boxes, (32, 24))
    for pixels, box, each in zip(image, boxes.tolist(), found, strict=True):
        by_pillow = (
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).crop(box).resize((24, 32), Image.Resampling.BILINEAR)
        )
        np.testing.assert_allclose(each.permute(1, 2, 0).numpy(), np.asarray(by_pillow), atol=1.01)


def test_a_box_of_the_right_size_is_not_touched(generator):
    images = torch.rand(2, 3, 40, 40, generator=generator)
    found = crop_and_resize(images, torch.tensor([[8, 0, 40, 32]] * 2), (32, 32))
    assert torch.equal(found, images[:, :, :32, 8:])


def test_a_box_beyond_the_image_is_an_error():
    with pytest.raises(ValueError, match="beyond their images of 8×8"):
        crop_and_resize(torch.zeros(1, 3, 8, 8), torch.tensor([[4, 4, 9, 8]]), (8, 8))


def test_features_are_the_crops_cls_tokens_in_the_order_of_the_crops(generator):
    vit, images = small_vit(classes=0), torch.rand(3, 3, 32, 32, generator=generator)
    sight = Sight(boxes=torch.tensor([[[0, 0, 16, 16], [16, 8, 32, 24]]]).expand(3, 2, 4))
    crops = images[:, :, :16, :16], images[:, :, 8:24, 16:32]
    expected = torch.cat([vit(crop).cls for crop in crops], dim=1)
    assert torch.equal(BoxProbe(vit, (16, 16), 2).embed(images, sight), expected)


def test_the_prediction_depends_on_nothing_outside_the_boxes(generator):
    images, sight = torch.rand(4, 3, 32, 32, generator=generator), two_boxes(generator, 4)
    what = BoxProbe(small_vit(classes=0), (32, 32), 2, 3).eval()  # crops of 12 pixels are enlarged
    certificate = verify(what, images, sight, draws=2)
    assert certificate.verdict == "blind"
    assert certificate.largest_gradient == 0
    assert certificate.control["changed"] == 4
    outside = torch.where(sight.visible((32, 32))[:, None], images, torch.nan)
    assert torch.equal(what.judge(outside, sight).logits, what.judge(images, sight).logits)


def test_keep_and_keep_pixels_hide_inside_the_boxes_too(generator):
    images, boxes = torch.rand(4, 3, 32, 32, generator=generator), two_boxes(generator, 4).boxes
    keep = torch.rand(4, 4, 4, generator=generator) < 0.5
    what = BoxProbe(small_vit(classes=0), (32, 32), 2, 3).eval()
    assert verify(what, images, Sight(keep=keep, boxes=boxes), draws=1).verdict == "blind"


def test_another_number_of_boxes_than_in_training_is_an_error(generator):
    what, images = BoxProbe(small_vit(classes=0), (16, 16), 1, 3), torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match="1 boxes per image, and the sight has 2"):
        what.judge(images, two_boxes(generator, 2))
    with pytest.raises(ValueError, match="no boxes"):
        what.judge(images, Sight.everything(images))


def test_crops_go_with_any_predictor_that_takes_a_sight(generator):
    images = torch.rand(3, 3, 32, 32, generator=generator)
    method = Pair(CropSight(small_vit(seed=1, classes=0), (0.4, 0.25)), MaskedViT(small_vit()))
    assert isinstance(method, Method)
    assert verify(method, images, draws=1).verdict == "blind"


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_a_loaded_run_predicts_the_same_without_the_original_files(toy, tmp_path):
    files = {"where": tmp_path / "where.safetensors", "backbone": tmp_path / "what.safetensors"}
    for seed, file in enumerate(files.values()):
        save_backbone(load_backbone("random:nano", seed=seed), file)
    folder = train(
        A2(**settings(toy, tmp_path / "run", crop_size=("0.5", "0.4+0.25"), **{k: str(f) for k, f in files.items()}))
    )
    for file in files.values():
        file.unlink()
    model = load(folder)
    assert facts_of(folder)["where"]["backbone"]["file"] == "where.safetensors"
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        outputs = list(csv.DictReader(file))
    given = model.predict([toy / row["image"] for row in outputs])
    assert [model.classes[i] for i in given.labels] == [row["predicted"] for row in outputs]
    expected = torch.tensor([[float(row[f"p_{name}"]) for name in model.classes] for row in outputs])
    torch.testing.assert_close(given.probabilities, expected, atol=1e-4, rtol=0)
    assert verify(model.method, torch.rand(2, 3, 64, 64), draws=1).verdict == "blind"


def test_validation_data_select_and_ties_go_to_the_first(toy, tmp_path, monkeypatch):
    real, seen = method_file.fit_each_count, []

    def scored(config, where, *rest):
        for count, fitted in real(config, where, *rest):
            sides = tuple(where.sides[:count])
            seen.append((where.layer, where.heads, sides))
            good = where.heads == 2 and count == 2
            yield count, method_file.replace(fitted, score=0.75 if good else 0.5)

    monkeypatch.setattr(method_file, "fit_each_count", scored)
    config = A2(**settings(toy, tmp_path / "run", crop_size=("1/2+1/4", "1/3"), crop_count=(1, 2), heads=("max", "2")))
    assert config.choices == 8
    assert config.selects == "balanced"
    folder = train(config)
    assert len(set(seen)) == len(seen) == 8
    crops = facts_of(folder)["crops"]
    assert (crops["sides"], crops["layer"], crops["heads"]) == (["1/2", "1/4"], -1, 2)
    assert crops["rule"] == "highest balanced on val, the first where they tie"
    assert len(log_of(folder)["tried_crops"]) == 8
    assert log_of(folder)["crops"] == "crops 1/2+1/4, block -1, heads 2"


def test_the_number_of_crops_changes_nothing_about_the_first_ones(toy, tmp_path):
    both = train(A2(**settings(toy, tmp_path / "both", crop_size=("1/3",), crop_count=(1, 3))))
    alone = {n: train(A2(**settings(toy, tmp_path / str(n), crop_size=("1/3",), crop_count=(n,)))) for n in (1, 3)}
    tried = log_of(both)["tried_crops"]
    for count, folder in alone.items():
        assert tried["crops " + "+".join(["1/3"] * count) + ", block -1, heads mean"] == log_of(folder)["balanced"]


def test_features_are_computed_once_per_selector(toy, tmp_path):
    cache = tmp_path / "cache"
    same = {"cache": cache, "crop_size": ("1/3",)}
    first = train(A2(**settings(toy, tmp_path / "a", **same)))
    files = {file: file.stat().st_mtime_ns for file in cache.glob("features-*")}
    assert len(files) == 2  # of train and val
    again = train(A2(**settings(toy, tmp_path / "b", **same)))
    assert {file: file.stat().st_mtime_ns for file in cache.glob("features-*")} == files
    assert (first / "best.safetensors").read_bytes() == (again / "best.safetensors").read_bytes()
    save_backbone(load_backbone("random:nano", seed=1), other := tmp_path / "other.safetensors")
    for change in ({"layer": (0,)}, {"heads": ("1",)}, {"crop_size": ("1/4",)}, {"where": str(other)}):
        before = len(list(cache.glob("features-*")))
        train(A2(**settings(toy, tmp_path / str(change), **same | change)))
        assert len(list(cache.glob("features-*"))) == before + 2, change


def test_a_crop_of_the_whole_image_is_the_probe(toy, tmp_path):
    save_backbone(load_backbone("random:nano"), file := tmp_path / "nano.safetensors")
    same = {"backbone": str(file), "untuned": False}
    whole = load(train(CentreCrop(**settings(toy, tmp_path / "crop", crop_size=("1",), **same))))
    probe = load(train(Probe(**settings(toy, tmp_path / "probe", **same))))
    images = torch.rand(4, 3, 64, 64)
    predictions = [m.method.judge(images, m.method.look(images)).logits for m in (whole, probe)]
    torch.testing.assert_close(predictions[0], predictions[1])
    assert log_of(whole.run.folder)["balanced"] == log_of(probe.run.folder)["balanced"]


def test_images_may_be_larger_than_the_backbones_input_size(toy, tmp_path):
    model = load(train(RandomCrop(**settings(toy, tmp_path / "run", size=128, crop_size=("1/2",)))))
    assert model.expects.size == (128, 128)
    assert facts_of(tmp_path / "run")["crops"]["size"] == [64, 64]
    boxes = model.predict(toy / "test" / next((toy / "test").iterdir()).name).sight.boxes
    assert (boxes[..., 2] - boxes[..., 0]).tolist() == [[64]]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"crop_size": ("big",)}, "--crop-size big: a side is a fraction"),
        ({"crop_size": ()}, "--crop-size, --layer, --heads: give at least one of each"),
        ({"crop_size": ("1.5",)}, "--crop-size 1.5: a side is a fraction"),
        ({"crop_size": ("1/0",)}, "--crop-size 1/0: a side is a fraction"),
        ({"crop_size": ("65",)}, "--crop-size 65: larger than the image, 64 pixels"),
        (
            {"crop_size": ("4/7",), "crop_count": (2,)},
            r"--crop-size 4/7\+4/7: two crops of 37 and 37 pixels would overlap",
        ),
        ({"crop_count": (0,)}, "--crop-count 0: must be at least 1"),
        ({"layer": (99,)}, "--layer 99: random:nano has"),
        ({"heads": ("many",)}, "--heads many: mean, entropy, lowest, max, or the number of a head"),
        ({"where": "nothing.safetensors"}, "nothing.safetensors: no such file"),
    ],
)
def test_invalid_settings_are_errors_before_anything_is_computed(toy, tmp_path, more, complaint):
    with pytest.raises(UserError, match=complaint):
        train(A2(**settings(toy, tmp_path / "run", **more)))
    assert not (tmp_path / "run" / "features").exists()
    with pytest.raises(UserError, match="only one centre crop"):
        train(CentreCrop(**settings(toy, tmp_path / "run", crop_size=("1/4+1/4",))))


def test_crops_that_do_not_fit_are_skipped(toy, tmp_path, capsys):
    folder = train(A2(**settings(toy, tmp_path / "run", crop_size=("2/7", "4/7", "65"), crop_count=(1, 2))))
    tried = [words.partition(",")[0] for words in log_of(folder)["tried_crops"]]
    assert tried == ["crops 2/7", "crops 2/7+2/7", "crops 4/7"]
    printed = capsys.readouterr().out
    assert "Skipped: --crop-size 4/7+4/7: two crops of 37 and 37 pixels would overlap.\n" in printed
    assert "Skipped: --crop-size 65: larger than the image, 64 pixels.\n" in printed
    with pytest.raises(UserError, match="would overlap; give smaller sides, or fewer of them"):
        train(A2(**settings(toy, tmp_path / "none", crop_size=("4/7", "5/7"), crop_count=(2,))))


def test_from_the_command_line_to_a_proof(toy, tmp_path):
    run = tmp_path / "run"
    arguments = ("--where", "random:nano", "--crop-size", "2/7", "1/2", "--layer", -1, 0, "--untuned", "--out", run)
    code, out, err = typed("train", "a2", toy, *SMALL, *arguments)
    assert (code, err) == (0, "")
    assert "Selected crops" in out
    assert "the best of 4" in out
    assert "selected by class-balanced validation accuracy" in out
    code, out, _ = typed("verify", run, "--limit", 2, "--draws", 1)
    assert code == 0
    assert "Blind outside its sight" in out
    assert typed("localize", run, "--workers", 0, "--device", "cpu")[0] == 0
    for control in ("centre-crop", "random-crop"):
        code, out, _ = typed("train", control, toy, *SMALL, "--untuned", "--out", tmp_path / control)
        assert code == 0
        assert "Nothing was selected" in out
        assert typed("verify", tmp_path / control, "--limit", 2, "--draws", 1)[0] == 0


def test_runs_of_two_pairs_of_backbones_do_not_share_a_folder():
    small, large = (A2(Path("birds"), "large", where=where).folder for where in ("small", None))
    assert small == Path("runs/birds-a2-small-large-0")
    assert large == Path("runs/birds-a2-large-0")
