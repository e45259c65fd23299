"""From a folder of pictures to a table, as a user types it."""

import csv
import json
import sys

import pytest
from PIL import Image

from sightline import cli
from sightline.data.toyset import write_toy

from .conftest import shared


@pytest.fixture
def sightline(capsys, monkeypatch):
    """Runs a command in this process; gives exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sightline", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=64, val=24, test=40)


@pytest.fixture(scope="session")
def runs(toy, tmp_path_factory):
    """A probe, and two seeds of ERM, trained from the command line."""
    folder = tmp_path_factory.mktemp("runs")
    common = ["--backbone", "random:nano", "--workers", "0", "--device", "cpu", "--batch", "32"]
    jobs = {
        "probe": ["probe", toy, *common],
        "erm-0": ["erm", toy, *common, "--epochs", "1"],
        "erm-1": ["erm", toy, *common, "--epochs", "1", "--seed", "1"],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, arguments in jobs.items():
            patch.setattr(sys, "argv", ["sightline", "train", *map(str, arguments), "--out", str(folder / name)])
            with pytest.raises(SystemExit) as exit_:
                cli.main()
            assert exit_.value.code == 0
    return folder


def test_check_says_what_is_there_and_what_is_wrong(sightline, toy, tmp_path):
    code, out, _ = sightline("check", toy, "--out", tmp_path / "check.json")
    assert code == 0
    assert "128 rows, 2 classes, 4 groups" in out
    assert "knowing the group alone gives the label right" in out
    assert json.loads((tmp_path / "check.json").read_text())["ok"] is True

    broken = tmp_path / "broken"
    (broken / "cat").mkdir(parents=True)
    (broken / "dog").mkdir()
    Image.new("RGB", (8, 8)).save(broken / "cat" / "1.png")
    (broken / "dog" / "2.png").write_text("not a picture")
    code, out, _ = sightline("check", broken)
    assert code == 1
    assert "dog/2.png" in out


def test_train_prints_the_table_and_says_how_the_weights_were_chosen(sightline, toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    small = ["--backbone", "random:nano", "--epochs", 1, "--batch", 32, "--workers", 0, "--device", "cpu"]
    arguments = ["train", "erm", toy, *small, "--out", tmp_path / "run", "--select", "worst-group"]
    code, _, err = sightline(*arguments, "--tensorboard")
    assert (code, "pip install tensorboard" in err) == (2, True)
    code, out, err = sightline(*arguments)  # the failed attempt is not in the way
    assert code == 0
    assert "worst group" in out
    assert "Weights selected by worst-group on the val data" in out
    assert "epoch 1: loss" in err


def test_evaluate_on_its_own_data_and_on_others(sightline, runs, toy, tmp_path):
    before = (runs / "erm-0" / "predictions" / "test.csv").read_text()
    code, out, _ = sightline("evaluate", runs / "erm-0", "--workers", 0, "--device", "cpu")
    assert code == 0
    assert "group stork/water" in out
    assert (runs / "erm-0" / "predictions" / "test.csv").read_text() == before

    other = tmp_path / "other"
    for name in ("duck", "stork"):
        (other / name).mkdir(parents=True)
    with (toy / "rows.csv").open(newline="") as file:
        for i, row in enumerate(list(csv.DictReader(file))[:12]):
            with Image.open(toy / row["image"]) as picture:
                picture.save(other / row["label"] / f"{i}.png")
    on_others = ("evaluate", runs / "erm-0", other, "--workers", 0, "--device", "cpu")
    assert sightline(*on_others, "--out", tmp_path / "on")[0] == 0
    assert json.loads((tmp_path / "on" / "metrics.json").read_text())["splits"]["test"]["n"] == 12

    (other / "goose").mkdir()
    Image.new("RGB", (64, 64)).save(other / "goose" / "1.png")
    code, _, err = sightline(*on_others)
    assert code == 2
    assert "does not know the class 'goose'; it knows duck, stork" in err


def test_predict_without_labels(sightline, runs, toy, tmp_path):
    code, out, _ = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--batch", 7)
    lines = list(csv.DictReader(out.splitlines()))
    assert (code, len(lines)) == (0, 40)
    assert set(lines[0]) == {"image", "predicted", "duck", "stork"}
    assert float(lines[0]["duck"]) + float(lines[0]["stork"]) == pytest.approx(1, abs=1e-5)
    with (runs / "probe" / "predictions" / "test.csv").open(newline="") as file:
        known = {row["image"]: row["predicted"] for row in csv.DictReader(file)}
    assert all(known[f"test/{line['image'].rpartition('/')[2]}"] == line["predicted"] for line in lines)

    code, _, _ = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--out", tmp_path / "p.json")
    assert len(json.loads((tmp_path / "p.json").read_text())) == 40
    code, _, err = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--overlay", tmp_path / "o")
    assert (code, "sees the whole picture" in err) == (2, True)


def test_compare_counts_seeds_as_one_and_pairs_images(sightline, runs, tmp_path):
    code, out, _ = sightline(
        "compare", runs / "probe", runs / "erm-0", runs / "erm-1", "--out", tmp_path / "c.json"
    )  # fmt: skip
    assert code == 0
    entries = json.loads((tmp_path / "c.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == ["probe", "erm-0 and 1 more seeds"]
    assert "paired bootstrap" in " ".join(out.split())
    code, _, err = sightline("compare", runs / "probe")
    assert (code, "at least two" in err) == (2, True)


def test_verify_a_run_that_sees_everything(sightline, runs, toy):
    code, out, _ = sightline("verify", runs / "erm-0", toy / "test", "--limit", 4, "--draws", 1)
    assert code == 1
    assert "its sight hides nothing, so there is nothing to prove" in out


def test_the_toy_set_from_the_command_line(sightline, tmp_path):
    code, out, _ = sightline("toy", tmp_path / "toy", "--train", 20, "--val", 8, "--test", 8, "--size", 32)
    assert (code, "36 pictures" in out) == (0, True)
    assert "36 rows, 2 classes, 4 groups" in sightline("check", tmp_path / "toy")[1]
    code, _, err = sightline("toy", tmp_path / "toy")
    assert (code, "is there already" in err) == (2, True)


def test_build_a_data_set(sightline, tmp_path):
    packs = shared("data")
    arguments = ("data", "waterbirds", "--cub", packs, "--scenes", packs, "--out", tmp_path / "wb", "--limit", 6)
    code, out, _ = sightline(*arguments, "--workers", 1)
    assert code == 0
    assert "6 pictures" in out
    assert "already there" in sightline(*arguments, "--workers", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "erm", "{nowhere}"], "no such file or folder"),
        (["train", "erm", "{toy}", "--backbone", "random:huge"], "random:huge: no such backbone"),
        (["train", "erm", "{toy}", "--layout", "imagenette"], "imagenette: no such layout"),
        (["train", "erm", "{toy}", "--backbone", "random:nano", "--out", "{file}/run"], "cannot be written"),
        (
            ["train", "erm", "{toy}", "--backbone", "random:nano", "--size", "60"],
            "--size 60: must be a multiple of random:nano's patch, 8, such as 56",
        ),
        (["evaluate", "{toy}"], "not a run folder (no run.json)"),
        (["predict", "{nowhere}", "{toy}"], "not a run folder"),
        (["data", "waterbirds", "--cub", "{toy}", "--out", "{nowhere}"], "waterbirds needs scenes"),
    ],
)
def test_wrong_questions_get_one_line(sightline, toy, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    places = {"nowhere": tmp_path / "nowhere", "toy": toy, "file": tmp_path / "file"}
    common = ["--device", "cpu", "--workers", "0"] if arguments[0] == "train" else []
    if arguments[0] == "train" and "--out" not in arguments:
        common += ["--out", str(tmp_path / "run")]
    code, _, err = sightline(*(a.format(**places) for a in arguments), *common)
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("sightline: ")]
    assert len(lines) == 1
    assert message.format(**places) in lines[0]
