"""`sightline pretrain`: from images, with or without classes, to a backbone that loads."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.config import Pretrain
from sightline.data.unlabelled import has_classes, read_pretraining_rows
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.pretrain import pretrain
from sightline.pretrain import run_command as run
from sightline.vit import backbones
from sightline.vit.weights import load_backbone

from .small_runs import Stop, in_processes, log_of, stopped_after

FLAGS = [
    "--patch",
    "8",
    "--size",
    "32",
    "--global-size",
    "24",
    "--local-size",
    "16",
    "--local-crops",
    "2",
    "--prototypes",
    "64",
]
FLAGS += ["--head-width", "32", "--batch", "16", "--epochs", "2", "--warmup", "1", "--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=48, val=24, test=8, size=32, correlation=0.5)


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setitem(backbones.SIZES, "nano", (32, 2, 2))


def small(data: Path, out: Path, **changes) -> Pretrain:
    settings = {
        "size": 32,
        "global_size": 24,
        "local_size": 16,
        "local_crops": 2,
        "prototypes": 64,
        "head_width": 32,
        "batch": 16,
    }
    settings |= {
        "epochs": 2,
        "warmup": 1.0,
        "workers": 0,
        "device": "cpu",
        "full_size_fraction": 0.5,
        "validate_every": 1,
    }
    return Pretrain(data=data, out=out, **settings | changes)


def test_pretraining_writes_a_backbone_and_logs_its_metrics(toy, tmp_path, tiny):
    folder = pretrain(small(toy, tmp_path / "run"))
    vit = load_backbone(folder / "backbone.safetensors")
    assert (vit.config.width, vit.config.patch, vit.config.registers) == (32, 8, 4)
    assert vit.config.input.size == (32, 32)
    kept = load_file(folder / "best.safetensors")
    for name, tensor in vit.state_dict().items():
        assert torch.equal(tensor, kept[f"teacher.vit.{name}"].half().float()), "the teacher, in half precision"
    facts = json.loads((folder / "run.json").read_text())
    assert facts["state"] == "finished"
    assert facts["selection"] == {"metric": None, "on": None}
    for line in log_of(folder):
        assert {"loss", "dino", "koleo", "knn", "mass", "hit", "mass_of_even", "entropy", "prototypes_used"} <= set(
            line
        )
        assert 0 < line["entropy"] < 1
        assert 1 < line["prototypes_used"] <= 64
        assert line["mass_of_even"] == pytest.approx(log_of(folder)[0]["mass_of_even"])
    assert list((folder / "cache").glob("decoded-*.bin"))
    with pytest.raises(UserError, match="pretrained a backbone, not a classifier"):
        load(folder)


def test_a_probe_can_be_trained_on_the_backbone(toy, tmp_path, tiny):
    from sightline.config import Probe
    from sightline.train import train

    folder = pretrain(small(toy, tmp_path / "run", epochs=1))
    probe = Probe(toy, str(folder / "backbone.safetensors"), tmp_path / "probe", device="cpu", workers=0, untuned=True)
    assert (train(probe) / "metrics.json").is_file()


@pytest.mark.parametrize("changes", [{}, {"centring": "sinkhorn", "ibot": 0.5}], ids=["mean", "all"])
def test_an_interrupted_run_ends_with_the_same_bits(toy, tmp_path, tiny, changes):
    """Three steps an epoch; stopped in the middle of the second."""
    names = ("backbone.safetensors", "best.safetensors", "last.safetensors", "log.jsonl")
    cache = tmp_path / "cache"
    whole = pretrain(small(toy, tmp_path / "whole", cache=cache, **changes))
    config = small(toy, tmp_path / "stopped", cache=cache, save_minutes=0.0, **changes)
    with stopped_after(4), pytest.raises(Stop):
        pretrain(config)
    again = pretrain(replace(config, resume=True))
    assert {name: (whole / name).read_bytes() for name in names} == {
        name: (again / name).read_bytes() for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("centring", ["mean", "sinkhorn"])
def test_two_processes_train_as_one(toy, tmp_path, centring):
    pretrain(small(toy, tmp_path / "one", centring=centring, ibot=0.5, full_size_fraction=0.05, validate_every=5))
    flags = ("--centring", centring, "--ibot", 0.5, *FLAGS)
    codes, errors = in_processes(2, "pretrain", toy, "--out", tmp_path / "two", *flags)
    assert codes == [0, 0], errors[-3000:]
    for one, two in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        for name in ("loss", "dino", "koleo", "masked", "entropy", "mass", "prototypes_used"):
            assert one[name] == pytest.approx(two[name], rel=1e-3), name
    one, two = (load_file(tmp_path / out / "last.safetensors") for out in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-2, atol=5e-4)


def test_pictures_without_classes(toy, tmp_path, tiny, capsys):
    """Nested, with some beside the folders; what cannot be measured then is printed."""
    data = tmp_path / "trap"
    for number, image in enumerate(sorted((toy / "train").iterdir())):
        place = data / ("", "north/2021", "north/2022", "south")[number % 4]
        place.mkdir(parents=True, exist_ok=True)
        (place / image.name).write_bytes(image.read_bytes())
    assert run(small(data, tmp_path / "run", epochs=1)) == 0
    (line,) = log_of(tmp_path / "run")
    assert "knn" not in line
    assert "mass" not in line
    assert "entropy" in line
    printed = " ".join(capsys.readouterr().out.split())
    assert "no class labels" in printed
    assert "2 of 48 images held out" in printed
    load_backbone(tmp_path / "run" / "backbone.safetensors")


def test_a_table_of_pictures_and_masks_alone(toy, tmp_path):
    file = tmp_path / "list.csv"
    lines = [f"{toy}/train/{i:05d}.png,{toy}/masks/train/{i:05d}.png" for i in range(40)]
    file.write_text("\n".join(["image,mask", *lines]) + "\n")
    rows = read_pretraining_rows(file)
    assert (len(rows), rows.classes, len(rows.masks)) == (40, ("picture",), 40)
    assert len(rows.split_indices("val")) == 2
    assert np.array_equal(rows.splits, read_pretraining_rows(file).splits)
    file.write_text("image\na.png\n\n,\n")
    with pytest.raises(UserError, match=r"list\.csv:4: 2 cells under 1 columns"):
        read_pretraining_rows(file)
    file.write_text("picture\na.png\n")
    with pytest.raises(UserError, match="no column 'image' among picture"):
        read_pretraining_rows(file)


def test_class_folders_without_splits_hold_out_few_images(toy, tmp_path, tiny, capsys):
    """The folder names are classes, for k-NN accuracy."""
    for number, image in enumerate(sorted((toy / "train").iterdir())):
        place = tmp_path / "albums" / ("north", "south")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / image.name).write_bytes(image.read_bytes())
    rows = read_pretraining_rows(tmp_path / "albums")
    assert [len(rows.split_indices(split)) for split in ("train", "val", "test")] == [46, 2, 0]
    assert rows.classes == ("north", "south")
    assert rows.notes == ("2 of 48 images held out as validation data, seed 0",)
    with stopped_after(0), pytest.raises(Stop):
        pretrain(small(tmp_path / "albums", tmp_path / "stopped"))
    assert "2 of 48 images held out" in capsys.readouterr().out, "printed before training"
    (line,) = log_of(pretrain(small(tmp_path / "albums", tmp_path / "run", epochs=1)))
    assert "knn" in line


def test_a_table_with_labels_holds_out_few_images_unless_it_has_splits(tmp_path):
    lines = [f"{i}.png,{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "plain.csv").write_text("\n".join(["image,label", *lines]) + "\n")
    splits = [f"{line},{'train' if i < 20 else 'val'}" for i, line in enumerate(lines)]
    (tmp_path / "split.csv").write_text("\n".join(["image,label,split", *splits]) + "\n")
    assert len(read_pretraining_rows(tmp_path / "plain.csv").split_indices("val")) == 2
    assert len(read_pretraining_rows(tmp_path / "split.csv").split_indices("val")) == 20


def test_classes_are_recognised(toy, tmp_path):
    assert has_classes(toy)
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        (tmp_path / "photos" / folder / "1.png").write_bytes(b"")
    assert has_classes(tmp_path / "photos")
    (tmp_path / "photos" / "train" / "2.png").write_bytes(b"")
    assert not has_classes(tmp_path / "photos")
    assert len(read_pretraining_rows(tmp_path / "photos")) == 5


def test_the_toy_images_do_not_depend_on_the_number_of_processes(tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        write_toy(tmp_path / name, train=140, val=10, test=6, size=32, workers=workers)
    one, two = (sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two"))
    assert len(one) == 2 * 156 + 1
    for mine, theirs in zip(one, two, strict=True):
        assert mine.name == theirs.name
        assert mine.read_bytes() == theirs.read_bytes()


def test_the_last_weights_are_kept(toy, tmp_path, tiny):
    folder = pretrain(small(toy, tmp_path / "run", epochs=3, validate_every=2, keep_every=1))
    assert [line["last"] for line in log_of(folder)] == [0, 0, 1]
    assert ["knn" in line for line in log_of(folder)] == [True, True, True]
    best, last = (load_file(folder / f"{name}.safetensors") for name in ("best", "last"))
    for name, tensor in best.items():
        assert torch.equal(tensor, last[f"model.{name}"])
    kept = [load_file(folder / f"backbone{name}.safetensors") for name in ("-001", "-002", "-003", "")]
    assert all(torch.equal(tensor, kept[3][name]) for name, tensor in kept[2].items())
    assert any(not torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 36}, "--size 36: must be a multiple of the patch side, 8"),
        ({"local_size": 20}, "--local-size 20: must be a multiple"),
        (
            {"batch": 15, "grad_accum": 2},
            "--batch 15: must be divisible by 1 processes × 2 micro-batches; use",
        ),
        ({"grad_accum": 0}, "--grad-accum 0: must be at least 1"),
        ({"workers": -1}, "--workers -1: must not be negative"),
        ({"batch": 1}, "--batch 1: each micro-batch needs two images"),
        ({"warmup": 3.0}, "--warmup 3: must lie between 0 and --epochs"),
        ({"teacher_momentum": 1.5}, "--teacher-momentum 1.5"),
        ({"keep_every": 0}, "--keep-every 0: must be at least 1"),
        ({"data": Path("nowhere")}, "nowhere: no such file or folder"),
    ],
)
def test_invalid_settings_are_rejected_before_anything_is_written(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        pretrain(replace(small(toy, tmp_path / "run"), **changes))
    assert not (tmp_path / "run").exists()
