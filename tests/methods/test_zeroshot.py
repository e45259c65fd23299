"""CLIP without training, on whole images, on A²'s crop and on TTR's cluster: with a tiny CLIP made here."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sightline.config import A2Zs, Ttr, Zs
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.methods import zeroshot as method_file
from sightline.sight import Sight
from sightline.train import train
from sightline.verify.verify import verify
from sightline.what.zeroshot import ZeroShot, clip_class_names, open_clip, readable_class_name, transform_of

from ..commands import QUICK, typed

transformers = pytest.importorskip("transformers")

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def letters() -> dict[str, int]:
    """A vocabulary of single letters, within a word and at its end."""
    signs = [chr(code) for code in range(33, 127)]
    words = [*signs, *(f"{sign}</w>" for sign in signs), "<|startoftext|>", "<|endoftext|>"]
    return {word: number for number, word in enumerate(words)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A CLIP on disk, as transformers saves it: 64 pixels, 4×4 patches, random weights."""
    where, words = tmp_path_factory.mktemp("clip") / "tiny", letters()
    ends = {"bos_token_id": words["<|startoftext|>"], "eos_token_id": words["<|endoftext|>"]}
    text = TEXT | ends | {"vocab_size": len(words), "max_position_embeddings": 40}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=VISION | {"image_size": 64, "patch_size": 16}, projection_dim=24
    )
    model, generator = transformers.CLIPModel(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim:
                norm = "norm" in name and name.endswith("weight")
                parameter.normal_(float(norm), 0.15, generator=generator)
    model.save_pretrained(where)
    transformers.CLIPTokenizer(vocab=words, merges=[]).save_pretrained(where)
    shipped = {"image_mean": MEAN, "image_std": STD, "size": {"shortest_edge": 64}, "crop_size": 64, "resample": 3}
    (where / "preprocessor_config.json").write_text(json.dumps(shipped))
    return where


@pytest.fixture(scope="module")
def clip(folder):
    return open_clip(str(folder))


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.CLIPModel.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=8, val=16, test=12)


def settings(toy: Path, out: Path, folder: Path, **changes) -> dict:
    return {"data": toy, "out": out, "clip": str(folder), "workers": 0, "device": "cpu", "batch": 16} | changes


