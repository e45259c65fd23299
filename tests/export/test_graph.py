"""The other methods as ONNX files, and the errors of those that cannot be exported."""

import json

import pytest
import torch

from sightline.config import A2, A2Adapter, Aim, EarlyMask, Ifam, Pdiscoformer, Probe, RandomCrop
from sightline.errors import UserError
from sightline.export.check import check_against_torch
from sightline.export.export import disc_masks
from sightline.export.graph import build_graph, need_onnx, to_onnx
from sightline.load import load_as_trained as load
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.train import train

from ..commands import typed
from ..conftest import small_vit
from ..exporting import SETTINGS, onnx_outputs, tiny, toy_images

LOOP = {"epochs": 1}
METHODS = {
    "patches": (Ifam, {"parts": 3, "sight": "patches"} | LOOP),
    "pdiscoformer": (Pdiscoformer, {"parts": 3} | LOOP),
    "a2": (A2, {"crop_size": ("0.5",), "crop_count": (2,)}),
    "a2-adapter": (A2Adapter, {"steps": 1, "train_images": 32, "support": 8, "query": 8, "crop_count": 2}),
    "aim": (Aim, LOOP),
    "early-mask": (EarlyMask, {"sight": "pixels", "zoom": True, "fill": "noise", "patch_threshold": 0.1} | LOOP),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("methods")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_the_same_as_in_torch(name, toy, folder):
    kind, settings = METHODS[name]
    model = load(train(kind(toy, tiny(folder, depth=1), folder / name, **settings, **SETTINGS)))
    graph = build_graph(model.method, name)
    images = toy_images(toy, 5)
    masks = disc_masks(5, (32, 32)) if name == "early-mask" else None
    file = to_onnx(graph, model.expects).SerializeToString()
    more = {} if "mask" in graph.extra_inputs((32, 32)) else graph.extra_inputs((32, 32))
    agreement = check_against_torch(with_plain_switches(file, more), graph, model.method, None, images, masks)
    assert agreement.probabilities < 1e-4
    assert agreement.sight == 0
    assert (agreement.redrawn is None) == (name in ("pdiscoformer", "aim"))
    assert agreement.trials == 5 + 1 + 3 + 5 * (len(agreement.settings) - 1)


def with_plain_switches(file: bytes, more: dict[str, torch.Tensor]) -> bytes:
    import onnx

    model = onnx.load_from_string(file)
    for name, value in more.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    return model.SerializeToString()


def test_a_model_that_sees_the_whole_image_is_exported_as_not_blind(toy, folder):
    run = train(Probe(toy, tiny(folder, depth=1), folder / "probe", **SETTINGS))
    code, out, errors = typed("export", run, "--out", folder / "out", "--images", toy, "--limit", 3)
    assert code == 0, errors
    assert "Blind" not in out
    assert "Checked on 3 images." in out
    facts = json.loads((folder / "out" / "model.json").read_text())
    assert facts["blind"] is False
    assert facts["parts"] is None
    assert list(facts["outputs"]) == ["logits", "probabilities"]
    assert "It sees the whole image." in (folder / "out" / "README.md").read_text()
    images = toy_images(toy, 2)
    found = onnx_outputs(folder / "out", images=images)["logits"]
    torch.testing.assert_close(found, logits(run, images), atol=1e-4, rtol=1e-4)


def logits(run, images):
    method = load(run).method
    with torch.no_grad():
        return method.judge(images, method.look(images)).logits


def test_a_method_that_cannot_be_exported_is_an_error_with_an_alternative(toy, folder):
    run = train(RandomCrop(toy, tiny(folder, depth=1), folder / "random", **SETTINGS))
    code, _, errors = typed("export", run)
    assert code == 2
    assert "drawn from a hash of each image; use it from Python: sightline.load" in errors
    assert not (run / "onnx").exists()
    settings = Pdiscoformer(toy, preset="published", parts=2)
    method = PDiscoFormer(make_selector(small_vit(classes=0), settings, 2), PartSettings.of(settings))
    with pytest.raises(UserError, match=r"draws Gumbel noise in evaluation.*train with --eval-noise False"):
        build_graph(method, "run")


def test_without_onnx_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sightline export needs the package onnx: pip install 'sightline\[onnx\]'"):
        need_onnx()
