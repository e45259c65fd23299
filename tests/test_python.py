"""Sightline in Python and in notebooks: public words, images of every kind, predictions that display themselves."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import sightline
from sightline.config import EarlyMask, Evaluate, Intervene, Predict
from sightline.errors import UserError
from sightline.interventions.apply import Intervened, save_intervention
from sightline.interventions.file import Intervention
from sightline.methods.ifam import IFam
from sightline.report.notebook import ImagePredictions, ImageSight
from sightline.sight import Sight

from .commands import SMALL, edit, typed


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("python") / "ifam"
    flags = ("--epochs", 1, "--parts", 2, "--sight", "patches", "--size", 32)
    assert typed("train", "ifam", toy, *SMALL, *flags, "--out", out)[0] == 0
    return out


@pytest.fixture(scope="module")
def files(toy):
    return sorted((toy / "test").glob("*.png"))[:3]


def test_one_image_has_a_class_name_probabilities_and_a_sight_to_show(run, files):
    prediction = sightline.load(run).predict(files[0])
    assert isinstance(prediction, ImagePredictions)
    assert isinstance(prediction, sightline.Prediction)
    assert prediction.name in ("duck", "stork")
    assert prediction.probabilities.shape == (1, 2)
    page = prediction.sight.show()
    assert isinstance(page, Image.Image)
    assert page.height > 3 * 32  # the image, its visible part, its parts
    assert prediction.sight._repr_png_().startswith(b"\x89PNG")


def test_images_may_be_files_pillow_images_arrays_and_tensors(run, files):
    model = sightline.load(run)
    image = Image.open(files[0]).convert("RGB")
    array = np.asarray(image)
    same = [files[0], str(files[0]), image, array, array / 255, torch.tensor(array).movedim(-1, 0)]
    expected = model.predict(files[0]).logits
    for one in same:
        assert torch.equal(model.predict(one).logits, expected), type(one)
    several = model.predict(same)
    assert several.names == [model.predict(files[0]).name] * len(same)
    assert len(model.predict(np.stack([array, array]))) == 2
    assert len(model.predict(tuple(files))) == len(files)
    grey = np.asarray(image.convert("L"))
    assert torch.equal(model.predict(grey).logits, model.predict(grey[..., None]).logits)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 2), np.uint8), "an array of shape [4, 4, 2] is not an image"),
        (np.zeros((4, 4, 3)) + 255.0, "divide by 255"),
        (np.full((4, 4, 3), np.nan), "values in [0, 1]"),
        (np.zeros((4, 4, 3), np.int64), "an array of int64 is not an image"),
        (7, "not a int"),
        ("nowhere.png", "nowhere.png: no such file"),
        ([], "no images"),
    ],
)
def test_what_is_not_an_image_is_an_error(run, image, message):
    with pytest.raises(UserError) as error:
        sightline.load(run).predict(image)
    assert message in str(error.value)


def test_predictions_are_indexed_by_image(run, files):
    predictions = sightline.load(run).predict(list(files))
    assert [one.name for one in predictions] == predictions.names
    assert predictions[-1].sight.images.shape == (1, 3, 32, 32)
    assert torch.equal(predictions[1].logits[0], predictions.logits[1])
    assert len(predictions[:2]) == 2
    with pytest.raises(ValueError, match="predictions for 3 images: use `names`"):
        _ = predictions.name
    with pytest.raises(IndexError):
        predictions[3]


def test_notebooks_display_predictions_with_images_names_and_probabilities(run, files):
    html = sightline.load(run).predict(list(files))._repr_html_()
    assert html.count("data:image/png;base64,") == 2 * len(files)
    assert html.count("<img alt=") == 2 * len(files)
    assert html.count("<meter") == 2 * len(files)
    assert "duck" in html
    assert "stork" in html


def test_class_names_are_escaped():
    sight = ImageSight(keep=torch.ones(1, 1, 1, dtype=torch.bool), images=torch.rand(1, 3, 8, 8))
    prediction = ImagePredictions(torch.tensor([[1.0, 0.0]]), sight, None, ("<script>", "b"))
    assert "<script>" not in prediction._repr_html_()
    assert "&lt;script&gt;" in prediction._repr_html_()


def test_notebooks_show_a_model_with_its_groups(run):
    html = sightline.load(run)._repr_html_()
    for words in ("ifam", "trained on toy", "Group duck/meadow", "95 % interval", "Accuracy "):
        assert words in html


def test_a_sight_without_images_shows_its_shape():
    keep_ = torch.zeros(2, 4, 4, dtype=torch.bool)
    keep_[:, 1, 2] = True
    page = Sight(keep=keep_).show()
    assert page.width > 2 * 64
    boxes = Sight(boxes=torch.tensor([[[2, 2, 20, 30]]]))
    assert boxes.show().height > 30


def test_load_applies_the_saved_intervention(run, files, tmp_path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    save_intervention(sightline.load(copy), Intervention(drop=(1,)))
    assert isinstance(sightline.load(copy).method, Intervened)
    assert isinstance(sightline.load(copy, intervention=False).method, IFam)
    html = sightline.load(copy)._repr_html_()
    assert "with intervention: without part 1" in html
    assert "<p>As trained: Accuracy " in html
    figures = json.loads((copy / "metrics.json").read_text())
    figures["splits"]["test"]["accuracy"]["value"] = 0.123
    (copy / "intervened-drop1").mkdir()
    edit(copy / "intervened-drop1" / "metrics.json", json.dumps(figures))
    assert "<p>Accuracy 12.3 %;" in sightline.load(copy)._repr_html_()


def test_the_public_words_are_there():
    words = {
        "load", "train", "evaluate", "predict", "verify", "intervene", "report", "Sight", "Prediction", "Method",
        "export", "push", "pretrain", "find_leak", "load_backbone", "save_backbone", "SightlineClassifier",
    }  # fmt: skip
    assert words == set(sightline.__all__)
    for word in sightline.__all__:
        assert callable(getattr(sightline, word)), word
    into: dict = {}
    exec("from sightline import *", into)
    assert words <= set(into)


def test_evaluate_predict_and_intervene_take_a_configuration(run, files):
    folder = sightline.evaluate(Evaluate(run, split="val", workers=0, device="cpu"))
    assert (folder / "metrics.json").is_file()
    table = sightline.predict(Predict(run, tuple(files), device="cpu"))
    assert (table.images, table.unreadable) == (len(files), 0)
    assert table.text.startswith("image,predicted,p_duck,p_stork\n")
    outcome = sightline.intervene(Intervene(run, device="cpu"))
    assert (outcome.parts, outcome.intervention) == (2, None)


def test_importing_is_light():
    code = "import sys, sightline; print([m for m in ('torch', 'sklearn', 'PIL', 'onnx') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_given_mask_replaces_the_sight(toy, tmp_path, files):
    settings = {"backbone": "random:nano", "epochs": 1, "batch": 16, "workers": 0, "device": "cpu", "size": 32}
    model = sightline.load(sightline.train(EarlyMask(toy, out=tmp_path / "run", **settings)))
    mask = Image.new("L", Image.open(files[0]).size, 255)
    mask.save(tmp_path / "mask.png")
    assert model.predict(files[0], tmp_path / "mask.png").sight.keep.all()
