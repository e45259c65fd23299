"""`sightline stress` more than once: what stays, what is replaced, and what is refused."""

import csv
import json
import shutil

import pytest

from sightline.explain.perturbation import in_words
from sightline.explain.stress_files import alike
from sightline.explain.stress_results import Stressed

from ..commands import QUICK, copied, typed

SHORT = ("--limit", 10, "--subsets", 2, "--labels", 1, "--steps", 4, "--maps", "gae", "sight", *QUICK)
TESTS = ("curves", "subsets", "neighbours", "masks")
MEASURED = ("accuracy", "precision", "mass", "hit")


@pytest.fixture(scope="module")
def at_once(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("at-once")
    assert typed("stress", runs / "erm-0", *SHORT, "--out", folder)[0] == 0
    return folder


@pytest.fixture
def before(at_once, tmp_path):
    return shutil.copytree(at_once, tmp_path / "before")


def said(folder):
    return json.loads((folder / "stress" / "test.json").read_text())


def columns(folder):
    with (folder / "stress" / "test.csv").open(newline="") as file:
        return next(csv.reader(file))


def names(folder):
    return {path.name for path in (folder / "stress").iterdir()}


def test_asked_one_by_one_or_at_once_the_files_are_the_same(runs, at_once, tmp_path):
    for test in TESTS:
        assert typed("stress", runs / "erm-0", *SHORT, "--tests", test, "--out", tmp_path)[0] == 0
    assert names(tmp_path) == names(at_once)
    for name in ("test.json", "test.csv"):
        assert (tmp_path / "stress" / name).read_bytes() == (at_once / "stress" / name).read_bytes()


@pytest.mark.parametrize("test", TESTS)
def test_what_is_not_asked_for_again_stays(runs, at_once, before, test):
    _, out, _ = typed("stress", runs / "erm-0", *SHORT, "--tests", test, "--out", before)
    assert said(before) == said(at_once)
    assert columns(before) == columns(at_once)
    assert names(before) == names(at_once)
    assert "replaced" not in out


def test_a_new_name_for_a_part_does_not_cost_what_was_found_before():
    kept = {"drop": [2], "force": [], "quantile": None, "thresholds": None, "names": {"2": "belly"}}
    assert alike("intervention", kept, kept | {"names": {"2": "wing"}})
    assert not alike("intervention", kept, kept | {"drop": [1]})
    assert not alike("intervention", kept, None)
    assert not alike("seed", 0, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [(("--seed", 1), "seed and pictures"), (("--limit", 6), "pictures"), ((), "weights")],
)
def test_what_was_about_something_else_goes_with_its_pictures_and_it_is_said(runs, before, changes, why):
    run = runs / ("erm-0" if changes else "erm-1")  # the same data and pictures, and other weights
    code, out, err = typed("stress", run, *SHORT, "--tests", "masks", *changes, "--out", before)
    assert code == 0, err
    assert f"replaced, since {why} were others: curves, subsets, neighbours" in out
    found = Stressed.from_dict(said(before))
    assert found.masks
    assert not any([found.curves, found.subsets, found.neighbours, found.accuracy])
    assert columns(before) == ["image", *(f"{k} {m}" for m in ("gae", "random") for k in MEASURED)]
    assert names(before) == {"test.json", "test.csv"}


def test_pictures_of_what_is_asked_for_again_without_any_go(runs, before):
    assert typed("stress", runs / "erm-0", *SHORT, "--tests", "curves", "--no-pictures", "--out", before)[0] == 0
    assert names(before) == {"test.json", "test.csv", "test-subsets.png"}


def test_a_note_stays_with_the_test_that_it_is_about(runs, before):
    path = before / "stress" / "test.json"
    path.write_text(json.dumps(said(before) | {"notes": ["masks: left out", "subsets: few", "replaced: long ago"]}))
    assert typed("stress", runs / "erm-0", *SHORT, "--tests", "subsets", "--out", before)[0] == 0
    assert said(before)["notes"] == ["masks: left out"]


# ---- maps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maps", "wrong"), [(("gaee",), "gaee"), (("gae", "gaee"), "gaee"), (("sight",), "sight"), (("sight", "x"), "x")]
)
def test_a_map_that_there_is_not_is_refused_and_those_that_there_are_are_named(runs, tmp_path, maps, wrong):
    told = ("--tests", "curves", "--maps", *maps, *QUICK, "--out", tmp_path)
    code, _, err = typed("stress", runs / "erm-0", *told)
    assert code == 2
    assert f"--maps {wrong}: this model has no such map; it has gae, rollout, attention, gradient, random" in err
    assert not (tmp_path / "stress").exists()


