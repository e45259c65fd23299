"""From a folder of pictures to a table, as a user types it."""

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import accelerate
import pytest
import torch
from PIL import Image

from sightline import cli
from sightline.data.toyset import write_toy
from sightline.load import Model, load
from sightline.sight import Sight

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
    assert (code, "pip install 'sightline[tensorboard]'" in err) == (2, True)
    code, out, err = sightline(*arguments)  # the failed attempt is not in the way
    assert code == 0
    assert "toy, split 'test': 40 pictures" in out
    assert "worst group" in out
    assert "Weights selected by worst-group on the val data" in out
    assert "epoch 1: loss" in err


def test_a_plain_probe_does_not_claim_a_selection(sightline, toy, tmp_path):
    small = ["--backbone", "random:nano", "--workers", 0, "--device", "cpu", "--out", tmp_path / "run"]
    _, out, _ = sightline("train", "probe", toy, "--plain", *small)
    assert "Nothing was selected." in out
    _, out, _ = sightline("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu", "--out", tmp_path / "on")
    assert "Nothing was selected." in out


def test_check_shows_how_far_it_is_only_to_someone_who_watches(sightline, toy, monkeypatch):
    assert sightline("check", toy)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with cli._bar("opening pictures", 3) as progress:
        assert progress is not None
        progress(3)


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


def toy_pictures(toy, folder, count=12, column=None):
    """Some of the toy's pictures as class folders, or with a group column of this name as rows.csv."""
    folder.mkdir(parents=True)
    lines = [f"image,label,{column}"]
    with (toy / "rows.csv").open(newline="") as file:
        for i, row in enumerate(list(csv.DictReader(file))[:count]):
            target = folder / row["label"] / f"{i}.png"
            target.parent.mkdir(exist_ok=True)
            shutil.copy(toy / row["image"], target)
            lines.append(f"{row['label']}/{i}.png,{row['label']},{'odd' if i % 2 else 'even'}")
    if column:
        (folder / "rows.csv").write_text("\n".join(lines))
    return folder


def copied(run, folder, **facts):
    """A run that says something else about itself."""
    shutil.copytree(run, folder)
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**known, **facts}))
    return folder


def test_other_data_may_have_other_groups_and_get_a_folder_of_their_own(sightline, runs, toy, tmp_path):
    run = copied(runs / "probe", tmp_path / "run")
    others = [toy_pictures(toy, tmp_path / name / "birds", n, "group") for name, n in (("a", 12), ("b", 16))]
    for other in others:
        code, out, err = sightline("evaluate", run, other, "--workers", 0, "--device", "cpu")
        assert code == 0, err
        assert "these are other groups than in training, which had no 'duck/even'" in out
        assert "birds, split 'test': " in out
    made = sorted(run.glob("on-birds-*"))
    assert len(made) == 2
    for folder in made:
        content = json.loads((folder / "metrics.json").read_text())
        assert content["data"]["name"] == "birds"
        assert content["data"]["fingerprint"].startswith(folder.name.removeprefix("on-birds-"))
        assert (folder / "predictions" / "test.csv").exists()
    code, _, err = sightline("evaluate", run, other, "--device", "cpu", "--out", run)
    assert (code, "is for the run's own data" in err) == (2, True)
    on_one = ("--workers", 0, "--device", "cpu", "--out", tmp_path / "on")
    assert sightline("evaluate", run, others[0], *on_one)[0] == 0
    code, _, err = sightline("evaluate", run, others[1], *on_one)
    assert (code, "is about other data" in err) == (2, True)


def test_own_data_are_known_where_they_lie_and_refused_when_changed(sightline, toy, tmp_path):
    data = toy_pictures(toy, tmp_path / "birds", 64)
    common = ["--backbone", "random:nano", "--workers", 0, "--device", "cpu", "--batch", 32]
    code, out, _ = sightline("train", "probe", data, *common, "--out", tmp_path / "run")
    assert code == 0
    assert "note  " in out  # what was decided about splits
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["notes"]
    assert notes
    assert all(note in out for note in notes)
    before = (tmp_path / "run" / "predictions" / "test.csv").read_text()

    moved = data.rename(tmp_path / "moved")
    code, _, err = sightline("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu")
    assert (code, "no longer there; say where" in err) == (2, True)
    assert sightline("evaluate", tmp_path / "run", moved, "--workers", 0, "--device", "cpu")[0] == 0
    assert (tmp_path / "run" / "predictions" / "test.csv").read_text() == before  # and not the training pictures

    moved.rename(data)
    next((data / "duck").iterdir()).unlink()
    code, _, err = sightline("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu")
    assert (code, "have changed since this run was trained" in err, "give them explicitly" in err) == (2, True, True)
    code, out, _ = sightline("evaluate", tmp_path / "run", data, "--workers", 0, "--device", "cpu")
    assert (code, "it may have been trained on some of these pictures" in out) == (0, True)


