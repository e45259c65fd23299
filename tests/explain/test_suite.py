"""Published test sets under shift: which are there, what counts as right, and how two runs differ."""

import json
import shutil

import numpy as np
import pytest

from sightline.data.rows import read_rows
from sightline.datasets.imagenet import objectnet_labels
from sightline.errors import UserError
from sightline.explain import suite
from sightline.explain.class_changes import LabelledPredictions, align_images, changes_summary, class_changes
from sightline.explain.suite import SETS, accepted_labels, evaluate_set, find_sets

from ..commands import QUICK, SMALL, typed
from ..datasets.published import make_imagenet_v2, make_objectnet, make_si_score, make_wnids, put

WNIDS = ("n01440764", "n01443537", "n01484850", "n15075141")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five of the eight sets, three of them under the names that they are published with."""
    home = tmp_path_factory.mktemp("suite")
    make_imagenet_v2(home / "imagenetv2-matched-frequency-format-val")
    make_wnids(home / "imagenet-a")
    make_wnids(home / "sketch")
    make_objectnet(home / "objectnet-1.0")
    make_si_score(home / "SI-Score" / "object_location")
    return home


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of ImageNet's 1,000 classes that has learnt four of them, badly."""
    home = tmp_path_factory.mktemp("imagenet")
    put(home / "data", *(f"train/{wnid}/{i}.JPEG" for wnid in WNIDS for i in range(4)))
    put(home / "data", *(f"val/{wnid}/0.JPEG" for wnid in WNIDS))
    flags = ("erm", home / "data", "--layout", "imagenet", *SMALL, "--epochs", 1, "--out", home / "run")
    code, _, err = typed("train", *flags)
    assert code == 0, err
    return home / "run"


@pytest.fixture(scope="module")
def measured(run, folder):
    return typed("evaluate", run, "--suite", "imagenet-shift", "--suite-folder", folder, *QUICK)


def test_sets_are_found_by_layout_or_published_name(folder):
    assert set(find_sets(folder)) == {"imagenet-v2", "imagenet-a", "imagenet-sketch", "objectnet", "si-score-location"}
    assert len(SETS) == 8