def test_a_model_without_the_usual_maps_is_still_asked_for_the_rest(runs, tmp_path):
    told = ("--limit", 10, "--maps", "sight", "--tests", "curves", "neighbours", *QUICK, "--out", tmp_path)
    code, out, _ = typed("stress", runs / "erm-0", *told)
    assert code == 0
    assert "maps: this model has no map sight" in out
    assert said(tmp_path)["neighbours"]
    assert not said(tmp_path)["curves"]


def test_nothing_is_said_of_a_random_map_alone(runs, tmp_path):
    told = ("--limit", 6, "--tests", "curves", "--maps", "random", "--no-pictures", *QUICK, "--out", tmp_path)
    assert typed("stress", runs / "erm-0", *told)[0] == 0
    assert said(tmp_path)["sentences"] == []
    assert in_words(Stressed.from_dict(said(tmp_path)).curves) == ""


# ---- neighbours ------------------------------------------------------------------------------------------------------


def other_data(toy, folder, *, classes, count=10):
    """So many of the toy's test pictures, with these classes in turn."""
    data = shutil.copytree(toy, folder)
    with (data / "rows.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"][:count]
    rows = [f"{line['image']},{classes[i % len(classes)]},{line['mask']}" for i, line in enumerate(lines)]
    (data / "rows.csv").write_text("\n".join(["image,label,mask", *rows]) + "\n")
    return data


@pytest.mark.parametrize("tests", [("neighbours",), ("masks", "neighbours")])
def test_neighbours_are_sought_on_data_of_any_classes_and_as_many_as_there_are(runs, toy, tmp_path, tests):
    data = other_data(toy, tmp_path / "data", classes=("gull", "heron"))
    told = ("--maps", "gae", *QUICK, "--out", tmp_path / "out")
    code, out, err = typed("stress", runs / "erm-0", data, "--tests", *tests, *told)
    assert code == 0, err
    assert set(said(tmp_path / "out")["neighbours"]) == {"1 among the others", "9 among the others"}
    assert {"1 neighbours", "9 neighbours"} <= set(columns(tmp_path / "out"))
    assert "nearest neighbours, 9 among the others" in out
    assert "nearest neighbours, 10" not in out
    code, _, err = typed("stress", runs / "erm-0", data, "--tests", "curves", "neighbours", *told)
    assert code == 2
    assert "does not know the class 'gull'" in err


def test_neighbours_of_one_class_alone_are_refused(runs, toy, tmp_path):
    data = other_data(toy, tmp_path / "data", classes=("gull",))
    _, out, _ = typed("stress", runs / "erm-0", data, "--tests", "neighbours", *QUICK, "--out", tmp_path / "out")
    assert "neighbours: none were sought: all pictures to seek them among are of one class" in out
    assert not said(tmp_path / "out")["neighbours"]


def test_an_older_file_without_weights_is_replaced(runs, before, tmp_path):
    older = {name: value for name, value in said(before).items() if name not in ("weights", "masks_from")}
    (before / "stress" / "test.json").write_text(json.dumps(older))
    assert Stressed.from_dict(older).masks_from == ""
    run = copied(runs / "erm-0", tmp_path / "run")
    _, out, _ = typed("stress", run, *SHORT, "--tests", "neighbours", "--out", before)
    assert "replaced, since weights were others: curves, masks, subsets" in out
