"""The model card, filled from the run only."""

import json
import shutil

import pytest
import torch
import yaml

from sightline.config import Pdiscoformer, Probe
from sightline.export.export import certify
from sightline.interventions.file import Intervention
from sightline.load import load_as_trained as load
from sightline.report.card import card, escape_markdown, training_facts
from sightline.train import train
from sightline.verify.verify import verify

from ..commands import QUICK, edit, typed

SETTINGS = {"backbone": "random:nano", "workers": 0, "device": "cpu", "batch": 16, "size": 32}


@pytest.fixture(scope="module")
def patches(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("cards") / "parts"
    settings = ("--epochs", 1, "--parts", 2, "--sight", "patches", "--size", 32, "--backbone", "random:nano")
    assert typed("train", "ifam", toy, *settings, "--batch", 16, *QUICK, "--out", out)[0] == 0
    assert typed("localize", out, *QUICK)[0] == 0
    return out


@pytest.fixture(scope="module")
def certificate(patches):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return verify(load(patches).method, images, draws=1)


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}


def test_the_card_repeats_the_run(patches, certificate):
    model = load(patches)
    text = card(model, None, certificate, "3 images")
    found = sections(text)
    metrics = json.loads((patches / "metrics.json").read_text())["splits"]["test"]
    data = found["Training data"]
    assert "176 images of 2 classes (duck, stork)" in data
    assert data.count("\n| duck/") == 2
    good = found["Evaluation"]
    for group, one in metrics["groups"].items():
        assert f"| Group {group} | {100 * one['value']:.1f} % | [{100 * one['low']:.1f}, " in good
        assert f"| {one['n']} |" in good
    assert "Checkpoint selected by class-balanced accuracy on val data, never on test data." in good
    assert certificate.sentence in found["Proof of blindness"]
    assert "Sight IoU, patch grid" in found["Proof of blindness"]
    assert "2 parts and a background: part 0, part 1." in found["Discovered parts"]
    assert "No intervention." in found["Discovered parts"]
    assert "The selector sees the whole image." in found["Limitations"]
    assert f'sightline.load("{patches}")' in found["Usage"]
    assert "random:nano" in found["Training"]
    assert "blind to everything else (iFAM)" in text


def test_the_hub_can_read_its_head(patches, certificate):
    text = card(load(patches), None, certificate, "3 images")
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["library_name"] == "sightline"
    assert head["pipeline_tag"] == "image-classification"
    assert {"ifam", "blind-outside-its-sight"} <= set(head["tags"])
    result = head["model-index"][0]["results"][0]
    assert result["dataset"]["split"] == "test"
    assert [one["name"] for one in result["metrics"]] == ["accuracy", "class-balanced accuracy", "worst-group accuracy"]


def test_interventions_and_part_names_are_listed(patches, certificate, tmp_path):
    run = shutil.copytree(patches, tmp_path / "run")
    kept = Intervention(drop=(1,), names={0: "head"})
    corrected = run / kept.folder
    corrected.mkdir()
    content = json.loads((run / "metrics.json").read_text())
    content["splits"]["test"]["accuracy"]["value"] = content["splits"]["test"]["accuracy"]["high"] = 0.9876
    edit(corrected / "metrics.json", json.dumps(content))
    found = sections(card(load(run), kept, certificate, "3 images"))
    assert "part 0 (head), part 1" in found["Discovered parts"]
    assert "Intervention: without part 1, set by hand." in found["Discovered parts"]
    good = found["Evaluation"]
    assert (
        good.index("With the intervention (without part 1), test data")
        < good.index("98.8 %")
        < good.index("As trained")
    )
    assert "IoU" not in found["Proof of blindness"]  # that was measured without the intervention


def test_metrics_without_the_intervention_are_no_headline(patches, certificate):
    kept = Intervention(drop=(1,))
    text = card(load(patches), kept, certificate, "3 images")
    assert "model-index" not in yaml.safe_load(text.split("---\n")[1])
    head, found = text.partition("\n## ")[0], sections(text)
    assert f"Not evaluated with the intervention yet: run `sightline evaluate {patches}`." in head
    assert "**" not in head
    assert "As trained, test data" in found["Evaluation"]
    published = card(load(patches), kept, certificate, "3 images", where="hf:me/mine")
    assert "run `sightline evaluate RUN`" in published
    assert str(patches) not in published
    assert "Not evaluated" not in card(load(patches), Intervention(names={0: "head"}), certificate, "3 images")


def test_a_model_that_sees_everything_claims_no_blindness(toy, tmp_path):
    model = load(train(Probe(toy, out=tmp_path / "probe", **SETTINGS)))
    images = torch.rand(2, 3, 32, 32)
    assert certify(model, None, images, None) is None
    text = card(model, None, None, "2 images")
    assert "It sees the whole image." in text
    assert "Not blind: the model sees the whole image" in text
    assert "blind-outside-its-sight" not in text
    assert "## Discovered parts" not in text
    (model.run.folder / "metrics.json").unlink()
    text = card(model, None, None, "2 images")
    assert "Not evaluated yet" in text
    assert "model-index" not in text


def test_late_parts_are_not_blind(toy, tmp_path):
    model = load(train(Pdiscoformer(toy, out=tmp_path / "late", parts=2, epochs=1, **SETTINGS)))
    assert certify(model, None, torch.rand(2, 3, 32, 32), None) is None
    assert "The model sees the whole image and may use" in card(model, None, None, "2 images")


def test_names_cannot_break_the_page():
    assert escape_markdown("a|b\n<i>*c*_`[x](y)") == r"a\|b \<i>\*c\*\_\`[x]\(y)"


def test_a_run_initialised_from_another_names_the_original_weights():
    facts = {
        "method": "robustvit", "config": {"start": "runs/erm"}, "backbone": {"file": "weights/vit.safetensors"},
        "vit": {"input": {"size": [224, 224]}}, "versions": {},
    }  # fmt: skip
    assert dict(training_facts(facts))["backbone"] == "vit.safetensors"
