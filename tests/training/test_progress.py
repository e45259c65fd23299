"""Progress bars and the line per epoch."""

import re

import pytest

from sightline.console.terminal import SCREEN, bar, counted, say, stage, watched
from sightline.training.progress import Progress, Speed


@pytest.mark.parametrize(
    ("metric", "values", "text"),
    [
        ("balanced", {"balanced": 0.5, "accuracy": 0.6}, "validation balanced 50.0%, "),
        ("last", {"last": 0.0}, ""),
        ("last", {"last": 1.0, "knn": 0.75}, "k-NN accuracy 75.0%, "),
        (
            "last",
            {"last": 0.0, "mass": 0.25, "hit": 1.0},
            "attention mass on the masks 25.0%, attention peak on the masks 100.0%, ",
        ),
    ],
)
def test_the_line_per_epoch_has_loss_metrics_and_speed(capsys, metric, values, text):
    Progress(steps=3, done=0, show=True).epoch({"epoch": 2, "loss": 1.5} | values, metric, Speed(40, 2.0, 0.5))
    expected = f"epoch 2: loss 1.5000, {text}20 images/s, 25% of the time waiting for data\n"
    assert capsys.readouterr().err == expected


def test_counts_have_the_right_plural():
    assert [counted(n) for n in (0, 1, 1200)] == ["0 images", "1 image", "1,200 images"]
    assert counted(1, "toy image") == "1 toy image"


def test_without_a_terminal_there_is_a_line_every_half_minute(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("sightline.console.terminal.time.monotonic", lambda: clock[0])
    with bar("reading", 100) as tick:
        for done in range(1, 101):
            clock[0] += 1.0
            tick(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading: 30 of 100 (30%), about 70 s left"
    assert len(lines) == 3
    assert list(watched(iter("abc"), 3)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_quiet_shows_no_progress(monkeypatch, capsys):
    monkeypatch.setattr(SCREEN, "quiet", True)
    with bar("reading", 3) as tick:
        assert tick is None
    Progress(steps=3, done=0, show=True).epoch({"epoch": 1, "loss": 1.0, "last": 0.0}, "last", Speed(1, 1.0, 0.0))
    say("something")
    assert capsys.readouterr() == ("", "")


def test_a_stage_is_one_line_whatever_runs_inside(capsys):
    with stage("Probe"):
        with bar("reading", 3) as tick:
            tick(3)
        progress = Progress(steps=3, done=0, show=True)
        progress.step(lambda: 0.0)
        progress.epoch({"epoch": 1, "loss": 1.0, "last": 0.0}, "last", Speed(1, 1.0, 0.0))
    assert SCREEN.stage is None
    out, err = capsys.readouterr()
    assert re.fullmatch(r"Probe +0 s\n", out)
    assert err == ""


def test_a_long_training_on_a_cpu_is_announced(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("sightline.training.progress.time.perf_counter", lambda: clock[0])
    for steps, announced in ((1000, True), (20, False)):
        progress = Progress(steps=steps, done=0, show=True, cheaper="Cheaper: a probe.")
        for _ in range(6):
            progress.step(lambda: 0.0)
            clock[0] += 2.0
        assert ("about 33 min. Cheaper: a probe." in capsys.readouterr().err) == announced


def test_a_terminal_shows_one_bar_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with bar("reading", 2) as outer, bar("looking", 2) as inner:
        assert inner is None
        outer(1)
        assert list(watched(iter("ab"), 2)) == ["a", "b"]
    assert list(watched(iter("ab"), 2, "listening")) == ["a", "b"]
    with bar("reading", 1) as again:
        assert again is not None


@pytest.mark.parametrize(("cached", "waited", "lines"), [(False, 30.0, 1), (True, 30.0, 0), (False, 9.0, 0)])
def test_waiting_for_images_is_advised_against_once_and_not_with_a_cache(capsys, cached, waited, lines):
    progress = Progress(steps=3, done=0, show=True, cached=cached)
    for _ in range(2):
        progress.epoch({"epoch": 1, "loss": 1.0, "last": 0.0}, "last", Speed(9, 60.0, waited))
    progress.close()
    assert capsys.readouterr().err.count("--cache FOLDER keeps them decoded") == lines
