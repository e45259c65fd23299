"""What is said about a long job while it goes on."""

import pytest

from sightline.console.terminal import bar, counted, watched
from sightline.training.progress import Progress, Speed


@pytest.mark.parametrize(
    ("metric", "found", "said"),
    [
        ("balanced", {"balanced": 0.5, "accuracy": 0.6}, "validation balanced 50.0%, "),
        ("last", {"last": 0.0}, ""),
        ("last", {"last": 1.0, "knn": 0.75}, "neighbours of the right class 75.0%, "),
        ("last", {"last": 0.0, "mass": 0.25, "hit": 1.0}, "attention on the masks 25.0%, its peak on them 100.0%, "),
    ],
)
def test_a_line_per_epoch_tells_what_was_measured(capsys, metric, found, said):
    Progress(steps=3, done=0, show=True).epoch({"epoch": 2, "loss": 1.5} | found, metric, Speed(40, 2.0, 0.5))
    expected = f"epoch 2: loss 1.5000, {said}20 images/s, 25% of the time waiting for data\n"
    assert capsys.readouterr().err == expected


def test_one_picture_is_not_several():
    assert [counted(n) for n in (0, 1, 1200)] == ["0 pictures", "1 picture", "1,200 pictures"]
    assert counted(1, "toy picture") == "1 toy picture"


def test_where_nobody_looks_nothing_is_shown(capsys):
    assert list(watched(iter("abc"), 3)) == ["a", "b", "c"]
    with bar("reading", 3) as tick:
        assert tick is None
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_one_bar_at_a_time_and_how_long_the_rest_takes(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with bar("reading", 2) as outer, bar("looking", 2) as inner:
        assert inner is None
        outer(1)
        assert list(watched(iter("ab"), 2)) == ["a", "b"]
    assert list(watched(iter("ab"), 2, "listening")) == ["a", "b"]
    with bar("reading", 1) as again:
        assert again is not None
