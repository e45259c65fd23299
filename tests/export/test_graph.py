"""The other methods as ONNX files, and what is said of those that cannot be."""

import json

import pytest
import torch

from sightline.config import A2, A2Adapter, Aim, EarlyMask, Ifam, Pdiscoformer, Probe, RandomCrop
from sightline.errors import UserError
from sightline.export.check import compare
from sightline.export.export import discs
from sightline.export.graph import need_onnx, to_onnx, traceable
from sightline.load import load_as_trained as load
from sightline.methods.base import PartSettings, selector
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.train import train

from ..commands import typed
from ..conftest import small_vit
from ..exporting import TOLD, answers, pictures, tiny

LOOP = {"epochs": 1}
METHODS = {
    "patches": (Ifam, {"parts": 3, "sight": "patches"} | LOOP),
    "pdiscoformer": (Pdiscoformer, {"parts": 3} | LOOP),
    "a2": (A2, {"crop": ("0.5",), "crops": (2,)}),
    "a2-adapter": (A2Adapter, {"steps": 1, "pictures": 32, "support": 8, "query": 8, "crops": 2}),
    "aim": (Aim, LOOP),
    "early-mask": (EarlyMask, {"sight": "pixels", "zoom": True, "fill": "noise", "at_least": 0.1} | LOOP),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("methods")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_answers_from_a_graph_as_from_torch(name, toy, folder):
    kind, settings = METHODS[name]
    model = load(train(kind(toy, tiny(folder, depth=1), folder / name, **settings, **TOLD)))
    traced = traceable(model.method, name)
    images = pictures(toy, 5)
    masks = discs(5, (32, 32)) if name == "early-mask" else None
    file = to_onnx(traced, model.expects).SerializeToString()
    more = {} if "mask" in traced.more_inputs((32, 32)) else traced.more_inputs((32, 32))
    agreement = compare(with_plain_switches(file, more), traced, model.method, None, images, masks)
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


def test_a_model_that_sees_everything_is_exported_and_says_so(toy, folder):
    run = train(Probe(toy, tiny(folder, depth=1), folder / "probe", **TOLD))
    code, out, errors = typed("export", run, "--out", folder / "out", "--images", toy, "--limit", 3)
    assert code == 0, errors
    assert "Blind" not in out
    assert "Tried on 3 pictures." in out
    facts = json.loads((folder / "out" / "model.json").read_text())
    assert facts["blind"] is False
    assert facts["parts"] is None
    assert list(facts["outputs"]) == ["logits", "probabilities"]
    assert "It sees the whole picture." in (folder / "out" / "README.md").read_text()
    images = pictures(toy, 2)
    found = answers(folder / "out", images=images)["logits"]
    torch.testing.assert_close(found, logits(run, images), atol=1e-4, rtol=1e-4)


def logits(run, images):
    method = load(run).method
    with torch.no_grad():
        return method.judge(images, method.look(images)).logits


def test_what_no_graph_can_do_is_refused_with_a_way_out(toy, folder):
    run = train(RandomCrop(toy, tiny(folder, depth=1), folder / "random", **TOLD))
    code, _, errors = typed("export", run)
    assert code == 2
    assert "drawn from a hash of each picture; use it from Python: sightline.load" in errors
    assert not (run / "onnx").exists()
    settings = Pdiscoformer(toy, preset="published", parts=2)
    method = PDiscoFormer(selector(small_vit(classes=0), settings, 2), PartSettings.of(settings))
    with pytest.raises(UserError, match=r"draws noise also in evaluation.*train with --eval-noise False"):
        traceable(method, "run")


def test_without_onnx_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"exporting needs onnx: pip install 'sightline\[onnx\]'"):
        need_onnx()
