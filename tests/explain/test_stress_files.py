"""Repeated calls of `sightline stress`: what is kept, replaced and refused."""

import csv
import json
import shutil

import pytest

from sightline.explain.perturbation import faithfulness_summary
from sightline.explain.stress_files import same_condition
from sightline.explain.stress_results import StressResults

from ..commands import QUICK, copied, typed

SUBSETS = ("--subset-images", 2, "--labels-per-image", 1, "--subset-steps", 4)
SHORT = ("--limit", 10, *SUBSETS, "--maps", "gae", "sight", *QUICK)
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


def results(folder):
    return json.loads((folder / "stress" / "test.json").read_text())


def columns(folder):
    with (folder / "stress" / "test.csv").open(newline="") as file:
        return next(csv.reader(file))


def names(folder):
    return {path.name for path in (folder / "stress").iterdir()}


def test_tests_run_one_by_one_or_together_write_the_same_files(runs, at_once, tmp_path):
    for test in TESTS:
        assert typed("stress", runs / "erm-0", *SHORT, "--tests", test, "--out", tmp_path)[0] == 0
    assert names(tmp_path) == names(at_once)
    for name in ("test.json", "test.csv"):
        assert (tmp_path / "stress" / name).read_bytes() == (at_once / "stress" / name).read_bytes()


@pytest.mark.parametrize("test", TESTS)
def test_results_of_other_tests_are_kept(runs, at_once, before, test):
    _, out, _ = typed("stress", runs / "erm-0", *SHORT, "--tests", test, "--out", before)
    assert results(before) == results(at_once)
    assert columns(before) == columns(at_once)
    assert names(before) == names(at_once)
    assert "earlier results removed" not in out


def test_renaming_a_part_keeps_earlier_results():
    kept = {"drop": [2], "force": [], "quantile": None, "thresholds": None, "names": {"2": "belly"}}
    assert same_condition("intervention", kept, kept | {"names": {"2": "wing"}})
    assert not same_condition("intervention", kept, kept | {"drop": [1]})
    assert not same_condition("intervention", kept, None)
    assert not same_condition("seed", 0, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [(("--seed", 1), "seed and images"), (("--limit", 6), "images"), ((), "weights")],
)
def test_what_was_about_something_else_goes_with_its_pictures_and_it_is_results(runs, before, changes, why):
    run = runs / ("erm-0" if changes else "erm-1")  # the same data and images, and other weights
    code, out, err = typed("stress", run, *SHORT, "--tests", "masks", *changes, "--out", before)
    assert code == 0, err
    assert f"earlier results removed because of different {why}: curves, subsets, neighbours" in out
    found = StressResults.from_dict(results(before))
    assert found.masks
    assert not any([found.curves, found.subsets, found.neighbours, found.accuracy])
    assert columns(before) == ["image", *(f"{k} {m}" for m in ("gae", "random") for k in MEASURED)]
    assert names(before) == {"test.json", "test.csv"}


def test_outdated_figures_are_removed_with_no_figures(runs, before):
    assert typed("stress", runs / "erm-0", *SHORT, "--tests", "curves", "--no-figures", "--out", before)[0] == 0
    assert names(before) == {"test.json", "test.csv", "test-subsets.png"}


def test_a_note_stays_with_the_test_that_it_is_about(runs, before):
    path = before / "stress" / "test.json"
    path.write_text(json.dumps(results(before) | {"notes": ["masks: left out", "subsets: few", "replaced: long ago"]}))
    assert typed("stress", runs / "erm-0", *SHORT, "--tests", "subsets", "--out", before)[0] == 0
    assert results(before)["notes"] == ["masks: left out"]


# ---- maps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maps", "wrong"), [(("gaee",), "gaee"), (("gae", "gaee"), "gaee"), (("sight",), "sight"), (("sight", "x"), "x")]
)
def test_unknown_maps_are_refused_and_the_available_ones_listed(runs, tmp_path, maps, wrong):
    flags = ("--tests", "curves", "--maps", *maps, *QUICK, "--out", tmp_path)
    code, _, err = typed("stress", runs / "erm-0", *flags)
    assert code == 2
    assert f"--maps {wrong}: this model has no such map; choose among gae, rollout, attention, gradient, random" in err
    assert not (tmp_path / "stress").exists()


def test_other_tests_run_although_a_map_is_missing(runs, tmp_path):
    flags = ("--limit", 10, "--maps", "sight", "--tests", "curves", "neighbours", *QUICK, "--out", tmp_path)
    code, out, _ = typed("stress", runs / "erm-0", *flags)
    assert code == 0
    assert "maps: this model has no map sight" in out
    assert results(tmp_path)["neighbours"]
    assert not results(tmp_path)["curves"]


def test_a_random_map_alone_has_no_summary(runs, tmp_path):
    flags = ("--limit", 6, "--tests", "curves", "--maps", "random", "--no-figures", *QUICK, "--out", tmp_path)
    assert typed("stress", runs / "erm-0", *flags)[0] == 0
    assert results(tmp_path)["sentences"] == []
    assert faithfulness_summary(StressResults.from_dict(results(tmp_path)).curves) == ""


# ---- neighbours ------------------------------------------------------------------------------------------------------


def other_data(toy, folder, *, classes, count=10):
    """Some of the toy's test images, with these classes in turn."""
    data = shutil.copytree(toy, folder)
    with (data / "rows.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"][:count]
    rows = [f"{line['image']},{classes[i % len(classes)]},{line['mask']}" for i, line in enumerate(lines)]
    (data / "rows.csv").write_text("\n".join(["image,label,mask", *rows]) + "\n")
    return data


@pytest.mark.parametrize("tests", [("neighbours",), ("masks", "neighbours")])
def test_neighbours_work_on_data_of_any_classes(runs, toy, tmp_path, tests):
    data = other_data(toy, tmp_path / "data", classes=("gull", "heron"))
    flags = ("--maps", "gae", *QUICK, "--out", tmp_path / "out")
    code, out, err = typed("stress", runs / "erm-0", data, "--tests", *tests, *flags)
    assert code == 0, err
    assert set(results(tmp_path / "out")["neighbours"]) == {"1 among the others", "9 among the others"}
    assert {"1 neighbours", "9 neighbours"} <= set(columns(tmp_path / "out"))
    assert "nearest neighbours, 9 among the others" in out
    assert "nearest neighbours, 10" not in out
    code, _, err = typed("stress", runs / "erm-0", data, "--tests", "curves", "neighbours", *flags)
    assert code == 2
    assert "does not know the class 'gull'" in err


def test_neighbours_are_skipped_if_there_is_only_one_class(runs, toy, tmp_path):
    data = other_data(toy, tmp_path / "data", classes=("gull",))
    _, out, _ = typed("stress", runs / "erm-0", data, "--tests", "neighbours", *QUICK, "--out", tmp_path / "out")
    assert "neighbours: skipped: all candidate neighbours are of one class" in out
    assert not results(tmp_path / "out")["neighbours"]


def test_an_older_file_without_weights_is_replaced(runs, before, tmp_path):
    older = {name: value for name, value in results(before).items() if name not in ("weights", "masks_from")}
    (before / "stress" / "test.json").write_text(json.dumps(older))
    assert StressResults.from_dict(older).masks_from == ""
    run = copied(runs / "erm-0", tmp_path / "run")
    _, out, _ = typed("stress", run, *SHORT, "--tests", "neighbours", "--out", before)
    assert "earlier results removed because of different weights: curves, masks, subsets" in out
