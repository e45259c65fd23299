"""Commands as a user types them: check, train, evaluate, verify, toy, data; their errors of one line."""

import csv
import importlib
import json

import accelerate
import pytest
from PIL import Image

from sightline.console.terminal import bar
from sightline.datasets.data import format_counts
from sightline.evaluate import show_metrics

from .commands import copied, edit, toy_pictures, typed
from .conftest import shared


def test_check_reports_contents_and_problems(toy, tmp_path):
    code, out, _ = typed("check", toy, "--out", tmp_path / "check.json")
    assert code == 0
    assert "176 rows, 2 classes, 4 groups" in out
    assert "predicting the label from the group alone has accuracy" in out
    assert json.loads((tmp_path / "check.json").read_text())["ok"] is True

    broken = tmp_path / "broken"
    (broken / "cat").mkdir(parents=True)
    (broken / "dog").mkdir()
    Image.new("RGB", (8, 8)).save(broken / "cat" / "1.png")
    (broken / "dog" / "2.png").write_text("not an image")
    code, out, _ = typed("check", broken)
    assert code == 1
    assert "dog/2.png" in out


def test_train_prints_the_table_and_the_selection_rule(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("sightline.training.trackers.find_spec", lambda _: None)  # as if it were not installed
    small = ["--backbone", "random:nano", "--size", 32, "--epochs", 1, "--batch", 32, "--workers", 0, "--device", "cpu"]
    arguments = ["train", "erm", toy, *small, "--out", tmp_path / "run", "--select", "worst-group"]
    code, _, err = typed(*arguments, "--tracker", "wandb")
    assert (code, "--tracker wandb: not installed; pip install 'sightline[wandb]'" in err) == (2, True)
    code, out, err = typed(*arguments)  # the failed attempt is not in the way
    assert code == 0
    assert "toy, split 'test': 48 images" in out
    assert "worst-group accuracy" in out
    assert "Checkpoint selected by validation worst-group accuracy" in out
    assert "epoch 1: loss" in err


def test_an_untuned_probe_does_not_claim_a_selection(toy, tmp_path):
    small = ["--backbone", "random:nano", "--workers", 0, "--device", "cpu", "--out", tmp_path / "run"]
    _, out, _ = typed("train", "probe", toy, "--untuned", *small)
    assert "Nothing was selected." in out
    _, out, _ = typed("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu", "--out", tmp_path / "on")
    assert "Nothing was selected." in out


def test_check_shows_a_progress_bar_only_on_a_terminal(toy, monkeypatch):
    assert typed("check", toy)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with bar("opening images", 3) as progress:
        assert progress is not None
        progress(3)


def test_evaluate_on_its_own_data_and_on_others(runs, toy, tmp_path):
    before = (runs / "erm-0" / "predictions" / "test.csv").read_text()
    code, out, _ = typed("evaluate", runs / "erm-0", "--workers", 0, "--device", "cpu")
    assert code == 0
    assert "stork/water" in out
    assert (runs / "erm-0" / "predictions" / "test.csv").read_text() == before

    flags = ("--workers", 0, "--device", "cpu", "--cache", tmp_path / "cache", "--out", tmp_path / "cached")
    assert typed("evaluate", runs / "erm-0", toy, *flags)[0] == 0
    assert (tmp_path / "cached" / "predictions" / "test.csv").read_text() == before
    assert any((tmp_path / "cache").iterdir())

    other = tmp_path / "other"
    for name in ("duck", "stork"):
        (other / name).mkdir(parents=True)
    with (toy / "rows.csv").open(newline="") as file:
        for i, row in enumerate(list(csv.DictReader(file))[:12]):
            with Image.open(toy / row["image"]) as photo:
                photo.save(other / row["label"] / f"{i}.png")
    on_others = ("evaluate", runs / "erm-0", other, "--workers", 0, "--device", "cpu")
    assert typed(*on_others, "--out", tmp_path / "on")[0] == 0
    assert json.loads((tmp_path / "on" / "metrics.json").read_text())["splits"]["test"]["n"] == 12

    (other / "goose").mkdir()
    Image.new("RGB", (64, 64)).save(other / "goose" / "1.png")
    code, _, err = typed(*on_others)
    assert code == 2
    assert "does not know the class 'goose'; its classes are duck, stork" in err


def test_other_data_may_have_other_groups_and_get_a_folder_of_their_own(runs, toy, tmp_path):
    run = copied(runs / "probe", tmp_path / "run")
    others = [toy_pictures(toy, tmp_path / name / "birds", n, "group") for name, n in (("a", 12), ("b", 16))]
    for other in others:
        code, out, err = typed("evaluate", run, other, "--workers", 0, "--device", "cpu")
        assert code == 0, err
        assert "groups differ from those of training, which had no 'duck/even'" in out
        assert "birds, split 'test': " in out
    made = sorted(run.glob("on-birds-*"))
    assert len(made) == 2
    for folder in made:
        content = json.loads((folder / "metrics.json").read_text())
        assert content["data"]["name"] == "birds"
        assert content["data"]["fingerprint"].startswith(folder.name.removeprefix("on-birds-"))
        assert (folder / "predictions" / "test.csv").exists()
    code, _, err = typed("evaluate", run, other, "--device", "cpu", "--out", run)
    assert (code, "reserved for the run's own data" in err) == (2, True)
    on_one = ("--workers", 0, "--device", "cpu", "--out", tmp_path / "on")
    assert typed("evaluate", run, others[0], *on_one)[0] == 0
    code, _, err = typed("evaluate", run, others[1], *on_one)
    assert (code, "holds results on other data" in err) == (2, True)


def test_own_data_are_recognised_after_a_move_and_rejected_after_a_change(toy, tmp_path):
    data = toy_pictures(toy, tmp_path / "birds", 64)
    common = ["--backbone", "random:nano", "--size", 32, "--workers", 0, "--device", "cpu", "--batch", 32]
    code, out, _ = typed("train", "probe", data, *common, "--out", tmp_path / "run")
    assert code == 0
    assert "note  " in out  # what was decided about splits
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["notes"]
    assert notes
    assert all(note in out for note in notes)
    before = (tmp_path / "run" / "predictions" / "test.csv").read_text()

    moved = data.rename(tmp_path / "moved")
    code, _, err = typed("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu")
    assert (code, "no longer there; name their folder" in err) == (2, True)
    assert typed("evaluate", tmp_path / "run", moved, "--workers", 0, "--device", "cpu")[0] == 0
    assert (tmp_path / "run" / "predictions" / "test.csv").read_text() == before  # and not the training images

    moved.rename(data)
    next((data / "duck").iterdir()).unlink()
    code, _, err = typed("evaluate", tmp_path / "run", "--workers", 0, "--device", "cpu")
    assert (code, "have changed since this run was trained" in err, "evaluate on them as other data" in err) == (
        2,
        True,
        True,
    )
    code, out, _ = typed("evaluate", tmp_path / "run", data, "--workers", 0, "--device", "cpu")
    assert (code, "some of these images may have been used in training" in out) == (0, True)


def test_evaluation_on_the_selection_data_is_noted(runs, tmp_path, capsys):
    run = copied(runs / "erm-0", tmp_path / "run")
    _, out, _ = typed("evaluate", run, "--split", "val", "--workers", 0, "--device", "cpu")
    assert "split 'val': 32 images" in out
    assert "the checkpoint was selected on these images" in out
    content = json.loads((run / "metrics.json").read_text())
    assert set(content["splits"]) == {"val", "test"}
    edit(run / "metrics.json", json.dumps(content | {"splits": {"val": content["splits"]["val"]}}))
    show_metrics(run, "test")
    out = capsys.readouterr().out
    assert "no split 'test'; showing 'val'" in out
    assert "the checkpoint was selected on these images" in out

    content["selected_by"] = content["selected_on"] = None
    edit(run / "metrics.json", json.dumps(content))
    _, out, _ = typed("evaluate", run, "--split", "val", "--workers", 0, "--device", "cpu")
    assert "Nothing was selected." in out
    assert "was selected on these images" not in out


def test_damaged_files_and_unwritable_outputs_are_errors_of_one_line(runs, toy, tmp_path):
    run = copied(runs / "probe", tmp_path / "run")
    quick = ("--workers", 0, "--device", "cpu")
    (tmp_path / "file").write_text("")
    code, _, err = typed("evaluate", run, *quick, "--out", tmp_path / "file" / "on")
    assert (code, "cannot be created" in err) == (2, True)
    edit(run / "metrics.json", "{")
    code, _, err = typed("evaluate", run, *quick)
    assert (code, "metrics.json: damaged" in err) == (2, True)
    killed = copied(runs / "probe", tmp_path / "killed")
    facts = json.loads((killed / "run.json").read_text())
    del facts["vit"]
    edit(killed / "run.json", json.dumps(facts))
    for command in (("evaluate", killed), ("predict", killed, toy / "test")):
        code, _, err = typed(*command, "--device", "cpu")
        assert (code, "interrupted before it had a model" in err) == (2, True)
    for command in (("predict", runs / "probe", toy / "test", "--device", "cpu"), ("check", toy),
                    ("verify", runs / "probe"), ("compare", runs / "probe", runs / "erm-0")):  # fmt: skip
        code, out, err = typed(*command, "--out", tmp_path / "file" / "x.json")
        assert (code, "x.json: cannot be written" in err, "--resume" in err, out) == (2, True, False, "")


def test_ctrl_c_in_training_suggests_resume(runs, toy, monkeypatch):
    def interrupted(command):
        raise KeyboardInterrupt

    for module in ("sightline.train", "sightline.data.check"):
        monkeypatch.setattr(importlib.import_module(module), "run_command", interrupted)
    assert typed("train", "erm", toy)[::2] == (130, "sightline: stopped; continue with --resume\n")
    assert typed("check", toy)[::2] == (130, "sightline: stopped\n")


def test_only_the_main_process_writes_and_prints(runs, toy, tmp_path, monkeypatch):
    run = copied(runs / "probe", tmp_path / "run")
    before = (run / "metrics.json").read_text()
    (run / "predictions" / "test.csv").unlink()
    monkeypatch.setattr(accelerate.Accelerator, "is_main_process", False)
    monkeypatch.setattr(importlib.import_module("sightline.evaluate"), "is_main_process", lambda: False)
    assert typed("evaluate", run, "--workers", 0, "--device", "cpu")[:2] == (0, "")
    assert (run / "metrics.json").read_text() == before
    assert not (run / "predictions" / "test.csv").exists()


def test_verify_a_run_that_sees_everything(runs, toy):
    code, out, _ = typed("verify", runs / "erm-0", toy / "test", "--limit", 4, "--draws", 1)
    assert code == 1
    assert "its sight hides nothing, so there is nothing to prove" in out


def test_toy_writes_a_dataset(tmp_path):
    code, out, _ = typed("toy", tmp_path / "toy", "--train", 20, "--val", 8, "--test", 8, "--size", 32)
    assert (code, "36 images" in out) == (0, True)
    assert "36 rows, 2 classes, 4 groups" in typed("check", tmp_path / "toy")[1]
    code, _, err = typed("toy", tmp_path / "toy")
    assert (code, "exists already" in err) == (2, True)


def test_data_builds_a_dataset(tmp_path):
    packs = shared("data")
    arguments = ("data", "waterbirds", "--cub", packs, "--scenes", packs, "--out", tmp_path / "wb", "--limit", 6)
    code, out, _ = typed(*arguments, "--workers", 1)
    assert code == 0
    assert "6 images" in out
    assert "already there" in typed(*arguments, "--workers", 1)[1]


def test_counts_of_many_groups_fit_a_line():
    few = {"cat/day": 1200, "dog/day": 3}
    assert format_counts(few) == "cat/day 1,200, dog/day 3"
    many = {f"species {k}/{place}": 10 * k for k in range(1, 101) for place in ("land", "water")}
    assert format_counts(many) == "land 50,500, water 50,500, of 100 classes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "erm", "{nowhere}"], "no such file or folder"),
        (["train", "erm", "{toy}", "--backbone", "random:huge"], "random:huge: no such backbone"),
        (["train", "erm", "{toy}", "--layout", "imagenette"], "unknown layout 'imagenette'"),
        (["train", "erm", "{toy}", "--backbone", "random:nano", "--out", "{file}/run"], "cannot be written"),
        (
            ["train", "erm", "{toy}", "--backbone", "random:nano", "--size", "60"],
            "--size 60: must be a multiple of random:nano's patch, 8, such as 56",
        ),
        (["evaluate", "{toy}"], "not a run folder (no run.json)"),
        (["predict", "{nowhere}", "{toy}"], "not a run folder"),
        (["data", "waterbirds", "--cub", "{toy}", "--out", "{nowhere}"], "waterbirds needs scene"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(toy, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    places = {"nowhere": tmp_path / "nowhere", "toy": toy, "file": tmp_path / "file"}
    common = ["--device", "cpu", "--workers", "0"] if arguments[0] == "train" else []
    if arguments[0] == "train" and "--out" not in arguments:
        common += ["--out", str(tmp_path / "run")]
    code, _, err = typed(*(a.format(**places) for a in arguments), *common)
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("sightline: ")]
    assert len(lines) == 1
    assert message.format(**places) in lines[0]
