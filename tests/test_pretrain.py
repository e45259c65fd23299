"""`sightline pretrain`: from pictures, with or without classes, to a backbone that loads."""

import contextlib
import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.config import Pretrain
from sightline.data.unlabelled import has_classes, read_pictures
from sightline.datasets.toy import write_toy
from sightline.errors import UserError
from sightline.load import load_as_trained as load
from sightline.pretrain import pretrain
from sightline.pretrain import run_command as run
from sightline.vit import backbones
from sightline.vit.weights import load_backbone

from .small_runs import in_processes

FLAGS = ["--patch", "8", "--pixels", "32", "--large", "24", "--small", "16", "--smalls", "2", "--prototypes", "64"]
FLAGS += ["--head-width", "32", "--batch", "16", "--epochs", "2", "--warmup", "1", "--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), train=48, val=24, test=8, size=32, correlation=0.5)


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setitem(backbones.SIZES, "nano", (32, 2, 2))


def small(data: Path, out: Path, **changes) -> Pretrain:
    settings = {"pixels": 32, "large": 24, "small": 16, "smalls": 2, "prototypes": 64, "head_width": 32, "batch": 16}
    settings |= {"epochs": 2, "warmup": 1.0, "workers": 0, "device": "cpu", "finish": 0.5, "examine_every": 1}
    return Pretrain(data=data, out=out, **settings | changes)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_gives_a_backbone_that_explains_itself(toy, tmp_path, tiny):
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
    with pytest.raises(UserError, match="made a backbone, not a classifier"):
        load(folder)


def test_another_command_can_build_on_it(toy, tmp_path, tiny):
    from sightline.config import Probe
    from sightline.train import train

    folder = pretrain(small(toy, tmp_path / "run", epochs=1))
    probe = Probe(toy, str(folder / "backbone.safetensors"), tmp_path / "probe", device="cpu", workers=0, plain=True)
    assert (train(probe) / "metrics.json").is_file()


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopped_after(count: int):
    loop = importlib.import_module("sightline.train")
    steps, real = [], loop.train_step

    def interrupted(*arguments):
        if len(steps) == count:
            raise Stop
        steps.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", interrupted)
        yield


@pytest.mark.parametrize("changes", [{}, {"centring": "sinkhorn", "masked": 0.5}], ids=["mean", "all"])
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
def test_two_processes_do_what_one_does(toy, tmp_path, centring):
    pretrain(small(toy, tmp_path / "one", centring=centring, masked=0.5, finish=0.05, examine_every=5))
    flags = ("--centring", centring, "--masked", 0.5, *FLAGS)
    codes, errors = in_processes(2, "pretrain", toy, "--out", tmp_path / "two", *flags)
    assert codes == [0, 0], errors[-3000:]
    for one, two in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        for name in ("loss", "dino", "koleo", "masked", "entropy", "mass", "prototypes_used"):
            assert one[name] == pytest.approx(two[name], rel=1e-3), name
    one, two = (load_file(tmp_path / out / "last.safetensors") for out in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-2, atol=5e-4)


def test_pictures_without_classes(toy, tmp_path, tiny, capsys):
    """Nested, with some beside the folders; what cannot be measured then is said."""
    data = tmp_path / "trap"
    for number, picture in enumerate(sorted((toy / "train").iterdir())):
        place = data / ("", "north/2021", "north/2022", "south")[number % 4]
        place.mkdir(parents=True, exist_ok=True)
        (place / picture.name).write_bytes(picture.read_bytes())
    assert run(small(data, tmp_path / "run", epochs=1)) == 0
    (line,) = log_of(tmp_path / "run")
    assert "knn" not in line
    assert "mass" not in line
    assert "entropy" in line
    said = " ".join(capsys.readouterr().out.split())
    assert "no classes" in said
    assert "2 of 48 pictures are held out" in said
    load_backbone(tmp_path / "run" / "backbone.safetensors")


def test_a_table_of_pictures_and_masks_alone(toy, tmp_path):
    file = tmp_path / "list.csv"
    lines = [f"{toy}/train/{i:05d}.png,{toy}/masks/train/{i:05d}.png" for i in range(40)]
    file.write_text("\n".join(["image,mask", *lines]) + "\n")
    rows = read_pictures(file)
    assert (len(rows), rows.classes, len(rows.masks)) == (40, ("picture",), 40)
    assert len(rows.where("val")) == 2
    assert np.array_equal(rows.splits, read_pictures(file).splits)
    file.write_text("image\na.png\n\n,\n")
    with pytest.raises(UserError, match=r"list\.csv:4: 2 cells under 1 columns"):
        read_pictures(file)
    file.write_text("picture\na.png\n")
    with pytest.raises(UserError, match="no column 'image' among picture"):
        read_pictures(file)


def test_albums_without_splits_are_nearly_all_learned_from(toy, tmp_path, tiny, capsys):
    """Their names are kept as classes, to count neighbours by."""
    for number, picture in enumerate(sorted((toy / "train").iterdir())):
        place = tmp_path / "albums" / ("north", "south")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / picture.name).write_bytes(picture.read_bytes())
    rows = read_pictures(tmp_path / "albums")
    assert [len(rows.where(split)) for split in ("train", "val", "test")] == [46, 2, 0]
    assert rows.classes == ("north", "south")
    assert rows.notes == ("2 of 48 pictures are held out to watch training by, seed 0",)
    with stopped_after(0), pytest.raises(Stop):
        pretrain(small(tmp_path / "albums", tmp_path / "stopped"))
    assert "2 of 48 pictures are held out" in capsys.readouterr().out, "said before training"
    (line,) = log_of(pretrain(small(tmp_path / "albums", tmp_path / "run", epochs=1)))
    assert "knn" in line


