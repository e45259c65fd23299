"""The loop: what it learns, and that nothing but the question decides what comes out."""

import contextlib
import csv
import errno
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sightline.checkpoint import Clock, load_tensors
from sightline.config import Erm, Probe
from sightline.data.augment import Pictures
from sightline.data.images import decode, read_picture, to_tensor
from sightline.data.rows import read_rows
from sightline.data.toyset import write_toy
from sightline.errors import UserError
from sightline.lessons import view
from sightline.load import load
from sightline.predict import make_accelerator
from sightline.train import cosine, follow, train
from sightline.vit import Input
from sightline.weights import load_backbone, save_backbone
from sightline.what.features import cls_features


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A small data set on disk: 64 pixels, the shortcut right nine times out of ten."""
    return write_toy(tmp_path_factory.mktemp("toy"), train=96, val=32, test=48)


def small(toy: Path, out: Path, **changes) -> Erm:
    settings = {"backbone": "random:nano", "epochs": 3, "batch": 32, "lr": 3e-4, "workers": 0, "device": "cpu"}
    return Erm(data=toy, out=out, **settings | changes)


def command_line(toy: Path, out: Path, *more: str) -> list[str]:
    """The same as `small`, as a user types it."""
    command = ["train", "erm", str(toy), "--out", str(out), "--backbone", "random:nano", "--batch", "32"]
    return [*command, "--lr", "3e-4", "--workers", "0", "--device", "cpu", *more]


def files(folder: Path) -> dict[str, bytes]:
    """What a run is judged by: weights, log, answers and figures."""
    names = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv", "metrics.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_a_run_folder_remembers_everything(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run"))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["method"] == "erm"
    assert facts["config"]["epochs"] == 3
    assert facts["state"] == "finished"
    assert facts["selection"] == {"metric": "balanced", "on": "val"}
    assert facts["data"]["counts"]["test"].keys() == set(facts["data"]["group_names"])
    assert {"torch", "sightline"} <= facts["versions"].keys()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[-1]["loss"] < log[0]["loss"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["selected_by"] == "balanced"
    with (folder / "predictions" / "test.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 48
    model = load(folder)
    prediction = model.predict(toy / answers[0]["image"])
    assert model.classes[prediction.labels.item()] == answers[0]["predicted"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(toy, tmp_path):
    one, two = (files(train(small(toy, tmp_path / name))) for name in ("one", "two"))
    assert one == two
    other = files(train(small(toy, tmp_path / "three", seed=1)))
    assert other["best.safetensors"] != one["best.safetensors"]


def test_caches_and_workers_change_nothing(toy, tmp_path):
    plain = files(train(small(toy, tmp_path / "plain", epochs=2)))
    cached = files(train(small(toy, tmp_path / "cached", epochs=2, cache=tmp_path / "cache", workers=1)))
    assert plain == cached


def test_it_is_the_best_epoch_on_validation_data_that_is_kept(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=4))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    best = max(line["balanced"] for line in log)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(best, abs=1e-9)


class Stop(Exception):
    pass


def loop():
    """The file, not the word of that name."""
    return importlib.import_module("sightline.train")


@contextlib.contextmanager
def stopped_after(count: int, what: Callable[[], None] | None = None) -> Generator[None]:
    """The step after `count` others is not taken, or something else happens in it."""
    steps, real = [], loop().take_step

    def interrupted(*arguments):
        if len(steps) == count:
            if what is None:
                raise Stop
            what()
        steps.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop(), "take_step", interrupted)
        yield


@pytest.mark.parametrize("changes", [{}, {"average": 0.9, "accumulate": 2, "balance": "classes"}], ids=["plain", "all"])
@pytest.mark.parametrize("after", [2, 4, 7])
def test_an_interrupted_run_ends_with_the_same_bits(toy, tmp_path, after, changes):
    """Stopped in the middle of an epoch (3 steps each), with a checkpoint after every step."""
    whole = files(train(small(toy, tmp_path / "whole", **changes)))
    config = small(toy, tmp_path / "broken", save_minutes=0.0, **changes)
    with stopped_after(after), pytest.raises(Stop):
        train(config)
    resumed = files(train(replace(config, save_minutes=10.0, resume=True)))
    assert [name for name in whole if resumed[name] != whole[name]] == []


def changes(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_kill_9_at_any_moment_and_resume(toy, tmp_path):
    """Each time it has got further before it is killed, somewhere between one checkpoint and the next."""
    epochs = 12
    whole = files(train(small(toy, tmp_path / "whole", epochs=epochs)))
    arguments = ("--epochs", str(epochs), "--resume", "--save-minutes", "0")
    command = [sys.executable, "-m", "sightline", *command_line(toy, tmp_path / "killed", *arguments)]
    checkpoint = tmp_path / "killed" / "last.safetensors"
    for wait in (0.0, 0.03, 0.11):
        before = changes(checkpoint)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started = time.monotonic()
        while changes(checkpoint) == before and process.poll() is None and time.monotonic() - started < 120:
            time.sleep(0.002)
        time.sleep(wait)
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert changes(checkpoint) != before
        assert not (tmp_path / "killed" / "metrics.json").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killed = files(tmp_path / "killed")
    assert [name for name in whole if killed[name] != whole[name]] == []
    assert not list((tmp_path / "killed").glob("*.partial"))


STOPPING = """
import importlib
from sightline.cli import main

