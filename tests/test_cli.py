"""The command line as a person meets it."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from PIL import Image

from sightline import cli
from sightline.config import Verify
from sightline.data.images import Canvas, decode
from sightline.data.rows import read_rows
from sightline.verify.target import pictures as pictures_of
from sightline.vit.model import Input
from sightline.vit.weights import save_backbone

from .commands import typed
from .conftest import small_vit


def sightline(*arguments, expect=0) -> tuple[str, str]:
    """Output and errors of a command, which must end with this exit code."""
    code, out, err = typed(*arguments)
    assert code == expect, out + err
    return out, err


def as_a_process(*arguments, interpreter=()) -> subprocess.CompletedProcess:
    command = [sys.executable, *interpreter, "-m", "sightline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_backbone(small_vit(), path)
    return path


@pytest.fixture
def pictures(tmp_path):
    folder, masks = tmp_path / "pictures", tmp_path / "masks"
    folder.mkdir(), masks.mkdir()
    for i in range(3):
        noise = (torch.rand(40, 50, 3, generator=torch.Generator().manual_seed(i)) * 255).byte().numpy()
        Image.fromarray(noise).save(folder / f"{i}.png")
        mask = Image.new("L", (50, 40))
        mask.paste(255, (10, 10, 30, 35))
        mask.save(masks / f"{i}.png")
    return folder


def test_help_is_quick():
    start = time.perf_counter()
    done = as_a_process("--help", interpreter=("-X", "importtime"))
    assert time.perf_counter() - start < 5, "a loose bound: how fast it is, is for a quiet machine to say"
    assert (done.returncode, "verify" in done.stdout) == (0, True)
    assert " torch\n" not in done.stderr, "help must not wait for torch"


def test_whoever_reads_along_may_stop_reading():
    reading = subprocess.Popen(
        [sys.executable, "-m", "sightline", "train", "ifam", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    reading.stdout.close()
    assert b"Traceback" not in reading.stderr.read()
    assert reading.wait() == 141


def test_verify_a_weights_file_on_toy_pictures(weights, tmp_path):
    out = sightline("verify", weights, "--size", 32, "--limit", 3, "--draws", 1, "--out", tmp_path / "c.json")[0]
    assert "3 toy pictures, looking by given masks, patch by patch" in out
    assert "blind  Blind outside its sight" in out
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "blind"
    assert "not kept" not in out


def test_verify_own_pictures_by_attention_and_by_masks(weights, pictures):
    out = sightline("verify", weights, pictures, "--size", 32, "--draws", 1)[0]
    assert "3 pictures, looking by its own attention" in out
    assert "End to end (a figure, not a proof" in out
    assert "not kept; --out certificate.json keeps it." in out
    masks = pictures.parent / "masks"
    out = sightline("verify", weights, pictures, "--size", 32, "--masks", masks, "--sight", "pixels", "--draws", 1)[0]
    assert "pixel by pixel" in out
    assert "pixels   NaN" in out


def test_bad_news_has_another_exit_code(weights, pictures):
    done = as_a_process("verify", weights, pictures, "--size", 32, "--what", "late", "--draws", 1)
    assert (done.returncode, "leaks  Not blind" in done.stdout) == (1, True), done.stdout + done.stderr


def test_leak_finder_for_ones_own_module(pictures, tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Conv2d(3, 4, 8, 8)\n"
        "    def forward(self, x, visible=None):\n"
        "        x = self.embed(x)\n"
        "        return x.mean((2, 3)) if visible is None else torch.where(visible[:, None], x, 0).mean((2, 3))\n"
        "def number():\n"
        "    return 3\n"
    )
    arguments = ("verify", f"{code}:Mine", pictures, "--size", 32, "--patch", 8, "--draws", 1)
    assert "They get in at the model itself (Mine)" in sightline(*arguments, expect=1)[0]
    assert "No leak found" in sightline(*arguments, "--mask-argument", "visible")[0]
    error = sightline("verify", f"{code}:number", expect=2)[1]
    assert error.strip() == f"sightline: {code}:number: returned a int, not a torch.nn.Module"


def test_backbones_are_listed():
    out = sightline("backbones")[0]
    assert "dinov2-s14-reg" in out
    assert "rad-dino" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.safetensors"], "nowhere.safetensors: no such file, and no backbone of that name"),
        (["{broken}"], "{broken}: not a readable safetensors file"),
        (["{weights}", "{text}"], "{text}: not an image that can be read"),
        (["{weights}", "nowhere.png"], "nowhere.png: no such file or folder"),
        (["{weights}", "{empty}"], "{empty}: no pictures in this folder"),
        (["{weights}", "{pictures}", "--size", "33"], "--size 33: must be a multiple of the patch, 8, such as 32"),
        (["{weights}", "{pictures}", "--where", "attention", "--sight", "pixels"], "--sight pixels needs masks"),
        (["{weights}", "{pictures}", "--where", "masks"], "--where masks needs a folder of masks"),
        (["{weights}", "{pictures}", "--masks", "{other}"], "no mask of that name"),
        (["{weights}", "{pictures}", "--share", "2"], "--share 2.0: a share between 0 and 1"),
        (["{weights}", "--device", "cuda:99"], "--device cuda:99: not to be had here"),
        (["{weights}", "--out", "{text}/c.json", "--size", "32", "--limit", "2", "--draws", "1"], "cannot be written"),
        (["nowhere.py:build"], "nowhere.py: no such file"),
        (["{code2}", "{pictures}"], "{code2}: say which function returns the module, such as {code2}:build"),
        (["{weights}", "--patch", "4"], "--patch does not go with {weights}: that is for modules of your own"),
        (["{weights}", "--draws", "0"], "--draws 0: at least 1"),
        (["{code}:build"], "{code}:2: "),
        (["{code2}:Needy"], "{code2}:Needy: must be callable without arguments"),
        (["{code2}:Odd", "--mask-argument", "visible", "--limit", "2"], "{code2}:Odd: fails on images [2, 3, 224"),
        (["{text}:build"], "cannot be imported"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_clear_line(arguments, message, weights, pictures, tmp_path, capsys, monkeypatch):
    places = {"weights": weights, "pictures": pictures}
    for name, suffix in (("broken", ".safetensors"), ("text", ".jpg")):
        places[name] = tmp_path / f"{name}{suffix}"
        places[name].write_text("hello")
    places["code"], places["code2"] = tmp_path / "code.py", tmp_path / "code2.py"
    places["code"].write_text("import torch\ndef build(:\n")
    places["code2"].write_text(
        "import torch\nclass Odd(torch.nn.Module):\n    def forward(self, x):\n        return x.mean((2, 3))\n"
        "class Needy(Odd):\n    def __init__(self, width):\n        super().__init__()\n"
    )
    for name in ("empty", "other"):
        places[name] = tmp_path / name
        places[name].mkdir()
    Image.new("L", (4, 4)).save(places["other"] / "unrelated.png")
    monkeypatch.setattr(sys, "argv", ["sightline", "verify", *(a.format(**places) for a in arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sightline: ")
    assert message.format(**places) in lines[0]


def test_a_mask_must_have_the_size_of_its_picture(weights, pictures):
    Image.new("L", (7, 5)).save(pictures.parent / "masks" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png: 7×5 pixels but its picture has 50×40 pixels"):
        cli.run(Verify(str(weights), (pictures,), masks=pictures.parent / "masks", size=32))


def test_masks_go_through_the_same_geometry_as_their_pictures(tmp_path):
    """Also where a backbone cuts the border off."""
    white = Image.new("RGB", (80, 60))
    white.paste((255, 255, 255), (20, 15, 60, 45))
    for kind in ("images", "masks"):
        (tmp_path / kind / "x").mkdir(parents=True)
        white.save(tmp_path / kind / "x" / "1.png")
    command = Verify("", (tmp_path / "images",), masks=tmp_path / "masks")
    images, masks = pictures_of(command, Input(size=(32, 32), crop=0.875, resample="bilinear"))
    assert ((images[0, 0] > 0.5) != masks[0]).float().mean() < 0.05


def test_masks_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    for name, level in (("x", 255), ("y", 0)):
        for kind in ("images", "masks"):
            (tmp_path / kind / name).mkdir(parents=True)
            Image.new("L", (8, 8), level).save(tmp_path / kind / name / "1.png")
    command = Verify("", (tmp_path / "images",), masks=tmp_path / "masks")
    _, masks = pictures_of(command, Input(size=(8, 8)))
    assert masks.float().mean(dim=(1, 2)).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="several masks of that name"):
        pictures_of(Verify("", (tmp_path / "images" / "x" / "1.png",), masks=tmp_path / "masks"), Input(size=(8, 8)))


@pytest.mark.parametrize("given", ["", "rows.csv"])
def test_of_data_only_photographs_are_taken_and_each_finds_its_mask(given, toy):
    expects = Input(size=(64, 64))
    listed = read_rows(toy)
    alone, _ = pictures_of(Verify("", tuple(listed.image_path(i) for i in range(4)), limit=4), expects)
    images, masks = pictures_of(Verify("", (toy / given,), masks=toy / "masks", limit=4), expects)
    assert torch.equal(images, alone)
    assert torch.equal(masks, torch.stack([decode(listed, i, Canvas.of(expects)).mask for i in range(4)]))


def test_masks_inside_the_folder_of_pictures_are_no_pictures(pictures):
    expects, masks = Input(size=(32, 32)), pictures.parent / "masks"
    images, _ = pictures_of(Verify("", (pictures.parent,), masks=masks), expects)
    assert torch.equal(images, pictures_of(Verify("", (pictures,)), expects)[0])
    with pytest.raises(ValueError, match="no pictures in this folder but those in"):
        pictures_of(Verify("", (masks,), masks=masks), expects)


def test_a_table_may_list_pictures_in_an_archive(pictures):
    with zipfile.ZipFile(pictures / "some.zip", "w") as archive:
        archive.write(pictures / "1.png", "inside/1.png")
    (pictures / "rows.csv").write_text("image,label\nsome.zip/inside/1.png,a\n")
    command = Verify("", (pictures,), masks=pictures.parent / "masks")
    assert [len(some) for some in pictures_of(command, Input(size=(32, 32)))] == [1, 1]


def test_the_demo_removes_nothing_of_others(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dear.txt").write_text("keep me")
    error = sightline("demo", "--out", tmp_path / "photos", expect=2)[1]
    assert "was not made by the demo" in error
    assert (tmp_path / "photos" / "dear.txt").read_text() == "keep me"


def test_the_demo_shows_what_it_says(tmp_path):
    out = sightline("demo", "--out", tmp_path / "demo")[0]
    assert "worst group: " in out
    for method in ("probe", "erm"):
        metrics = json.loads((tmp_path / "demo" / method / "metrics.json").read_text())["splits"]["test"]
        assert metrics["adjusted"]["low"] > metrics["worst_group"]["high"], "the shortcut must show"
    worst = {
        run: json.loads((tmp_path / "demo" / run / "metrics.json").read_text())["splits"]["test"]["worst_group"]
        for run in ("probe", "a2", "erm", "ifam", "patches", "pixels")
    }
    less_and_more = (
        ("probe", "a2"), ("probe", "ifam"), ("erm", "patches"), ("patches", "pixels"), ("a2", "pixels"),
        ("ifam", "pixels"),
    )  # fmt: skip
    for less, more in less_and_more:
        assert worst[more]["low"] > worst[less]["high"], f"{more} sees less background than {less}, so it does better"
    assert out.count("blind  Blind outside its sight") == 4
    assert out.count("leaks  Not blind") == 1
    for name in ("a2", "ifam", "patches", "pixels", "late"):
        verdict = "leaks" if name == "late" else "blind"
        assert json.loads((tmp_path / "demo" / f"{name}.json").read_text())["verdict"] == verdict
    with Image.open(tmp_path / "demo" / "sight.png") as picture:
        assert picture.size[0] > 500
