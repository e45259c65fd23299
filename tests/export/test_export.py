"""iFAM as one ONNX file: the same predictions as torch, with interventions, for any batch size, and as blind."""

import hashlib
import json
import re
import subprocess
import sys

import onnx
import pytest
import torch
from PIL import Image

from sightline.config import Ifam
from sightline.data.images import read_image, to_tensor
from sightline.errors import UserError
from sightline.export.check import check_against_torch, extract_judge, open_session, run_session
from sightline.export.export import example, input_facts
from sightline.export.graph import PartsGraph, TensorCorrection, build_graph, tensor_correction
from sightline.interventions.apply import apply_intervention, save_intervention
from sightline.interventions.file import Intervention
from sightline.load import load_as_trained as load
from sightline.sight import Sight
from sightline.train import train
from sightline.verify.perturbations import fill
from sightline.vit.model import Input
from sightline.where.corrections import Correction, PartAssignment

from ..commands import typed
from ..exporting import SETTINGS, onnx_outputs, tiny, toy_images

KEPT = Intervention(drop=(1,), quantile=0.9, thresholds=(1e3, float("nan")), names={0: "head"})


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """A learned selector with a refined, pixel-exact sight at twice the size; with a part removed."""
    folder = tmp_path_factory.mktemp("export")
    settings = {"selector": "learned", "epochs": 1, "parts": 2, "head_lr_factor": 1.0, "prototype_lr_factor": 1.0}
    done = train(Ifam(toy, tiny(folder, depth=1), folder / "run", **settings, **SETTINGS))
    save_intervention(load(done), KEPT)
    return done


@pytest.fixture(scope="module")
def exported(trained):
    """The folder that the command wrote, and its output."""
    code, out, errors = typed("export", trained, "--limit", 4)
    assert code == 0, errors
    assert f"applying {trained / 'intervention.json'}: without part 1" in errors
    return trained / "onnx", out


@pytest.fixture(scope="module")
def images(toy):
    return toy_images(toy, 4)