loop, steps = importlib.import_module("sightline.train"), []
real = loop.take_step

def take_step(*arguments):
    steps.append(1)
    return real(*arguments) if len(steps) <= 4 else 1 / 0

loop.take_step = take_step
main()
"""


def launch(toy: Path, out: Path, processes: int, *more: str, script: Path | None = None) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    program = ["-m", "sightline"] if script is None else [str(script)]
    command = [sys.executable, *launcher, *program, *command_line(toy, out, *more)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_alike(one: Path, several: Path) -> None:
    """Up to the order in which numbers are added."""
    for mine, theirs in zip(log_of(one), log_of(several), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["balanced"] == pytest.approx(theirs["balanced"], abs=0.04)
    weights = [load_file(run / "last.safetensors") for run in (one, several)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=2e-4)


@pytest.mark.slow
def test_three_processes_do_what_one_does_also_when_resumed(toy, tmp_path):
    """A batch of 32 is not divisible by 3; stopped in the second epoch, after a save that all take part in."""
    settings = {"epochs": 2, "accumulate": 2, "average": 0.9}
    flags = ("--epochs", "2", "--accumulate", "2", "--average", "0.9")
    one = train(small(toy, tmp_path / "one", **settings))
    result = launch(toy, tmp_path / "three", 3, *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_alike(one, tmp_path / "three")
    assert json.loads((tmp_path / "three" / "run.json").read_text())["processes"] == 3

    script = tmp_path / "stopping.py"
    script.write_text(STOPPING)
    result = launch(toy, tmp_path / "stopped", 3, *flags, "--save-minutes", "0", script=script)
    assert "ZeroDivisionError" in result.stderr
    _, facts = load_tensors(tmp_path / "stopped" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 1)
    result = launch(toy, tmp_path / "stopped", 3, *flags, "--resume", "--save-minutes", "0")
    assert result.returncode == 0, result.stderr[-3000:]
    assert_alike(one, tmp_path / "stopped")


@pytest.mark.slow
def test_several_processes_refuse_together(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    result = launch(toy, tmp_path / "run", 2, "--epochs", "1")
    assert result.returncode != 0
    assert "there is a run already" in result.stderr


def test_accumulation_computes_the_same_step(toy, tmp_path):
    whole = train(small(toy, tmp_path / "whole", epochs=1))
    parts = train(small(toy, tmp_path / "parts", epochs=1, accumulate=4))
    losses = [json.loads((run / "log.jsonl").read_text())["loss"] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_frozen_backbone_stays_as_it_was(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", frozen=True, epochs=1))
    before = load_backbone("random:nano", classes=2, seed=0).state_dict()
    after = load(folder).method.vit.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def test_early_stopping(toy, tmp_path):
    folder = train(small(toy, tmp_path / "run", epochs=30, patience=2, lr=0.0))
    assert len((folder / "log.jsonl").read_text().splitlines()) == 3


def test_the_schedule_is_the_papers():
    assert cosine(0, 90) == 1.0
    assert cosine(45, 90) == pytest.approx(0.5)
    assert cosine(89, 90) == pytest.approx(0.5 * (1 + np.cos(np.pi * 89 / 90)))


def test_probe_plain_and_tuned(toy, tmp_path):
    for plain in (True, False):
        config = Probe(
            data=toy, out=tmp_path / f"plain-{plain}", backbone="random:nano", workers=0, device="cpu", plain=plain,
            cache=tmp_path / "features",
        )  # fmt: skip
        folder = train(config)
        line = json.loads((folder / "log.jsonl").read_text())
        assert line["standardized"] is not plain
        assert (line["c"] == 1.0) or not plain
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(line["balanced"], abs=1e-9)
        assert metrics["selected_by"] == (None if plain else "balanced")
        assert json.loads((train(replace(config, resume=True)) / "log.jsonl").read_text()) == line, "no second line"
    assert len(list((tmp_path / "features").glob("features-*.safetensors"))) == 2, "computed once for both"


def test_a_changed_data_set_is_noticed(toy, tmp_path):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(toy, data)
    train(small(data, tmp_path / "run", epochs=1))
    (data / "train" / "00000.png").write_bytes((data / "train" / "00001.png").read_bytes() + b"x")
    with pytest.raises(UserError, match="the data have changed since this run began"):
        train(small(data, tmp_path / "run", epochs=1, resume=True))


def test_other_settings_are_not_mixed_into_a_run(toy, tmp_path):
    train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match="there is a run already"):
        train(small(toy, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match=r"begun with other settings \(epochs: 1 became 2\)"):
        train(small(toy, tmp_path / "run", epochs=2, resume=True))


def on_a_disk_of(size: int, toy: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    """As a limit on the size of files."""
    code = (
        "import resource, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); sys.argv = sys.argv[1:]; "
        "from sightline.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "sightline", *command_line(toy, out, *more)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_full_disk_is_one_clear_line_and_no_half_file(toy, tmp_path):
    result = on_a_disk_of(60_000, toy, tmp_path / "run", "--epochs", "1")
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr.splitlines()[-1]
    assert not list((tmp_path / "run").glob("*.partial"))
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_disk_that_fills_up_later_loses_nothing(toy, tmp_path):
    whole = files(train(small(toy, tmp_path / "whole")))
    config = small(toy, tmp_path / "run", save_minutes=0.0)
    with stopped_after(4), pytest.raises(Stop):
        train(config)
    kept = (tmp_path / "run" / "last.safetensors").read_bytes()
    result = on_a_disk_of(60_000, toy, tmp_path / "run", "--epochs", "3", "--resume", "--save-minutes", "0")
    assert result.returncode == 2, result.stderr
    assert "go on with --resume" in result.stderr.splitlines()[-1]
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == kept
    assert not list((tmp_path / "run").glob("*.partial"))
    assert files(train(replace(config, resume=True))) == whole


def test_a_folder_that_cannot_be_written_is_said_in_one_line(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        train(small(toy, tmp_path / "file" / "run", epochs=1))

    def read_only(self, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", read_only)
    with pytest.raises(UserError, match="Read-only file system"):
        train(small(toy, tmp_path / "run", epochs=1))
    assert not list((tmp_path / "run").glob("*.partial"))


def test_killed_before_anything_was_written_a_run_can_begin_again(toy, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.123.partial").write_text("{")
    folder = train(small(toy, tmp_path / "run", epochs=1))
    assert not list(folder.glob("*.partial"))


def test_a_loss_that_is_no_number_stops_with_a_remedy(toy, tmp_path, monkeypatch):
    from sightline.methods.erm import Classifier

    broken = lambda self, lesson: {"loss": self.vit(lesson.images).logits.sum() * torch.nan}  # noqa: E731
    monkeypatch.setattr(Classifier, "forward", broken)
    with pytest.raises(UserError, match="lower --lr"):
        train(small(toy, tmp_path / "run", epochs=1))


def test_nothing_is_written_outside_the_run_folder(toy, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob("*")}
    train(small(toy, tmp_path / "run", epochs=1))
    assert {p: p.stat().st_mtime_ns for p in toy.rglob("*")} == before


# ---- stopping and going on -------------------------------------------------------------------------------------------


def test_ctrl_c_saves_first_and_the_rest_is_the_same(toy, tmp_path):
    whole = files(train(small(toy, tmp_path / "whole")))
    config = small(toy, tmp_path / "run")
    handler = signal.getsignal(signal.SIGINT)
    with stopped_after(4, what=lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        train(config)
    assert signal.getsignal(signal.SIGINT) is handler
    _, facts = load_tensors(tmp_path / "run" / "last.safetensors")
    assert (facts["epoch"], facts["step"]) == (1, 2), "the step that was being taken counts"
    assert files(train(replace(config, resume=True))) == whole


def test_patience_is_remembered_by_a_resumed_run(toy, tmp_path):
    config = small(toy, tmp_path / "run", epochs=30, patience=3, lr=0.0)
    with stopped_after(7), pytest.raises(Stop):
        train(config)
    folder = train(replace(config, resume=True))
    assert [line["epoch"] for line in log_of(folder)] == [1, 2, 3, 4]
    assert files(train(replace(config, resume=True))) == files(folder), "nothing is left to do"
    assert len(log_of(folder)) == 4


def test_saves_come_when_the_time_is_up(monkeypatch):
    times = iter(range(1000))
    monkeypatch.setattr("sightline.checkpoint.time.monotonic", lambda: now[0])
    now = [next(times)]
    clock = Clock(0.5, make_accelerator("cpu"))
    due = []
    for step in range(1, 100):
        now[0] = next(times)  # a second per step
        due += [step] if clock.due() else []
    assert due == [30, 60, 90]


def test_every_step_is_saved_if_asked_for(toy, tmp_path, monkeypatch):
    saved, real = [], loop().save
    monkeypatch.setattr(loop(), "save", lambda course: (saved.append(course.state.step), real(course)))
    train(small(toy, tmp_path / "run", epochs=1, save_minutes=0.0))
    assert saved == [1, 2, 3, 0]


def test_weights_of_a_lost_loss_are_never_saved(toy, tmp_path, monkeypatch):
    from sightline.methods.erm import Classifier

    whole, calls = Classifier.forward, []

    def breaks(self, lesson):
        calls.append(1)
        losses = whole(self, lesson)
        return {"loss": losses["loss"] * (torch.nan if len(calls) == 3 else 1)}

    monkeypatch.setattr(Classifier, "forward", breaks)
    with pytest.raises(UserError, match="lower --lr"):
        train(small(toy, tmp_path / "run", save_minutes=0.0))
    tensors, facts = load_tensors(tmp_path / "run" / "last.safetensors")
    assert facts["step"] == 2
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_another_version_on_resuming_is_written_down(toy, tmp_path, monkeypatch):
    train(small(toy, tmp_path / "run", epochs=1))
    from sightline import runs

    monkeypatch.setattr(runs, "versions", lambda: {"torch": "99"})
    folder = train(small(toy, tmp_path / "run", epochs=1, resume=True))
    assert json.loads((folder / "run.json").read_text())["resumed_with"] == [{"torch": "99"}]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"accumulate": 0}, "--accumulate 0"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": -1.0}, "--lr -1.0: must not be negative"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"average": 1.0}, "--average 1.0: must lie between 0 and 1"),
        ({"average": 0.0}, "--average 0.0"),
        ({"patience": 0}, "--patience 0"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(toy, tmp_path, wrong, said):
    if wrong == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=said):
        train(small(toy, tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


def table(folder: Path, classes: tuple[str, ...], splits: bool = True) -> Path:
    """Pictures of one colour each, in a CSV file without groups."""
    folder.mkdir()
    lines = ["image,label,split" if splits else "image,label"]
    for i in range(24):
        Image.new("RGB", (64, 48), (10 * i, 90, 255 - 10 * i)).save(folder / f"{i}.png")
        label = classes[i % len(classes)]
        lines.append(f"{i}.png,{label}" + (f",{('train', 'train', 'val', 'test')[i // 6]}" if splits else ""))
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("classes", "wrong", "said"),
    [
        (("a", "b"), {"select": "worst-group"}, "--select worst-group: these data have no groups"),
        (("a", "b"), {"balance": "groups"}, "--balance groups: these data have no groups"),
        (("a", "b", "c"), {"select": "auc"}, "--select auc: is for two classes, and these data have 3"),
        (("a",), {}, "of one class, 'a'"),
    ],
)
def test_settings_that_do_not_go_with_the_data_are_refused_at_once(tmp_path, classes, wrong, said):
    with pytest.raises(UserError, match=said):
        train(small(table(tmp_path / "data", classes), tmp_path / "run", **wrong))
    assert not (tmp_path / "run").exists()


def test_the_division_into_splits_does_not_follow_the_training_seed(tmp_path):
    data = table(tmp_path / "data", ("a", "b"), splits=False)
    runs = {"one": {}, "seed": {"seed": 1}, "split": {"split_seed": 1}}
    tested = {}
    for name, changes in runs.items():
        folder = train(small(data, tmp_path / name, epochs=1, batch=8, **changes))
        with (folder / "predictions" / "test.csv").open(newline="") as file:
            tested[name] = [line["image"] for line in csv.DictReader(file)]
    assert tested["one"] == tested["seed"]
    assert tested["one"] != tested["split"]


def test_one_python_process_trains_with_one_precision_after_the_other(toy, tmp_path):
    for precision in ("fp32", "bf16", "fp32"):
        folder = tmp_path / f"{precision}-{len(list(tmp_path.iterdir()))}"
        losses = [line["loss"] for line in log_of(train(small(toy, folder, epochs=1, precision=precision)))]
        assert np.isfinite(losses).all()


# ---- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop", [1.0, 0.875])
def test_without_augmentation_training_sees_what_evaluation_sees(tmp_path, crop):
    rows = read_rows(table(tmp_path / "data", ("a", "b")))
    expects = Input(size=(28, 42), crop=crop, resample="bilinear")
    canvas, augment = view("none", expects)
    images = torch.stack([decode(rows, i, canvas).image for i in range(3)])
    seen = augment(Pictures(images), seed=0, epoch=0, indices=torch.arange(3)).images
    for i in range(3):
        assert torch.equal(seen[i], to_tensor(read_picture(rows, i), expects))


def test_published_views_are_not_enlarged_and_have_black_corners():
    expects = Input(size=(28, 28), mean=(0.5, 0.5, 0.5))
    canvas, augment = view("published", expects)
    assert (canvas.size, augment.crop, augment.fill) == ((28, 28), 1.0, (0.0, 0.0, 0.0))
    canvas, augment = view("light", expects)
    assert (canvas.size, augment.crop, augment.fill) == ((32, 32), 0.875, (0.5, 0.5, 0.5))


def test_a_size_that_is_not_square_stays_so(monkeypatch):
    from sightline.methods import erm

    vit = load_backbone("random:nano", classes=2)
    wide = replace(vit.config, input=replace(vit.config.input, size=(2 * vit.config.patch, 3 * vit.config.patch)))
    vit.config = wide
    monkeypatch.setattr(erm, "load_backbone", lambda *_, **__: vit)
    assert erm.open_backbone(Erm(data=Path("data")), 2)[1].size == wide.input.size
    assert (
        erm.open_backbone(Erm(data=Path("data"), size=4 * vit.config.patch), 2)[1].size == (4 * vit.config.patch,) * 2
    )


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_the_moving_average_warms_up_as_published():
    model, average = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    expected = None
    for step in range(6):
        torch.nn.init.constant_(model.weight, float(step))
        follow(average, model, 0.6, step)
        decay = min(0.6, 1 - (1 + step) ** (-2 / 3))
        expected = float(step) if expected is None else decay * expected + (1 - decay) * step
        assert average.weight.item() == pytest.approx(expected)


def test_the_log_tells_the_rate_and_the_batch_that_were_used(toy, tmp_path):
    """96 training pictures do not fill a batch of 512."""
    line = log_of(train(small(toy, tmp_path / "run", epochs=1, batch=512)))[0]
    assert line["batch"] == 96
    assert line["lr"] == pytest.approx(3e-4 * (96 / 128) ** 0.5)


def test_the_head_answers_in_full_precision_also_under_autocast(toy, tmp_path):
    config = Probe(data=toy, out=tmp_path / "run", backbone="random:nano", workers=0, device="cpu", precision="bf16")
    folder = train(config)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["splits"]["val"]["balanced"]["value"] == pytest.approx(log_of(folder)[0]["balanced"], abs=1e-9)
    model = load(folder)
    images = torch.rand(2, 3, *model.expects.size)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.method.judge(images, model.method.look(images)).logits.dtype == torch.float32


def test_features_of_files_that_changed_but_kept_their_size_are_computed_anew(toy, tmp_path):
    rows = read_rows(table(tmp_path / "data", ("a", "b")))
    vit, accelerator = load_backbone("random:nano", classes=2), make_accelerator("cpu")

    def features() -> np.ndarray:
        indices = np.arange(4)[::-1]
        return cls_features(
            vit, rows, indices, vit.config.input, accelerator, tmp_path / "cache", batch=3, workers=0
        )  # fmt: skip

    first = features()
    assert np.array_equal(features(), first)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    path, other = tmp_path / "data" / "3.png", (tmp_path / "data" / "2.png").read_bytes()
    path.write_bytes(other + b"\0" * (path.stat().st_size - len(other)))
    os.utime(path, ns=(1, 1))
    second = features()
    assert not np.array_equal(second[0], first[0]), "the order is that of the indices: row 3 first"
    np.testing.assert_array_equal(second[1:], first[1:])


def test_a_run_names_its_device_data_and_weights_file(toy, tmp_path):
    weights = tmp_path / "nano.safetensors"
    save_backbone(load_backbone("random:nano", seed=3), weights)
    folder = train(small(Path(os.path.relpath(toy)), tmp_path / "run", epochs=1, backbone=str(weights)))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["processes"] == 1
    assert facts["device"] == "cpu"
    assert facts["data"]["path"] == str(toy.resolve())
    assert facts["backbone"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
