"""What is asked of a trained model: layouts with options, data without classes, overlays of nothing, and the
precision of training."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

from sightline.config import Ifam, Pdiscoformer
from sightline.datasets import metashift
from sightline.datasets.metashift import ANIMALS
from sightline.datasets.toy import write_toy
from sightline.methods.base import PartSettings, selector
from sightline.methods.given_mask import Given, GivenMask
from sightline.methods.ifam import IFam, predictor
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.what.pool import LateMask

from .commands import QUICK, SMALL, typed
from .conftest import small_vit
from .datasets.published import put

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from claim_figures import Runs, certify


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder / "toy", train=32, val=16, test=8)
    assert typed("train", "probe", folder / "toy", *SMALL, "--plain", "--out", folder / "run")[0] == 0
    return folder / "run"


def test_the_run_remembers_the_option_of_its_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(metashift, "SMALLEST", 2)
    subsets = {f"{animal}({place})": [f"{animal}{place}{i}" for i in "123"] for animal in ANIMALS for place in "abc"}
    put(tmp_path / "data", "full-candidate-subsets.json", content=json.dumps(subsets))
    put(tmp_path / "data", *(f"images/{picture}.jpg" for pictures in subsets.values() for picture in pictures))
    run, layout = tmp_path / "run", ("--layout", "metashift-animals:3")
    code, _, err = typed("train", "probe", tmp_path / "data", *SMALL, "--plain", *layout, "--out", run)
    assert code == 0, err
    facts = json.loads((run / "run.json").read_text())
    assert facts["data"]["layout"] == facts["config"]["layout"] == "metashift-animals:3"
    assert any("drawn with seed 3" in note for note in facts["data"]["notes"])
    before = (run / "predictions" / "test.csv").read_text()
    for again in ((), (tmp_path / "data",), (tmp_path / "data", *layout)):
        assert typed("evaluate", run, *again, *QUICK)[0] == 0
        assert not list(run.glob("on-*"))  # these are its own data
    assert (run / "predictions" / "test.csv").read_text() == before
    code, out, _ = typed("evaluate", run, tmp_path / "data", "--layout", "metashift-animals:4", *QUICK)
    assert (code, "drawn with seed 4" in out) == (0, True)
    assert len(list(run.glob("on-data-4-*"))) == 1
    assert "72 rows, 8 classes" in typed("check", tmp_path / "data", *layout, "--no-images")[1]


def test_pictures_without_a_class_are_not_evaluated(probe, tmp_path):
    put(tmp_path, "images/unknown/a.png", "masks/unknown/a.png")
    code, _, err = typed("evaluate", probe, tmp_path, "--layout", "imagenet-segmentation", *QUICK)
    assert code == 2
    assert "has pictures of the class 'unknown', so it is for measuring masks, not answers" in err
    code, out, _ = typed("check", tmp_path, "--layout", "imagenet-segmentation")
    assert "the class of some pictures is unknown" in out


def test_an_overlay_of_everything_is_refused_before_any_picture_is_answered(probe, tmp_path):
    put(tmp_path, "broken.png", content="no picture")
    arguments = ("predict", probe, tmp_path / "broken.png", "--device", "cpu", "--out", tmp_path / "p.csv")
    code, out, err = typed(*arguments, "--overlay", tmp_path / "seen")
    assert (code, out) == (2, "")
    assert err == "sightline: --overlay: this method sees the whole picture, so there is nothing to draw\n"
    assert not (tmp_path / "p.csv").exists()
    assert not (tmp_path / "seen").exists()
    code, _, err = typed(*arguments)
    assert (code, "broken.png: not an image" in err) == (1, True)
    assert list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines())) == []


def late_mask():
    return GivenMask(LateMask(small_vit(classes=0), 3), Given("data", 0.5, False), told=lambda rows: rows, where=None)


def pdiscoformer():
    settings = Pdiscoformer(Path("data"), parts=3)
    return PDiscoFormer(selector(small_vit(classes=0), settings, 3), PartSettings.of(settings))


def ifam(*, soft):
    settings, vit = Ifam(Path("data"), parts=3, soft=soft), small_vit(classes=0)
    return IFam(selector(vit, settings, 3), predictor(vit, settings, 3), PartSettings.of(settings))


@pytest.mark.parametrize(
    ("method", "all_of_it"),
    [(pdiscoformer(), True), (late_mask(), True), (ifam(soft=True), True), (ifam(soft=False), False)],
    ids=["pdiscoformer", "late-mask", "soft ifam", "ifam"],
)
def test_what_is_not_blind_sees_everything_whatever_its_sight_says(method, all_of_it):
    assert (not method.blind) == all_of_it


def test_a_run_is_measured_in_the_precision_it_was_trained_in(tmp_path, monkeypatch):
    loading = importlib.import_module("sightline.load")
    toy, run = write_toy(tmp_path / "toy", train=16, val=8, test=8, size=32), tmp_path / "run"
    told = ("--epochs", 1, "--precision", "bf16", "--out", run)
    code, _, err = typed("train", "early-mask", toy, *SMALL, *told)
    assert code == 0, err
    answered, asked, make = (run / "predictions" / "test.csv").read_text(), [], loading.make_accelerator
    monkeypatch.setattr(loading, "make_accelerator", lambda *how: asked.append(how) or make(*how))
    for command in ("evaluate", "localize", "shape"):
        code, _, err = typed(command, run, *QUICK)
        assert code == 0, err
    assert asked == [("cpu", "bf16")] * 3
    assert (run / "predictions" / "test.csv").read_text() == answered
    certificate = certify(run, Runs(tmp_path, certified=2, device="cpu"))
    assert (certificate.verdict, certificate.conditions["autocast"]) == ("blind", "bfloat16")