def test_a_table_with_labels_is_nearly_all_learned_from_unless_it_has_splits(tmp_path):
    lines = [f"{i}.png,{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "plain.csv").write_text("\n".join(["image,label", *lines]) + "\n")
    splits = [f"{line},{'train' if i < 20 else 'val'}" for i, line in enumerate(lines)]
    (tmp_path / "split.csv").write_text("\n".join(["image,label,split", *splits]) + "\n")
    assert len(read_pictures(tmp_path / "plain.csv").where("val")) == 2
    assert len(read_pictures(tmp_path / "split.csv").where("val")) == 20


def test_classes_are_seen_where_there_are_any(toy, tmp_path):
    assert has_classes(toy)
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        (tmp_path / "photos" / folder / "1.png").write_bytes(b"")
    assert has_classes(tmp_path / "photos")
    (tmp_path / "photos" / "train" / "2.png").write_bytes(b"")
    assert not has_classes(tmp_path / "photos")
    assert len(read_pictures(tmp_path / "photos")) == 5


def test_several_processes_draw_the_same_pictures(tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        write_toy(tmp_path / name, train=140, val=10, test=6, size=32, workers=workers)
    one, two = (sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two"))
    assert len(one) == 2 * 156 + 1
    for mine, theirs in zip(one, two, strict=True):
        assert mine.name == theirs.name
        assert mine.read_bytes() == theirs.read_bytes()


def test_the_weights_kept_are_the_last(toy, tmp_path, tiny):
    folder = pretrain(small(toy, tmp_path / "run", epochs=3, examine_every=2, keep_every=1))
    assert [line["last"] for line in log_of(folder)] == [0, 0, 1]
    assert ["knn" in line for line in log_of(folder)] == [True, True, True]
    best, last = (load_file(folder / f"{name}.safetensors") for name in ("best", "last"))
    for name, tensor in best.items():
        assert torch.equal(tensor, last[f"model.{name}"])
    kept = [load_file(folder / f"backbone{name}.safetensors") for name in ("-001", "-002", "-003", "")]
    assert all(torch.equal(tensor, kept[3][name]) for name, tensor in kept[2].items())
    assert any(not torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pixels": 36}, "--pixels 36: must be a multiple of the patch, 8"),
        ({"small": 20}, "--small 20: must be a multiple"),
        ({"batch": 15, "accumulate": 2}, "--batch 15: must divide evenly among 1 processes and 2 parts; take 14"),
        ({"accumulate": 0}, "--accumulate 0: must be at least 1"),
        ({"workers": -1}, "--workers -1: must not be negative"),
        ({"batch": 1}, "two pictures to tell apart"),
        ({"warmup": 3.0}, "--warmup 3: must lie between 0 and --epochs"),
        ({"momentum": 1.5}, "--momentum 1.5"),
        ({"keep_every": 0}, "--keep-every 0: must be at least 1"),
        ({"data": Path("nowhere")}, "nowhere: no such file or folder"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_begun(toy, tmp_path, changes, complaint):
    with pytest.raises(UserError, match=complaint):
        pretrain(replace(small(toy, tmp_path / "run"), **changes))
    assert not (tmp_path / "run").exists()
