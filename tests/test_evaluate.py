"""Evaluation: layouts with options, data without classes, overlays, and the precision of training."""

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
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.given_mask import GivenMask, MaskSettings
from sightline.methods.ifam import IFam, make_predictor
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.what.pool import LateMaskedViT

from .commands import QUICK, SMALL, typed
from .conftest import small_vit
from .datasets.published import put

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from measure import certify


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder / "toy", train=32, val=16, test=8)
    assert typed("train", "probe", folder / "toy", *SMALL, "--untuned", "--out", folder / "run")[0] == 0
    return folder / "run"


def test_the_run_records_the_variant_of_its_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(metashift, "SMALLEST", 2)
    subsets = {f"{animal}({place})": [f"{animal}{place}{i}" for i in "123"] for animal in ANIMALS for place in "abc"}
    put(tmp_path / "data", "full-candidate-subsets.json", content=json.dumps(subsets))
    put(tmp_path / "data", *(f"images/{image}.jpg" for photos in subsets.values() for image in photos))
    run, layout = tmp_path / "run", ("--layout", "metashift-animals:3")
    code, _, err = typed("train", "probe", tmp_path / "data", *SMALL, "--untuned", *layout, "--out", run)
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


def test_images_of_an_unknown_class_are_not_evaluated(probe, tmp_path):
    put(tmp_path, "images/unknown/a.png", "masks/unknown/a.png")
    code, _, err = typed("evaluate", probe, tmp_path, "--layout", "imagenet-segmentation", *QUICK)
    assert code == 2
    assert "the model does not know 'unknown'; use `sightline localize` with these data" in err
    code, out, _ = typed("check", tmp_path, "--layout", "imagenet-segmentation")
    assert "can evaluate masks, not predictions" in out


def test_overlay_is_rejected_for_a_method_that_sees_everything(probe, tmp_path):
    put(tmp_path, "broken.png", content="not an image")
    arguments = ("predict", probe, tmp_path / "broken.png", "--device", "cpu", "--out", tmp_path / "p.csv")
    code, out, err = typed(*arguments, "--overlay", tmp_path / "seen")
    assert (code, out) == (2, "")
    assert err == "sightline: --overlay: this method sees the whole image, so there is nothing to draw; leave it out\n"
    assert not (tmp_path / "p.csv").exists()
    assert not (tmp_path / "seen").exists()
    code, _, err = typed(*arguments)
    assert (code, "broken.png: not a readable image" in err) == (1, True)
    assert list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines())) == []


def late_mask():
    return GivenMask(
        LateMaskedViT(small_vit(classes=0), 3),
        MaskSettings("data", 0.5, False),
        add_masks=lambda rows: rows,
        where=None,
    )


def pdiscoformer():
    settings = Pdiscoformer(Path("data"), parts=3)
    return PDiscoFormer(make_selector(small_vit(classes=0), settings, 3), PartSettings.of(settings))


def ifam(*, soft_mask):
    settings, vit = Ifam(Path("data"), parts=3, soft_mask=soft_mask), small_vit(classes=0)
    return IFam(make_selector(vit, settings, 3), make_predictor(vit, settings, 3), PartSettings.of(settings))


@pytest.mark.parametrize(
    ("method", "leaks"),
    [(pdiscoformer(), True), (late_mask(), True), (ifam(soft_mask=True), True), (ifam(soft_mask=False), False)],
    ids=["pdiscoformer", "late-mask", "soft ifam", "ifam"],
)
def test_methods_declare_whether_they_are_blind(method, leaks):
    assert (not method.blind) == leaks


def test_a_run_is_evaluated_in_the_precision_of_its_training(tmp_path, monkeypatch):
    loading = importlib.import_module("sightline.load")
    toy, run = write_toy(tmp_path / "toy", train=16, val=8, test=8, size=32), tmp_path / "run"
    flags = ("--epochs", 1, "--precision", "bf16", "--out", run)
    code, _, err = typed("train", "early-mask", toy, *SMALL, *flags)
    assert code == 0, err
    expected, used, make = (run / "predictions" / "test.csv").read_text(), [], loading.make_accelerator
    monkeypatch.setattr(loading, "make_accelerator", lambda *how: used.append(how) or make(*how))
    for command in ("evaluate", "localize", "shape"):
        code, _, err = typed(command, run, *QUICK)
        assert code == 0, err
    assert used == [("cpu", "bf16")] * 3
    assert (run / "predictions" / "test.csv").read_text() == expected
    certificate = certify(run, "test", images=2, device="cpu")
    assert (certificate.verdict, certificate.conditions["autocast"]) == ("blind", "bfloat16")
