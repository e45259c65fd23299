"""Sightline in Python and in notebooks: words, pictures of every kind, answers that show themselves."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import sightline
from sightline.config import EarlyMask, Evaluate
from sightline.errors import UserError
from sightline.interventions.apply import Intervened, keep
from sightline.interventions.file import Intervention
from sightline.methods.ifam import IFam
from sightline.report.notebook import Answer, ShownSight
from sightline.sight import Sight

from .commands import SMALL, typed


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("python") / "ifam"
    told = ("--epochs", 1, "--parts", 2, "--sight", "patches", "--size", 32)
    assert typed("train", "ifam", toy, *SMALL, *told, "--out", out)[0] == 0
    return out


@pytest.fixture(scope="module")
def files(toy):
    return sorted((toy / "test").glob("*.png"))[:3]


def test_one_picture_has_a_name_shares_and_a_sight_to_show(run, files):
    answer = sightline.load(run).predict(files[0])
    assert isinstance(answer, Answer)
    assert isinstance(answer, sightline.Prediction)
    assert answer.name in ("duck", "stork")
    assert answer.probabilities.shape == (1, 2)
    page = answer.sight.show()
    assert isinstance(page, Image.Image)
    assert page.height > 3 * 32  # the picture, what is seen of it, its parts
    assert answer.sight._repr_png_().startswith(b"\x89PNG")


def test_pictures_may_be_files_images_arrays_and_tensors(run, files):
    model = sightline.load(run)
    picture = Image.open(files[0]).convert("RGB")
    array = np.asarray(picture)
    same = [files[0], str(files[0]), picture, array, array / 255, torch.tensor(array).movedim(-1, 0)]
    expected = model.predict(files[0]).logits
    for one in same:
        assert torch.equal(model.predict(one).logits, expected), type(one)
    several = model.predict(same)
    assert several.names == [model.predict(files[0]).name] * len(same)
    assert len(model.predict(np.stack([array, array]))) == 2
    assert len(model.predict(tuple(files))) == len(files)
    grey = np.asarray(picture.convert("L"))
    assert torch.equal(model.predict(grey).logits, model.predict(grey[..., None]).logits)


@pytest.mark.parametrize(
    ("picture", "complaint"),
    [
        (np.zeros((4, 4, 2), np.uint8), "an array of [4, 4, 2] is no picture"),
        (np.zeros((4, 4, 3)) + 255.0, "divide by 255"),
        (np.full((4, 4, 3), np.nan), "between 0 and 1"),
        (np.zeros((4, 4, 3), np.int64), "an array of int64 is no picture"),
        (7, "not a int"),
        ("nowhere.png", "nowhere.png: no such file"),
        ([], "no pictures"),
    ],
)
def test_what_is_no_picture_is_refused(run, picture, complaint):
    with pytest.raises(UserError) as error:
        sightline.load(run).predict(picture)
    assert complaint in str(error.value)


def test_answers_are_taken_one_by_one(run, files):
    answers = sightline.load(run).predict(list(files))
    assert [one.name for one in answers] == answers.names
    assert answers[-1].sight.pictures.shape == (1, 3, 32, 32)
    assert torch.equal(answers[1].logits[0], answers.logits[1])
    assert len(answers[:2]) == 2
    with pytest.raises(ValueError, match="answers for 3 pictures: take their `names`"):
        _ = answers.name
    with pytest.raises(IndexError):
        answers[3]


def test_notebooks_show_answers_with_pictures_names_and_shares(run, files):
    html = sightline.load(run).predict(list(files))._repr_html_()
    assert html.count("data:image/png;base64,") == 2 * len(files)
    assert html.count("<img alt=") == 2 * len(files)
    assert html.count("<meter") == 2 * len(files)
    assert "duck" in html
    assert "stork" in html


def test_names_of_classes_are_never_markup():
    sight = ShownSight(keep=torch.ones(1, 1, 1, dtype=torch.bool), pictures=torch.rand(1, 3, 8, 8))
    answer = Answer(torch.tensor([[1.0, 0.0]]), sight, None, ("<script>", "b"))
    assert "<script>" not in answer._repr_html_()
    assert "&lt;script&gt;" in answer._repr_html_()


def test_notebooks_show_a_model_with_its_groups(run):
    html = sightline.load(run)._repr_html_()
    for words in ("ifam", "trained on toy", "group duck/meadow", "95 % interval", "Right on"):
        assert words in html


def test_a_sight_without_pictures_shows_its_shape():
    keep_ = torch.zeros(2, 4, 4, dtype=torch.bool)
    keep_[:, 1, 2] = True
    page = Sight(keep=keep_).show()
    assert page.width > 2 * 64
    boxes = Sight(boxes=torch.tensor([[[2, 2, 20, 30]]]))
    assert boxes.show().height > 30


def test_a_loaded_model_is_corrected_as_the_commands_correct_it(run, files, tmp_path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    keep(sightline.load(copy), Intervention(drop=(1,)))
    assert isinstance(sightline.load(copy).method, Intervened)
    assert isinstance(sightline.load(copy, intervention=False).method, IFam)
    html = sightline.load(copy)._repr_html_()
    assert "corrected: without part 1" in html
    assert "<p>As trained: Right on" in html
    figures = json.loads((copy / "metrics.json").read_text())
    figures["splits"]["test"]["accuracy"]["value"] = 0.123
    (copy / "intervened-drop1").mkdir()
    (copy / "intervened-drop1" / "metrics.json").write_text(json.dumps(figures))
    assert "<p>Right on 12 %" in sightline.load(copy)._repr_html_()


def test_the_public_words_are_there():
    words = {"load", "train", "evaluate", "verify", "export", "push", "Sight", "Prediction", "SightlineClassifier"}
    assert words <= set(sightline.__all__)
    for word in sightline.__all__:
        assert callable(getattr(sightline, word)), word
    into: dict = {}
    exec("from sightline import *", into)
    assert words <= set(into)


def test_evaluate_measures_a_run(run):
    folder = sightline.evaluate(Evaluate(run, split="val", workers=0, device="cpu"))
    assert (folder / "metrics.json").is_file()


def test_importing_is_light():
    code = "import sys, sightline; print([m for m in ('torch', 'sklearn', 'PIL', 'onnx') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_mask_takes_the_place_of_looking(toy, tmp_path, files):
    told = {"backbone": "random:nano", "epochs": 1, "batch": 16, "workers": 0, "device": "cpu", "size": 32}
    model = sightline.load(sightline.train(EarlyMask(toy, out=tmp_path / "run", **told)))
    mask = Image.new("L", Image.open(files[0]).size, 255)
    mask.save(tmp_path / "mask.png")
    assert model.predict(files[0], tmp_path / "mask.png").sight.keep.all()