def test_the_pictures_that_chose_the_weights_are_named(sightline, runs, tmp_path, capsys):
    run = copied(runs / "erm-0", tmp_path / "run")
    _, out, _ = sightline("evaluate", run, "--split", "val", "--workers", 0, "--device", "cpu")
    assert "split 'val': 24 pictures" in out
    assert "these pictures also chose the weights" in out
    content = json.loads((run / "metrics.json").read_text())
    assert set(content["splits"]) == {"val", "test"}
    (run / "metrics.json").write_text(json.dumps(content | {"splits": {"val": content["splits"]["val"]}}))
    cli._show_metrics(run, "test")
    out = capsys.readouterr().out
    assert "there is no split 'test', so this is 'val'" in out
    assert "these pictures also chose the weights" in out

    content["selected_by"] = content["selected_on"] = None
    (run / "metrics.json").write_text(json.dumps(content))
    _, out, _ = sightline("evaluate", run, "--split", "val", "--workers", 0, "--device", "cpu")
    assert "Nothing was selected." in out
    assert "chose the weights" not in out


def test_what_is_damaged_or_cannot_be_written_gets_one_line(sightline, runs, toy, tmp_path):
    run = copied(runs / "probe", tmp_path / "run")
    quick = ("--workers", 0, "--device", "cpu")
    (tmp_path / "file").write_text("")
    code, _, err = sightline("evaluate", run, *quick, "--out", tmp_path / "file" / "on")
    assert (code, "cannot be made" in err) == (2, True)
    (run / "metrics.json").write_text("{")
    code, _, err = sightline("evaluate", run, *quick)
    assert (code, "metrics.json: damaged" in err) == (2, True)
    killed = copied(runs / "probe", tmp_path / "killed", vit=None)
    for command in (("evaluate", killed), ("predict", killed, toy / "test")):
        code, _, err = sightline(*command, "--device", "cpu")
        assert (code, "ended before it had a model" in err) == (2, True)
    for command in (("predict", runs / "probe", toy / "test", "--device", "cpu"), ("check", toy),
                    ("verify", runs / "probe"), ("compare", runs / "probe", runs / "erm-0")):  # fmt: skip
        code, out, err = sightline(*command, "--out", tmp_path / "file" / "x.json")
        assert (code, "x.json: cannot be written" in err, "--resume" in err, out) == (2, True, False, "")


def test_an_interrupted_training_can_go_on_and_nothing_else(sightline, runs, toy, monkeypatch):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert sightline("train", "erm", toy)[::2] == (130, "sightline: stopped; go on with --resume\n")
    assert sightline("check", toy)[::2] == (130, "sightline: stopped\n")


def test_only_the_main_process_writes_and_prints(sightline, runs, toy, tmp_path, monkeypatch):
    run = copied(runs / "probe", tmp_path / "run")
    before = (run / "metrics.json").read_text()
    (run / "predictions" / "test.csv").unlink()
    monkeypatch.setattr(accelerate.Accelerator, "is_main_process", False)
    monkeypatch.setattr(cli, "_is_main_process", lambda: False)
    assert sightline("evaluate", run, "--workers", 0, "--device", "cpu")[:2] == (0, "")
    assert (run / "metrics.json").read_text() == before
    assert not (run / "predictions" / "test.csv").exists()


def test_predict_without_labels(sightline, runs, toy, tmp_path):
    code, out, _ = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--batch", 7)
    lines = list(csv.DictReader(out.splitlines()))
    assert (code, len(lines)) == (0, 40)
    assert set(lines[0]) == {"image", "predicted", "p_duck", "p_stork"}
    assert float(lines[0]["p_duck"]) + float(lines[0]["p_stork"]) == pytest.approx(1, abs=1e-5)
    with (runs / "probe" / "predictions" / "test.csv").open(newline="") as file:
        known = {row["image"]: row["predicted"] for row in csv.DictReader(file)}
    assert all(known[f"test/{line['image'].rpartition('/')[2]}"] == line["predicted"] for line in lines)

    code, _, _ = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--out", tmp_path / "p.json")
    assert len(json.loads((tmp_path / "p.json").read_text())) == 40
    code, _, err = sightline("predict", runs / "probe", toy / "test", "--device", "cpu", "--overlay", tmp_path / "o")
    assert (code, "sees the whole picture" in err) == (2, True)


def test_one_damaged_picture_does_not_spoil_the_others(sightline, runs, toy, tmp_path):
    pictures = toy_pictures(toy, tmp_path / "birds", 6)
    (pictures / "duck" / "broken.png").write_text("no picture")
    out = tmp_path / "new" / "p.csv"
    code, _, err = sightline("predict", runs / "probe", pictures, "--device", "cpu", "--batch", 2, "--out", out)
    assert code == 1
    assert "broken.png: not an image" in err
    assert "1 of 7 pictures could not be read" in err
    assert len(out.read_text().splitlines()) == 7