def facts_of(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def predictions_of(run: Path) -> tuple[list[str], torch.Tensor]:
    with (run / "predictions" / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [key for key in rows[0] if key.startswith("p_")]
    return [row["image"] for row in rows], torch.tensor([[float(row[name]) for name in names] for row in rows])


def without_transformers(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


# ---- what ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_are_those_of_transformers_on_the_same_pixels(clip, theirs, generator):
    images, names = torch.rand(3, 3, 64, 64, generator=generator), ["landbird", "waterbird", "dog"]
    words = clip.tokenizer([f"a photo of a {name}" for name in names], padding=True, return_tensors="pt")
    pixels = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    expected = theirs(pixel_values=pixels, **words).logits_per_image
    what = ZeroShot(clip.vit, (64, 64), clip.class_embeddings(names, ["a photo of a {}"]), clip.scale)
    found = what.judge(images, Sight.everything(images)).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.01


@torch.no_grad()
def test_prompts_are_normalised_then_averaged_then_normalised(clip):
    prompts, names = ["a photo of a {}", "{}!"], ["cat", "dog"]
    each = {(p, n): clip.model.text_model(
        **clip.tokenizer([p.replace("{}", n)], return_tensors="pt")).pooler_output[0] for p in prompts for n in names
    }  # fmt: skip
    each = {key: clip.model.text_projection(pooled) for key, pooled in each.items()}
    assert abs(each["{}!", "cat"].norm() - each["a photo of a {}", "cat"].norm()) > 0.01  # or the order would not show
    for name, found in zip(names, clip.class_embeddings(names, prompts), strict=True):
        mean = sum(each[p, name] / each[p, name].norm() for p in prompts) / 2
        torch.testing.assert_close(found, mean / mean.norm(), atol=1e-5, rtol=0)


def test_the_transform_is_the_one_that_was_shipped(clip, folder):
    assert clip.vit.config.input.mean == MEAN
    assert clip.vit.config.input.std == STD
    shipped = {
        "image_mean": MEAN,
        "image_std": STD,
        "size": 80,
        "crop_size": {"height": 64, "width": 64},
        "resample": 2,
    }
    (other := folder.parent / "other").mkdir()
    (other / "preprocessor_config.json").write_text(json.dumps(shipped))
    assert transform_of(str(other), "main").crop == 0.8
    assert transform_of(str(other), "main").resample == "bilinear"


def test_the_prediction_depends_on_nothing_outside_the_box(clip, generator):
    images = torch.rand(3, 3, 64, 64, generator=generator)
    what = ZeroShot(clip.vit, (64, 64), clip.class_embeddings(["cat", "dog"], ["{}"]), clip.scale).eval()
    sight = Sight(boxes=torch.tensor([[[8, 4, 45, 41]]]).expand(3, 1, 4))
    certificate = verify(what, images, sight, draws=1)
    assert certificate.verdict == "blind"
    assert certificate.control["changed"] == 3
    with pytest.raises(ValueError, match="one box per image, and the sight has 2"):
        what.judge(images, Sight(boxes=torch.zeros(3, 2, 4, dtype=torch.long)))


@torch.no_grad()
def test_a_hidden_patch_is_zero_after_normalisation_and_still_there(clip, theirs, generator):
    images, keep = torch.rand(2, 3, 64, 64, generator=generator), torch.rand(2, 4, 4, generator=generator) < 0.5
    pixels = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    seen = pixels * F.interpolate(keep[:, None].float(), (64, 64), mode="nearest")
    expected = theirs.visual_projection(theirs.vision_model(pixel_values=seen).pooler_output)
    text = clip.class_embeddings(["cat", "dog"], ["{}"])
    found = ZeroShot(clip.vit, (64, 64), text).judge(images, Sight(keep=keep)).logits
    torch.testing.assert_close(found, F.normalize(expected, dim=1) @ text.T, atol=1e-5, rtol=0)


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("001.Black_footed_Albatross", "Black footed Albatross"),
        ("00_dog", "dog"),
        ("waterbird", "waterbird"),
        ("7", "7"),
        ("3D_printer", "3D printer"),
        ("12. 13", "12. 13"),
    ],
)
def test_class_names_are_made_readable(name, called):
    assert readable_class_name(name) == called


def test_a_file_overrides_class_names_and_its_errors_are_reported(tmp_path):
    file = tmp_path / "names.json"
    file.write_text('{"0": "landbird"}')
    assert clip_class_names(["0", "01_dog"], file) == ["landbird", "dog"]
    with pytest.raises(UserError, match="class '1': no name that CLIP could read"):
        clip_class_names(["0", "1"], file)
    with pytest.raises(UserError, match=r"names\.json: the dataset has no class '0'; it has cat, dog"):
        clip_class_names(["cat", "dog"], file)
    with pytest.raises(UserError, match="two classes have the name 'dog'"):
        clip_class_names(["1_dog", "2_dog"], None)
    for wrong, complaint in (("[1]", "must map classes to names"), ("{", "cannot be read as JSON")):
        file.write_text(wrong)
        with pytest.raises(UserError, match=complaint):
            clip_class_names(["cat", "dog"], file)


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ((), "at least one"),
        (("a photo",), "needs {} exactly once"),
        (("{}" + 60 * "!",), "tokens, and this CLIP reads at most 40"),
    ],
)
def test_invalid_prompts_are_errors(clip, prompts, complaint):
    with pytest.raises(UserError, match=complaint):
        clip.class_embeddings(["cat"], prompts)


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_without_transformers_the_error_says_what_to_install(toy, tmp_path, folder, monkeypatch):
    without_transformers(monkeypatch)
    code, _, err = typed("train", "zs", toy, "--clip", folder, *QUICK, "--out", tmp_path / "run")
    assert code == 2
    assert "pip install 'sightline[clip]'" in err


@pytest.mark.parametrize("name", ["dinov2-s14", "timm/vit_small_patch16_224.dino", "clip-b16", "openclip-l41"])
def test_an_unknown_clip_name_is_an_error_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match=f"--clip {name}: .* CLIP .*; choose clip-l14, openclip-b16, openclip-l14, "):
        open_clip(name)


def test_a_model_that_is_not_clip_is_an_error(toy, tmp_path):
    with pytest.raises(UserError, match="--clip nothing/here: transformers cannot read it"):
        open_clip("nothing/here")
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a vit, not a CLIP"):
        open_clip(str(tmp_path))


