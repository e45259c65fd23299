"""Replacement masks in `sightline stress` and `sightline audit`; and a report on other data."""

import csv
import json
import shutil

import pytest
from PIL import Image

from ..commands import QUICK, SMALL, copied, typed
from .test_audit_report import Page

BY = "tokencut:random:nano"
MASKS_TEST = ("--limit", 8, "--tests", "masks", "--maps", "gae", *QUICK)


@pytest.fixture(scope="module")
def bare(toy, tmp_path_factory):
    """The same images, and no masks."""
    data = shutil.copytree(toy, tmp_path_factory.mktemp("bare") / "bare", ignore=shutil.ignore_patterns("masks"))
    with (toy / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    kept = [name for name in lines[0] if name != "mask"]
    with (data / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return data


@pytest.fixture
def run(runs, tmp_path):
    return copied(runs / "erm-0", tmp_path / "run")


def stressed(run):
    return json.loads(next(run.glob("**/stress/test.json")).read_text())


def audited(run, *arguments):
    code, out, err = typed("audit", run, *arguments, *QUICK, "--quick", "--examples", 0)
    assert code == 0, err
    return Page(next(path for path in run.glob("**/audit.html") if str(path) in out).read_text())


def test_without_any_masks_the_section_is_missing_with_advice(run, bare):
    code, out, _ = typed("stress", run, bare, *MASKS_TEST)
    assert code == 0
    assert "masks: skipped: no image has a mask" in out
    assert "--masks tokencut:BACKBONE" in out
    assert stressed(run)["masks"] == {}
    page = audited(run, bare)
    assert "Not available" in page.sections["backgrounds"]
    assert "--masks tokencut:BACKBONE" in page.sections["backgrounds"]


def test_created_masks_are_used_and_named_in_results_and_report(run, bare):
    code, out, _ = typed("stress", run, bare, *MASKS_TEST, "--masks", BY)
    assert code == 0
    found = stressed(run)
    assert set(found["masks"]) == {"gae", "random"}
    assert found["masks_from"].startswith(f"created by {BY}@")
    assert f"map against masks {found['masks_from']}" in out
    page = audited(run, bare, "--masks", BY)
    by = f"masks {found['masks_from']}"
    for section in ("proof", "backgrounds", "masks", "maps"):
        assert by in page.sections[section], section
    assert f"({by})" in page.html.split("<nav")[0]
    assert f"--masks {BY}" in page.sections["run"]
    assert "true masks" not in page.html
    assert "the masks of the data set" not in page.html
    assert "foreground only" in page.sections["backgrounds"]
    assert "background only" in page.sections["backgrounds"]
    made = list((run / "masks").glob("*/tokencut-*/test/*.png"))
    assert len(made) == 48  # some by stress, the others by the report


def test_masks_are_reused_and_those_of_other_data_are_kept_apart(run, bare):
    for _ in range(2):
        assert typed("stress", run, *MASKS_TEST, "--masks", BY)[0] == 0
    first = (run / "stress" / "test.csv").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in run.glob("masks/tokencut-*/**/*.png")}
    assert len(times) == 8
    assert typed("stress", run, bare, *MASKS_TEST, "--masks", BY)[0] == 0
    assert typed("stress", run, *MASKS_TEST, "--masks", BY)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in run.glob("masks/tokencut-*/**/*.png")} == times
    assert (run / "stress" / "test.csv").read_bytes() == first


def test_a_folder_of_masks_is_used_and_named(run, toy, bare):
    assert typed("stress", run, *MASKS_TEST)[0] == 0
    true = json.loads((run / "stress" / "test.json").read_text())
    assert true["masks_from"] == ""
    assert typed("stress", run, bare, *MASKS_TEST, "--masks", toy / "masks")[0] == 0
    (path,) = run.glob("on-*/stress/test.json")
    found = json.loads(path.read_text())
    assert found["masks"] == true["masks"]
    assert found["masks_from"] == f"from the folder {toy / 'masks'}"


def test_stored_localisation_is_only_used_for_true_masks(run):
    assert typed("localize", run, *QUICK)[0] == 0
    assert "localization.json" in audited(run).sections["masks"]
    page = audited(run, "--masks", BY)
    assert "localization.json" not in page.sections["masks"]
    assert "measured for this report" in page.sections["masks"]


def test_replacement_masks_are_refused_if_useless_or_if_they_change_predictions(run, toy, bare, tmp_path):
    for flags, words in (
        ((*QUICK, "--tests", "curves", "--masks", BY), "only the test `masks` uses masks"),
        ((*MASKS_TEST, "--masks", tmp_path / "none"), "no such folder of masks"),
        ((*MASKS_TEST, "--masks", tmp_path / "run"), "has no mask for any of the images"),
    ):
        code, _, err = typed("stress", run, bare, *flags)
        assert code == 2
        assert words in err
    early = tmp_path / "early"
    assert typed("train", "early-mask", toy, *SMALL, "--epochs", 1, "--out", early)[0] == 0
    for command in ("stress", "audit"):
        code, _, err = typed(command, early, *QUICK, "--masks", BY)
        assert code == 2
        assert "takes masks as input" in err


def test_empty_masks_are_left_out(run, bare, tmp_path):
    black = tmp_path / "black" / "test"
    black.mkdir(parents=True)
    for path in (bare / "test").glob("*.png"):
        Image.new("1", Image.open(path).size).save(black / path.name)
    code, out, _ = typed("stress", run, bare, *MASKS_TEST, "--masks", black.parent)
    assert code == 0
    assert "masks: 8 of 8 images have no mask" in out
    assert stressed(run)["masks"] == {}


def test_a_report_on_other_data_names_them_and_shows_their_results(run, bare):
    data = bare.rename(bare.with_name("other data"))
    try:
        page = audited(run, data, "--split", "test")
        assert f"run sightline stress {run} '{data}'." in page.sections["maps"]
        assert typed("stress", run, data, "--limit", 8, "--tests", "curves", "--maps", "gae", *QUICK)[0] == 0
        page = audited(run, data)
        assert stressed(run)["sentences"][0] in page.sections["maps"]
    finally:
        data.rename(bare)
