"""The demo: on fewer and smaller images, and with less training, than a user sees."""

import json

import pytest
from PIL import Image

from sightline import demo
from sightline.datasets.toy import write_toy

from .commands import typed

FEWER = {"train": 128, "val": 32, "test": 32, "workers": 0}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[str, object]:
    """What the demo prints, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SIDE", 40)
        patch.setitem(demo.PARTS, "epochs", 2)
        patch.setattr(demo, "write_toy", lambda folder, **settings: write_toy(folder, **settings | FEWER))
        code, out, err = typed("demo", "--out", folder)
    assert code == 0, err
    return out, folder


def test_the_demo_deletes_no_folder_that_it_did_not_make(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dear.txt").write_text("keep me")
    code, _, error = typed("demo", "--out", tmp_path / "photos")
    assert code == 2
    assert "was not made by the demo" in error
    assert (tmp_path / "photos" / "dear.txt").read_text() == "keep me"


def test_the_demo_trains_and_compares_every_method(printed):
    out, folder = printed
    assert len(out.splitlines()) <= 60
    assert max(len(line) for line in out.splitlines()[:18]) <= 80
    for run in ("probe", "a2", "erm", "ifam", "patches", "pixels"):
        metrics = json.loads((folder / run / "metrics.json").read_text())["splits"]["test"]
        assert metrics["n"] == FEWER["test"]
        assert 0 <= metrics["worst_group"]["value"] <= 1


def test_the_demo_proves_which_methods_are_blind(printed):
    out, folder = printed
    verdicts = [line.split()[-1] for line in out.splitlines() if line.endswith((" blind", " leaks"))]
    assert verdicts == ["blind"] * 4 + ["leaks"]
    for name in ("a2", "ifam", "patches", "pixels", "late"):
        verdict = "leaks" if name == "late" else "blind"
        assert json.loads((folder / f"{name}.json").read_text())["verdict"] == verdict


def test_the_demo_names_the_pictures_and_the_report_that_it_made(printed):
    out, folder = printed
    for name in ("data.png", "sight.png"):
        with Image.open(folder / name) as figure:
            assert figure.size[0] > 300
        assert str(folder / name) in out
    assert str(folder / "ifam" / "audit.html") in out
    assert (folder / "ifam" / "audit.html").is_file()