@pytest.mark.parametrize("config", [Zs, A2Zs, Ttr])
def test_a_loaded_run_predicts_the_same_without_transformers_or_the_original_files(
    config, toy, tmp_path, folder, monkeypatch
):
    more = (
        {"general_prompt": "a bird", "queue": 5}
        if config is Ttr
        else {"where": "random:nano"}
        if config is A2Zs
        else {}
    )
    run = train(config(**settings(toy, tmp_path / "run", folder, **more)))
    without_transformers(monkeypatch)
    images, expected = predictions_of(run)
    model = load(run)
    torch.testing.assert_close(
        model.predict([toy / image for image in images]).probabilities, expected, atol=1e-4, rtol=0
    )
    verdict = verify(model.method, torch.rand(3, 3, 64, 64), draws=1).verdict
    assert verdict == ("refused" if config is Zs else "blind")  # there is nothing hidden from the first
    assert facts_of(run)["selection"]["metric"] is None
    assert facts_of(run)["said"]["prompts"] == ["a photo of a {}." if config is Ttr else "a photo of a {}"]


def test_a_crop_of_the_whole_image_predicts_as_the_whole_image(toy, tmp_path, folder):
    whole = train(Zs(**settings(toy, tmp_path / "zs", folder)))
    crop = train(A2Zs(**settings(toy, tmp_path / "a2", folder, crop_size=("1",))))
    assert torch.equal(predictions_of(whole)[1], predictions_of(crop)[1])
    assert facts_of(crop)["where"]["backbone"]["file"] == "tiny"  # CLIP's own attention


def test_validation_data_select_the_crop_and_ties_go_to_the_first(toy, tmp_path, folder, monkeypatch):
    scores = iter([0.5, 0.75, 0.75, 0.6])
    monkeypatch.setattr(method_file, "score", lambda *_: next(scores))
    config = A2Zs(**settings(toy, tmp_path / "run", folder, crop_size=("1/2", "1/4"), layer=(-1, 0)))
    assert config.selects == "balanced"
    crops = facts_of(train(config))["crops"]
    assert (crops["sides"], crops["layer"]) == (["1/4"], -1)
    assert crops["rule"] == "highest balanced on val, the first where they tie"


@pytest.mark.parametrize(
    ("config", "more", "complaint"),
    [
        (A2Zs, {"crop_size": ("1/4+1/4",)}, r"--crop-size 1/4\+1/4: CLIP predicts from one crop"),
        (A2Zs, {"crop_size": ()}, "give at least one of each"),
        (A2Zs, {"layer": (9,)}, "--layer 9: .*tiny has 2 blocks, 0 to 1"),
        (Zs, {"size": 65}, "--size 65: must be a multiple of CLIP's patch, 16, such as 64"),
        (Ttr, {}, "--general-prompt: describe what all images show"),
        (Ttr, {"general_prompt": "a bird", "queue": 0}, "--queue 0: must be at least 1"),
        (Ttr, {"general_prompt": "a bird", "components": 17}, "--components 17: must be at most --rank, 16"),
    ],
)
def test_invalid_arguments_are_explained(config, more, complaint, toy, tmp_path, folder):
    with pytest.raises(UserError, match=complaint):
        train(config(**settings(toy, tmp_path / "run", folder, **more)))


def test_from_the_command_line_to_a_proof(toy, tmp_path, folder):
    run, flags = tmp_path / "run", ("--clip", folder, *QUICK, "--batch", 16)
    prompts = ("--prompts", "a photo of a {}", "a drawing of a {}")
    code, out, err = typed(
        "train", "a2-zs", toy, *flags, "--where", "random:nano", "--crop-size", "2/7", "1/2", *prompts, "--out", run
    )
    assert (code, "the best of 2" in out) == (0, True), err
    code, out, _ = typed("verify", run, "--limit", 2, "--draws", 1)
    assert (code, "Blind outside its sight" in out) == (0, True)
    assert typed("evaluate", run, *QUICK)[0] == 0
    code, out, _ = typed(
        "train", "ttr", toy, *flags, "--general-prompt", "a bird.", "--queue", 4, "--out", tmp_path / "ttr"
    )
    assert (code, "Nothing was selected" in out) == (0, True)
    assert typed("verify", tmp_path / "ttr", "--limit", 2, "--draws", 1)[0] == 0
