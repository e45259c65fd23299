"""What is said about a long job while it goes on."""

import pytest

from sightline.progress import Progress, Speed
from sightline.screen import counted


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