def test_a_class_may_be_called_like_a_column(sightline, runs, toy, tmp_path):
    facts = json.loads((runs / "probe" / "run.json").read_text())
    facts["data"]["classes"] = ["image", "predicted"]
    run = copied(runs / "probe", tmp_path / "run", data=facts["data"])
    _, out, _ = sightline("predict", run, toy / "test", "--device", "cpu")
    line = next(csv.DictReader(out.splitlines()))
    assert line["image"].endswith(".png")
    assert line["predicted"] in ("image", "predicted")


def test_overlays_of_equal_names_are_all_kept(sightline, runs, toy, tmp_path, monkeypatch):
    pictures = toy_pictures(toy, tmp_path / "birds", 4)
    first = min((pictures / "duck").iterdir())
    with Image.open(first) as picture:
        picture.save(first.with_suffix(".bmp"))
    shutil.copy(first, tmp_path / "birds" / "stork" / first.name)
    whole = Model.predict

    def narrowed(model, several):
        """Sees half of every picture, but all of a batch that is just one."""
        prediction = whole(model, several)
        keep = torch.ones(len(several), 2, 1, dtype=torch.bool)
        keep[:, 0] = len(several) == 1
        return replace(prediction, sight=Sight(keep=keep))

    monkeypatch.setattr(Model, "predict", narrowed)
    arguments = ("predict", runs / "probe", pictures, first, "--device", "cpu", "--out", tmp_path / "p.csv")
    code, _, err = sightline(*arguments, "--batch", 6, "--overlay", tmp_path / "seen")
    assert code == 0, err
    count = len((tmp_path / "p.csv").read_text().splitlines()) - 1
    drawn = sorted(path.relative_to(tmp_path / "seen") for path in (tmp_path / "seen").rglob("*.png"))
    assert count == len(drawn) == 7
    assert {Path("duck", f"{first.stem}{end}.png") for end in ("", "-2", "-3")} < {*drawn}
    assert Path("stork", f"{first.stem}.png") in drawn


def test_an_opened_picture_is_answered_like_its_file(runs, tmp_path):
    noise = torch.randint(0, 256, (64, 80, 4), generator=torch.Generator().manual_seed(0)).byte().numpy()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise).save(tmp_path / "turned.png", exif=exif)
    model = load(runs / "probe")
    with Image.open(tmp_path / "turned.png") as picture:
        assert torch.equal(model.predict(picture).logits, model.predict(tmp_path / "turned.png").logits)


def test_runs_are_told_apart_by_what_they_are(sightline, runs, tmp_path):
    facts = json.loads((runs / "erm-1" / "run.json").read_text())
    spelled = facts["config"] | {"data": "elsewhere", "save_minutes": 99, "tensorboard": True, "out": "x"}
    twin = copied(runs / "erm-1", tmp_path / "a" / "run", config=spelled)
    probe = copied(runs / "probe", tmp_path / "b" / "run")
    other = copied(runs / "erm-0", tmp_path / "c" / "run", config=facts["config"] | {"seed": 0, "lr": 1.0})
    out = tmp_path / "c.json"
    assert sightline("compare", probe, twin, runs / "erm-0", other, "--out", out)[0] == 0
    names = [entry["name"] for entry in json.loads(out.read_text())["entries"]]
    assert names == ["b/run", "a/run and 1 more seed", "c/run"]

    code, _, err = sightline("compare", probe, runs / "erm-1", twin)
    assert (code, "would count as two seeds; leave one out" in err) == (2, True)
    code, _, err = sightline("compare", runs / "erm-0", twin)
    assert (code, "differ only in their seed" in err) == (2, True)
    counts = {"train": dict.fromkeys(facts["data"]["counts"]["train"], 7)}
    data = facts["data"] | {"counts": counts, "fingerprint": "other"}
    fewer = copied(runs / "erm-0", tmp_path / "d", data=data)
    _, printed, _ = sightline("compare", probe, fewer)
    assert "trained on different numbers of pictures per group" in printed


def test_compare_counts_seeds_as_one_and_pairs_images(sightline, runs, tmp_path):
    code, out, _ = sightline(
        "compare", runs / "probe", runs / "erm-0", runs / "erm-1", "--out", tmp_path / "c.json"
    )  # fmt: skip
    assert code == 0
    entries = json.loads((tmp_path / "c.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == ["probe", "erm-0 and 1 more seed"]
    assert "paired bootstrap" in " ".join(out.split())
    assert "On the split 'test'" in out
    assert "note  2 seeds say little" in out
    assert all(entry["metrics"]["adjusted"] and entry["metrics"]["minority_worst_group"] for entry in entries)
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