def same(found: dict[str, torch.Tensor], method, images: torch.Tensor) -> None:
    with torch.no_grad():
        sight = method.look(images)
        prediction = method.judge(images, sight)
    torch.testing.assert_close(found["logits"], prediction.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["probabilities"], prediction.probabilities, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["keep"], sight.keep)
    assert torch.equal(found["keep_pixels"], sight.keep_pixels)
    torch.testing.assert_close(found["parts"], sight.parts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_by_default_the_file_predicts_as_the_model_with_the_saved_intervention(exported, trained, images, count):
    same(
        onnx_outputs(exported[0], images=images[:count]), apply_intervention(load(trained).method, KEPT), images[:count]
    )


@pytest.mark.parametrize("drop", [(), (0,), (1,), (0, 1)])
def test_part_removal_is_an_input(exported, trained, images, drop):
    kept = torch.tensor([k not in drop for k in range(2)])
    free = torch.full((2,), torch.inf)
    found = onnx_outputs(exported[0], images=images, parts_kept=kept, distance_limits=free)
    method = load(trained).method
    if len(drop) == 2:
        assert not found["keep_pixels"].any()
        return
    same(found, apply_intervention(method, Intervention(drop=drop)), images)


def test_token_removal_and_forced_parts_are_inputs(exported, trained, images):
    method, everything = load(trained).method, torch.ones(2, dtype=torch.bool)
    with torch.no_grad():
        middle = float(method.detect(images).mask_assignment.distances.median()) + 1e-4
    limits = torch.tensor([middle, middle])
    found = onnx_outputs(exported[0], images=images, parts_kept=everything, distance_limits=limits)
    plain = onnx_outputs(exported[0], images=images, parts_kept=everything, distance_limits=torch.full((2,), torch.inf))
    assert found["keep_pixels"].sum() < plain["keep_pixels"].sum()
    same(found, apply_intervention(method, Intervention((), 0.5, (middle, middle))), images)
    forced = {"parts_forced": torch.tensor([True, False]), "distance_limits": torch.full((2,), torch.inf)}
    found = onnx_outputs(exported[0], images=images, parts_kept=everything, **forced)
    same(found, apply_intervention(method, Intervention(force=(0,))), images)


def test_nothing_outside_the_sight_reaches_the_prediction_of_the_file(exported, trained, images):
    """The part of the file that predicts from the sight, with redrawn hidden pixels; visible ones do count."""
    graph, file = PartsGraph(load(trained).method), str(exported[0] / "model.onnx")
    found = onnx_outputs(exported[0], images=images)
    sight = {name: found[name] for name in ("keep", "keep_pixels")}
    judge, visible = open_session(extract_judge(file, graph)), Sight(**sight).visible((32, 32))
    assert {one.name for one in judge.get_inputs()} == {"images", "keep", "keep_pixels"}
    assert visible.any()
    assert not visible.all()
    for content in (torch.rand_like(images), torch.full_like(images, torch.nan), 100 * torch.randn_like(images)):
        hidden = run_session(judge, {"images": fill(images, ~visible, content), **sight})
        assert torch.equal(hidden["logits"], found["logits"])
    other = run_session(judge, {"images": fill(images, visible, 1 - images), **sight})
    assert not torch.equal(other["logits"], found["logits"])


def test_the_command_reports_what_was_checked_and_the_largest_difference(exported):
    _, out = exported
    assert re.search(
        r"Checked against torch on 4 images with 6 settings of the intervention inputs: same class in 28 of 28", out
    )
    assert re.search(r"maximal difference \d\.\de-\d\d in probabilities \(tolerance 0\.001\)", out)
    assert re.search(r"Blind outside its sight: \d+ redraws of hidden pixels changed no bit", out)
    assert "4 images of toy, split test" in out
    assert " MB" in out


def test_model_json_describes_the_file_and_is_in_its_metadata(exported, trained):
    folder, _ = exported
    facts = json.loads((folder / "model.json").read_text())
    inside = {one.key: one.value for one in onnx.load(folder / "model.onnx").metadata_props}
    assert facts.pop("onnx_sha256") == hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()
    assert json.loads(inside["sightline"]) == facts
    assert json.loads(inside["classes"]) == facts["classes"] == ["duck", "stork"]
    assert json.loads(inside["size"]) == facts["input"]["size"] == [32, 32]
    assert json.loads(inside["mean"]) == facts["input"]["mean"]
    assert facts["parts"] == ["head", "part 1"]
    assert facts["inputs"]["parts_kept"]["default"] == [True, False]
    assert facts["inputs"]["distance_limits"]["default"] == [1e3, None]
    assert facts["inputs"]["images"]["shape"] == ["batch", 3, 32, 32]
    assert "without part 1" in facts["intervention"]
    assert facts["checked"]["probabilities"] < 1e-3


def test_the_example_runs_as_it_is_printed(exported, toy, tmp_path):
    folder, _ = exported
    facts = json.loads((folder / "model.json").read_text())
    file = next(iter(sorted((toy / "test").glob("*.png"))))
    program = facts["example"].replace("image.jpg", str(file))
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in facts["classes"]
    assert len(facts["example"].splitlines()) <= 13


@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("size", [(101, 67), (67, 101), (40, 333), (333, 40), (33, 35), (17, 19), (224, 224)])
def test_the_example_preprocesses_images_as_predict_does(tmp_path, monkeypatch, generator, size, crop):
    width, height = size
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy()
    Image.fromarray(pixels).save(tmp_path / "image.jpg", "PNG")
    monkeypatch.chdir(tmp_path)
    expects = Input(size=(32, 48), crop=crop)
    opening = ("facts", "session", "outputs", "print")
    lines = [line for line in example(expects, needs_mask=False).splitlines() if not line.startswith(opening)]
    scope = {"facts": {"input": input_facts(expects)}}
    exec("\n".join(lines), scope)
    thin = 8 * min(size) < max(size)  # of thin images `predict` resizes only the window that it needs
    inputs, expected = torch.from_numpy(scope["inputs"]["images"])[0], to_tensor(read_image("image.jpg"), expects)
    torch.testing.assert_close(inputs, expected, rtol=0, atol=1.01 / 255 if thin else 0)


def test_a_file_that_disagrees_with_torch_is_an_error(exported, trained, images):
    """Here because the weights changed in between."""
    method = load(trained).method
    graph = build_graph(method, "run")
    file = (exported[0] / "model.onnx").read_bytes()
    with torch.no_grad():
        method.what.vit.head.weight.neg_()
    with pytest.raises(UserError, match=r"another class for . of 4 images \(as saved\); it was not saved"):
        check_against_torch(file, graph, method, KEPT, images, None)
    with torch.no_grad():
        method.what.vit.head.weight.neg_().mul_(1.05)
    with pytest.raises(UserError, match=r"probabilities by .* it was not saved"):
        check_against_torch(file, graph, method, KEPT, images, None)


def test_a_tensor_correction_equals_the_correction(generator):
    assignment = PartAssignment(torch.randn(2, 4, 5, 5, generator=generator), torch.rand(2, 5, 5, generator=generator))
    kept, always = torch.tensor([True, False, True]), torch.tensor([False, False, True])
    tensors = tensor_correction(kept, always, torch.tensor([0.5, 0.2, 0.7]))
    plain = Correction(drop=(1,), force=(2,), max_distances=(0.5, 0.2, 0.7))
    assert isinstance(tensors, TensorCorrection)
    for name in ("keep", "foreground_probability", "probabilities", "removed", "forced"):
        torch.testing.assert_close(getattr(tensors, name)(assignment), getattr(plain, name)(assignment))
