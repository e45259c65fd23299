"""The command line as a user meets it: help, exit codes, one-line errors, the demo."""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest
import torch
from PIL import Image

from sightline import cli
from sightline.config import Verify
from sightline.data.images import Preprocess, decode
from sightline.data.rows import read_rows
from sightline.methods import trainable_methods
from sightline.verify.target import load_images
from sightline.vit.model import Input
from sightline.vit.weights import save_backbone

from .commands import typed
from .conftest import small_vit


def help_texts(kind: type) -> dict[str, str]:
    """The docstrings of a configuration's fields, including inherited ones."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is object:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar"):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                hidden = ast.unparse(node.annotation).startswith("Suppress")
                nested = ast.unparse(node.annotation) == "Shaping"
                texts[node.target.id] = after.value.value if documented else "-" * (hidden or nested)
    return texts


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
def photos(tmp_path):
    folder, masks = tmp_path / "photos", tmp_path / "masks"
    folder.mkdir(), masks.mkdir()
    for i in range(3):
        noise = (torch.rand(40, 50, 3, generator=torch.Generator().manual_seed(i)) * 255).byte().numpy()
        Image.fromarray(noise).save(folder / f"{i}.png")
        mask = Image.new("L", (50, 40))
        mask.paste(255, (10, 10, 30, 35))
        mask.save(masks / f"{i}.png")
    return folder


def test_help_is_fast_and_does_not_import_torch():
    start = time.perf_counter()
    done = as_a_process("--help", interpreter=("-X", "importtime"))
    assert time.perf_counter() - start < 5, "a loose bound, for a busy machine: it takes less than half a second"
    assert (done.returncode, "verify" in done.stdout) == (0, True)
    assert " torch\n" not in done.stderr
    for line in done.stdout.splitlines():
        assert len(line) <= 80


@pytest.mark.parametrize("name", [*cli.COMMANDS, *(f"train {method}" for method in trainable_methods())])
def test_every_flag_has_a_help_text(name):
    command, _, method = name.partition(" ")
    kind = trainable_methods()[method].config if method else cli.COMMANDS[command].config
    texts = help_texts(kind)
    assert [field for field, text in texts.items() if not text] == []
    one_line = (kind.__doc__ or "").strip().splitlines()[0]
    assert one_line.endswith("."), "the one-line help is a whole sentence"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "ifam", "x", "--part", "3"), "sightline train ifam: unknown flag --part; did you mean --parts?"),
        (("train", "erm", "x", "--accumulate", "2"), "unknown flag --accumulate; "),
        (("predict", "x", "y", "--overlays=z"), "unknown flag --overlays; did you mean --overlay?"),
        (("verify", "x", "--zzzzz"), "unknown flag --zzzzz; `sightline verify --help` lists the flags"),
        (("trane", "x"), "sightline: unknown command trane; did you mean train?"),
        (("train", "ifan", "x"), "sightline train: unknown method ifan; did you mean ifam?"),
    ],
)
def test_an_unknown_flag_command_or_method_is_one_line_with_the_nearest_one(arguments, message):
    code, out, err = typed(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_closed_pipe_ends_the_command_quietly():
    reading = subprocess.Popen(
        [sys.executable, "-m", "sightline", "train", "ifam", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    reading.stdout.close()
    assert b"Traceback" not in reading.stderr.read()
    assert reading.wait() == 141


def test_verify_a_weights_file_on_toy_images(weights, tmp_path):
    out = sightline("verify", weights, "--size", 32, "--limit", 3, "--draws", 1, "--out", tmp_path / "c.json")[0]
    assert "3 toy images; sight: given masks, whole patches" in out
    assert "blind  Blind outside its sight" in out
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "blind"
    assert "not saved" not in out


def test_verify_own_images_by_attention_and_by_masks(weights, photos):
    out = sightline("verify", weights, photos, "--size", 32, "--draws", 1)[0]
    assert "3 images; sight: the 25% most attended patches" in out
    assert "End to end, measured and not proved" in out
    assert "not saved; save it with --out certificate.json." in out
    masks = photos.parent / "masks"
    out = sightline("verify", weights, photos, "--size", 32, "--masks", masks, "--sight", "pixels", "--draws", 1)[0]
    assert "sight: given masks, pixels" in out
    assert "pixels   NaN" in out


def test_a_leak_has_exit_code_1(weights, photos):
    done = as_a_process("verify", weights, photos, "--size", 32, "--masking", "late", "--draws", 1)
    assert (done.returncode, "leaks  Not blind" in done.stdout) == (1, True), done.stdout + done.stderr


def test_leak_finder_for_ones_own_module(photos, tmp_path):
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
    arguments = ("verify", f"{code}:Mine", photos, "--size", 32, "--patch", 8, "--draws", 1)
    assert "They enter at the model itself (Mine)" in sightline(*arguments, expect=1)[0]
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
        (["nowhere.safetensors"], "nowhere.safetensors: no such file or backbone"),
        (["{broken}"], "{broken}: not a readable safetensors file"),
        (["{weights}", "{text}"], "{text}: not a readable image"),
        (["{weights}", "nowhere.png"], "nowhere.png: no such file or folder"),
        (["{weights}", "{empty}"], "{empty}: no images in this folder"),
        (["{weights}", "{photos}", "--size", "33"], "--size 33: must be a multiple of the patch size 8, such as 32"),
        (["{weights}", "{photos}", "--where", "attention", "--sight", "pixels"], "--sight pixels needs masks"),
        (["{weights}", "{photos}", "--where", "masks"], "--where masks needs a folder of masks"),
        (["{weights}", "{photos}", "--masks", "{other}"], "no mask of that name"),
        (["{weights}", "{photos}", "--visible-fraction", "2"], "--visible-fraction 2.0: must lie between 0 and 1"),
        (["{weights}", "--out", "{text}/c.json", "--size", "32", "--limit", "2", "--draws", "1"], "cannot be written"),
        (["nowhere.py:build"], "nowhere.py: no such file"),
        (["{code2}", "{photos}"], "{code2}: name the function that returns the module, such as {code2}:build"),
        (["{weights}", "--patch", "4"], "--patch cannot be used with {weights}: it is for your own modules"),
        (["{weights}", "--draws", "0"], "--draws 0: must be at least 1"),
        (["{code}:build"], "{code}:2: "),
        (["{code2}:Needy"], "{code2}:Needy: must be callable without arguments"),
        (["{code2}:Odd", "--mask-argument", "visible", "--limit", "2"], "{code2}:Odd: fails on images [2, 3, 224"),
        (["{text}:build"], "cannot be imported"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_clear_line(arguments, message, weights, photos, tmp_path, capsys, monkeypatch):
    places = {"weights": weights, "photos": photos}
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


def test_a_mask_must_have_the_size_of_its_image(weights, photos):
    Image.new("L", (7, 5)).save(photos.parent / "masks" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png: .*7×5 pixels.* 50×40"):
        load_images(Verify(str(weights), (photos,), masks=photos.parent / "masks"), Input(size=(32, 32)))


def test_masks_go_through_the_same_geometry_as_their_images(tmp_path):
    """Also where a backbone cuts the border off."""
    white = Image.new("RGB", (80, 60))
    white.paste((255, 255, 255), (20, 15, 60, 45))
    for kind in ("images", "masks"):
        (tmp_path / kind / "x").mkdir(parents=True)
        white.save(tmp_path / kind / "x" / "1.png")
    command = Verify("", (tmp_path / "images",), masks=tmp_path / "masks")
    images, masks = load_images(command, Input(size=(32, 32), crop=0.875, resample="bilinear"))
    assert ((images[0, 0] > 0.5) != masks[0]).float().mean() < 0.05


def test_masks_of_the_same_name_are_matched_by_their_folders(tmp_path):
    for name, level in (("x", 255), ("y", 0)):
        for kind in ("images", "masks"):
            (tmp_path / kind / name).mkdir(parents=True)
            Image.new("L", (8, 8), level).save(tmp_path / kind / name / "1.png")
    command = Verify("", (tmp_path / "images",), masks=tmp_path / "masks")
    _, masks = load_images(command, Input(size=(8, 8)))
    assert masks.float().mean(dim=(1, 2)).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="several masks of that name"):
        load_images(Verify("", (tmp_path / "images" / "x" / "1.png",), masks=tmp_path / "masks"), Input(size=(8, 8)))


@pytest.mark.parametrize("given", ["", "rows.csv"])
def test_only_the_images_of_a_dataset_are_read_each_with_its_mask(given, toy):
    expects = Input(size=(64, 64))
    listed = read_rows(toy)
    alone, _ = load_images(Verify("", tuple(listed.image_path(i) for i in range(4)), limit=4), expects)
    images, masks = load_images(Verify("", (toy / given,), masks=toy / "masks", limit=4), expects)
    assert torch.equal(images, alone)
    assert torch.equal(masks, torch.stack([decode(listed, i, Preprocess.of(expects)).mask for i in range(4)]))


def test_masks_inside_the_image_folder_are_not_images(photos):
    expects, masks = Input(size=(32, 32)), photos.parent / "masks"
    images, _ = load_images(Verify("", (photos.parent,), masks=masks), expects)
    assert torch.equal(images, load_images(Verify("", (photos,)), expects)[0])
    with pytest.raises(ValueError, match="contains no images except the masks in"):
        load_images(Verify("", (masks,), masks=masks), expects)


def test_a_table_may_list_images_in_an_archive(photos):
    with zipfile.ZipFile(photos / "some.zip", "w") as archive:
        archive.write(photos / "1.png", "inside/1.png")
    (photos / "rows.csv").write_text("image,label\nsome.zip/inside/1.png,a\n")
    command = Verify("", (photos,), masks=photos.parent / "masks")
    assert [len(some) for some in load_images(command, Input(size=(32, 32)))] == [1, 1]