def test_a_folder_without_any_set_is_refused(tmp_path):
    with pytest.raises(UserError, match="contains none of the suite's sets: imagenet-v2"):
        find_sets(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_sets(tmp_path / "nowhere")


def test_a_run_is_evaluated_on_every_available_set(run, measured):
    code, out, _ = measured
    assert code == 0
    assert "not found: imagenet-r, si-score-rotation, si-score-size" in out
    results = json.loads((run / "imagenet-shift" / "suite.json").read_text())
    assert {name: one["n"] for name, one in results["sets"].items()} == {
        "imagenet-v2": 5, "imagenet-a": 2, "imagenet-sketch": 2, "objectnet": 3, "si-score-location": 3,
    }  # fmt: skip
    for one in results["sets"].values():
        assert 0 <= one["figures"]["top1"]["value"] <= one["figures"]["top5"]["value"] <= 1
        assert one["figures"]["own_top1"]["value"] >= one["figures"]["top1"]["value"]
    assert len((run / "imagenet-shift" / "objectnet.csv").read_text().splitlines()) == 4


def test_objectnet_accepts_several_labels_among_its_own_classes_only(folder):
    rows = read_rows(folder / "objectnet-1.0", layout="objectnet", all_test=True)
    accepted = accepted_labels({"alarm_clock": (530, 409), "backpack": (414,)})
    best = np.full((3, 2, 5), 7)
    best[:, 0, 2], best[:, 1, 0] = 530, 409  # the first is an alarm clock
    found = evaluate_set(rows, best, accepted).figures
    assert (found["top1"].value, found["top5"].value) == (0, pytest.approx(1 / 3))
    assert (found["own_top1"].value, found["own_top5"].value) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_all_labels_that_objectnet_accepts_are_candidates(run, folder, tmp_path, monkeypatch):
    offered = {}

    def best(model, rows, classes, *_, **__):
        offered[rows.root.name] = set(classes)
        return np.zeros((len(rows), 2, 5), np.int64)

    monkeypatch.setattr(suite, "top_predictions", best)
    flags = ("--suite", "imagenet-shift", "--suite-folder", folder, "--out", tmp_path / "out", *QUICK)
    assert typed("evaluate", run, *flags)[0] == 0
    accepted = objectnet_labels(folder / "objectnet-1.0").values()
    assert any(len(some) > 1 for some in accepted)
    assert offered["objectnet-1.0"] == {label for some in accepted for label in some}


def test_a_model_of_other_classes_is_refused(runs, folder):
    flags = ("--suite", "imagenet-shift", "--suite-folder", folder, *QUICK)
    code, _, err = typed("evaluate", runs / "erm-0", *flags)
    assert code == 2
    assert "has 2 classes; imagenet-shift needs a model of ImageNet's 1,000" in err
    assert "needs the folder of the test sets" in typed("evaluate", runs / "erm-0", *flags[:2], *QUICK)[2]


def test_without_a_suite_evaluate_is_unchanged(runs, tmp_path):
    code, out, _ = typed("evaluate", runs / "erm-0", *QUICK, "--out", tmp_path / "own")
    assert code == 0
    assert "Checkpoint selected by class-balanced validation accuracy" in out


# ---- before and after ------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_set_by_set_and_class_by_class(run, measured, tmp_path):
    other = tmp_path / "after"
    shutil.copytree(run, other)
    table = other / "imagenet-shift" / "imagenet-v2.csv"
    head, *lines = table.read_text().splitlines()
    right = [",".join([(cells := line.split(","))[0], cells[1], cells[1], *cells[3:]]) for line in lines]
    table.write_text("\n".join([head, *right]) + "\n")
    figure, out = tmp_path / "classes.png", tmp_path / "gains.json"
    flags = ("--suite", "imagenet-shift", "--class-changes", figure, "--out", out)
    code, text, err = typed("compare", run, other, *flags)
    assert code == 0, err
    gains = json.loads(out.read_text())
    assert gains["imagenet-v2"]["after"]["value"] == 1
    assert gains["imagenet-v2"]["gain"]["value"] == pytest.approx(1 - gains["imagenet-v2"]["before"]["value"])
    assert gains["imagenet-a"]["gain"]["value"] == 0
    assert "imagenet-v2: Of 4 classes" in text
    assert figure.stat().st_size > 1000
    apart = shutil.copytree(run / "imagenet-shift", tmp_path / "elsewhere")  # as with evaluate --out
    assert typed("compare", apart, other, *flags)[0] == 0
    code, _, err = typed("compare", run, tmp_path, *flags)
    assert code == 2
    assert "no predictions; create them" in err


def test_class_changes_of_a_split_are_drawn(runs, tmp_path):
    code, out, err = typed("compare", runs / "probe", runs / "erm-0", "--class-changes", tmp_path / "classes.png")
    assert code == 0, err
    assert "Of 2 classes" in out
    assert (tmp_path / "classes.png").stat().st_size > 1000
    three = [runs / name for name in ("probe", "erm-0", "erm-1")]
    assert "compare two runs, not 3" in typed("compare", *three, "--class-changes", tmp_path / "more.png")[2]


def test_the_largest_loss_comes_first_whatever_the_order_of_images():
    labels = ["duck"] * 40 + ["stork"] * 40
    before = LabelledPredictions([f"{i}.png" for i in range(80)], labels, ["duck"] * 80)
    after = LabelledPredictions(before.images[::-1], labels[::-1], ["stork"] * 80)
    changes = class_changes(before, align_images(before, after, "test"))
    assert [(change.label, change.gain.value) for change in changes] == [("duck", -1), ("stork", 1)]
    assert "1 improve (1 significantly) and 1 get worse (1 significantly)" in changes_summary(changes)
    with pytest.raises(UserError, match="evaluated on different images"):
        align_images(before, LabelledPredictions(["other.png"] * 80, labels, labels), "test")
