"""Published checkpoints become run folders, and predict as published."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods.ifam import IFam
from sightline.methods.import_ import load_published
from sightline.methods.pdiscoformer import PDiscoFormer
from sightline.verify.verify import verify
from sightline.vit.backbones import BACKBONES, Backbone
from sightline.vit.model import Input, ViTConfig

from ..commands import QUICK, typed
from ..conftest import PLAIN, shared
from ..golden.conftest import CLOSE, CONFIG, golden

CLASSES = 7
TINY = ViTConfig(
    width=48, depth=3, heads=3, patch=14, grid=(6, 6), registers=4, layer_scale=1.0,
    input=Input((224, 224), PLAIN.mean, PLAIN.std, crop=0.875),
)  # fmt: skip


@pytest.fixture(scope="module")
def file() -> Path:
    return shared("golden", "ifam_tiny.safetensors")


@pytest.fixture
def tiny(monkeypatch) -> str:
    """The tiny ViT of the golden file, as if it were known by name."""
    monkeypatch.setitem(BACKBONES, "tiny", Backbone("tiny", TINY))
    return "tiny"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two images of one colour for each of seven classes, in val and test."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "val", "test"):
        for c in range(CLASSES):
            home = folder / split / f"class{c}"
            home.mkdir(parents=True)
            for i in range(2):
                noise = torch.randint(256, (90, 100, 3), generator=torch.Generator().manual_seed(10 * c + i))
                Image.fromarray(noise.byte().numpy()).save(home / f"{split}{i}.png")
    return folder


def stage_one(file: Path) -> dict[str, torch.Tensor]:
    """What a PDiscoFormer's own file holds."""
    tensors = load_file(file)
    return {k.removeprefix("stage_1."): t for k, t in tensors.items() if k.startswith("stage_1.")}


@torch.no_grad()
def test_a_published_ifam_predicts_as_published(file):
    expected, images = golden("stage1.npz"), load_file(file)["inputs.images"]
    model = load_published(file, config=CONFIG)
    assert isinstance(model, IFam)
    assert not model.training
    sight = model.look(images)
    torch.testing.assert_close(sight.parts, expected["clean.maps"], **CLOSE)
    assert torch.equal(sight.keep.float(), expected["clean.mask_hard"][:, 0])
    torch.testing.assert_close(model.judge(images, sight).logits, expected["clean.stage2_logits"], **CLOSE)
    parts = model.where.discover(images)
    logits = model.where.class_logits(model.where.embed(parts))
    torch.testing.assert_close(logits, expected["clean.class_logits"], **CLOSE)
    assert verify(model, images, draws=1).verdict == "blind"


@torch.no_grad()
def test_a_published_pdiscoformer_predicts_as_published(file, tmp_path):
    expected, images = golden("stage1.npz"), load_file(file)["inputs.images"]
    save_file(stage_one(file), tmp_path / "pdiscoformer.safetensors")
    model = load_published(tmp_path / "pdiscoformer.safetensors", config=CONFIG)
    assert isinstance(model, PDiscoFormer)
    logits = model.judge(images, model.look(images)).logits
    torch.testing.assert_close(logits, expected["clean.class_logits"], **CLOSE)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.module."])
def test_training_checkpoints_load_whatever_they_were_wrapped_in(file, tmp_path, wrapper):
    tensors = {f"{wrapper}{name}": t for name, t in load_file(file).items() if not name.startswith("inputs.")}
    torch.save({"model_state": tensors, "finished_epoch": 3}, tmp_path / "snapshot_best.pt")
    ours, theirs = load_published(tmp_path / "snapshot_best.pt", config=CONFIG), load_published(file, config=CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@torch.no_grad()
def test_the_published_preset_leaves_the_noise_on(file):
    images = load_file(file)["inputs.images"]
    quiet, noisy = load_published(file, config=CONFIG), load_published(file, config=CONFIG, preset="published")
    assert noisy.settings.eval_noise
    assert not torch.equal(noisy.look(images).keep, quiet.look(images).keep)


def test_import_on_the_command_line_then_everything_works(file, tiny, data, tmp_path):
    run = tmp_path / "run"
    code, out, err = typed("import", file, data, "--arch", tiny, "--out", run)
    assert code == 0, err
    assert f"The run is in {run}." in out
    facts = json.loads((run / "run.json").read_text())
    assert (facts["method"], facts["state"]) == ("ifam", "imported")
    assert facts["selection"] == {"metric": None, "on": None}
    assert facts["backbone"]["file"] == "ifam_tiny.safetensors"

    images = load_file(file)["inputs.images"]
    model = load(run)
    assert model.classes == tuple(f"class{c}" for c in range(CLASSES))
    seen = (model.expects.size, model.expects.crop, model.expects.resample)
    assert seen == ((84, 84), 1.0, "bilinear"), "as the published code tests"
    with torch.no_grad():
        logits = model.method.judge(images, model.method.look(images)).logits
    torch.testing.assert_close(logits, golden("stage1.npz")["clean.stage2_logits"], **CLOSE)

    code, out, err = typed("evaluate", run, *QUICK)
    assert code == 0, err
    assert "Nothing was selected." in out
    code, out, err = typed("verify", run, data / "test", "--draws", 1, "--limit", 4)
    assert code == 0, out + err
    code, out, err = typed("predict", run, data / "test" / "class0", "--device", "cpu")
    assert (code, out.count("\n")) == (0, 3), err
    code, _, err = typed("import", file, data, "--arch", tiny, "--out", run)
    assert (code, "contains a run" in err) == (2, True)


def test_import_of_a_pdiscoformer(file, tiny, data, tmp_path):
    save_file(stage_one(file), tmp_path / "p.safetensors")
    code, _, err = typed("import", tmp_path / "p.safetensors", data, "--arch", tiny, "--out", tmp_path / "run")
    assert code == 0, err
    model = load(tmp_path / "run")
    assert isinstance(model.method, PDiscoFormer)
    assert model.method.where.parts == 4


def test_import_at_another_size(file, tiny, data, tmp_path):
    code, _, err = typed("import", file, data, "--arch", tiny, "--out", tmp_path / "run", "--size", 112)
    assert code == 0, err
    assert load(tmp_path / "run").expects.size == (112, 112)
    assert typed("evaluate", tmp_path / "run", *QUICK)[0] == 0
    code, _, err = typed("import", file, data, "--arch", tiny, "--out", tmp_path / "other", "--size", 100)
    assert (code, "must be a multiple" in err) == (2, True), err


def test_another_number_of_classes_is_an_error(file, tiny, data, tmp_path):
    rows = tmp_path / "rows.csv"
    images = sorted((data / "train").rglob("*.png"))
    rows.write_text("image,label\n" + "".join(f"{p},{'ab'[i % 2]}\n" for i, p in enumerate(images)))
    code, _, err = typed("import", file, rows, "--arch", tiny, "--out", tmp_path / "run")
    assert code == 2
    assert "predicts 7 classes" in err
    assert "has 2" in err
    assert not (tmp_path / "run").exists()


def test_other_files_are_an_error(tiny, tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="not a checkpoint of iFAM or PDiscoFormer") as plain:
        load_published(tmp_path / "other.safetensors", like=tiny)
    assert "use a plain backbone with `sightline train METHOD DATA --backbone" in str(plain.value)
    with pytest.raises(UserError, match="no such file; give a published checkpoint") as missing:
        load_published(tmp_path / "missing.safetensors", like=tiny)
    assert "backbone" not in str(missing.value)
