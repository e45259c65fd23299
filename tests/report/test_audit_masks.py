"""Masks in place of the data's own, in `sightline stress` and `sightline audit`; and a report on other data."""

import csv
import json
import shutil

import pytest
from PIL import Image

from ..commands import QUICK, SMALL, copied, typed
from .test_audit_report import Page

BY = "tokencut:random:nano"
ASKED = ("--limit", 8, "--tests", "masks", "--maps", "gae", *QUICK)


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


def audited(run, *told):
    code, out, err = typed("audit", run, *told, *QUICK, "--quick", "--examples", 0)
    assert code == 0, err
    return Page(next(path for path in run.glob("**/audit.html") if str(path) in out).read_text())


def test_without_masks_and_without_the_word_nothing_is_held_against_any(run, bare):
    code, out, _ = typed("stress", run, bare, *ASKED)
    assert code == 0
    assert "masks: no image has one" in out
    assert "--masks tokencut:BACKBONE" in out
    assert stressed(run)["masks"] == {}
    page = audited(run, bare)
    assert "Not made" in page.sections["backgrounds"]
    assert "--masks tokencut:BACKBONE" in page.sections["backgrounds"]


def test_discovered_masks_are_used_and_named_in_figures_and_report(run, bare):
    code, out, _ = typed("stress", run, bare, *ASKED, "--masks", BY)
    assert code == 0
    found = stressed(run)
    assert set(found["masks"]) == {"gae", "random"}
    assert found["masks_from"].startswith(f"discovered by {BY}@")
    assert f"held against masks {found['masks_from']}" in out
    page = audited(run, bare, "--masks", BY)
    by = f"masks {found['masks_from']}"
    for section in ("proof", "backgrounds", "masks", "maps"):
        assert by in page.sections[section], section
    assert f"By {by}: another background changes its prediction in" in page.html.split("<nav")[0]
    assert f"--masks {BY}" in page.sections["run"]
    assert "true masks" not in page.html
    assert "the masks of the data set" not in page.html
    assert "foreground alone" in page.sections["backgrounds"]
    assert "background alone" in page.sections["backgrounds"]
    made = list((run / "masks").glob("*/tokencut-*/test/*.png"))
    assert len(made) == 48  # by stress those that it looked at, by the report the others


def test_masks_are_the_same_again_and_those_of_other_data_lie_elsewhere(run, bare):
    for _ in range(2):
        assert typed("stress", run, *ASKED, "--masks", BY)[0] == 0
    first = (run / "stress" / "test.csv").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in run.glob("masks/tokencut-*/**/*.png")}
    assert len(times) == 8
    assert typed("stress", run, bare, *ASKED, "--masks", BY)[0] == 0
    assert typed("stress", run, *ASKED, "--masks", BY)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in run.glob("masks/tokencut-*/**/*.png")} == times
    assert (run / "stress" / "test.csv").read_bytes() == first


def test_a_folder_of_masks_gives_the_figures_of_those_masks_and_is_named(run, toy, bare):
    assert typed("stress", run, *ASKED)[0] == 0
    true = json.loads((run / "stress" / "test.json").read_text())
    assert true["masks_from"] == ""
    assert typed("stress", run, bare, *ASKED, "--masks", toy / "masks")[0] == 0
    (path,) = run.glob("on-*/stress/test.json")
    found = json.loads(path.read_text())
    assert found["masks"] == true["masks"]
    assert found["masks_from"] == f"from the folder {toy / 'masks'}"


def test_figures_against_true_masks_do_not_pass_for_others(run):
    assert typed("localize", run, *QUICK)[0] == 0
    assert "localization.json" in audited(run).sections["masks"]
    page = audited(run, "--masks", BY)
    assert "localization.json" not in page.sections["masks"]
    assert "measured for this report" in page.sections["masks"]


def test_other_masks_are_refused_where_they_would_be_of_no_use_or_change_the_answers(run, toy, bare, tmp_path):
    for told, words in (
        ((*QUICK, "--tests", "curves", "--masks", BY), "nothing is held against masks without `masks` among --tests"),
        ((*ASKED, "--masks", tmp_path / "none"), "no such folder of masks"),
        ((*ASKED, "--masks", tmp_path / "run"), "has no mask for any of these pictures"),
    ):
        code, _, err = typed("stress", run, bare, *told)
        assert code == 2
        assert words in err
    early = tmp_path / "early"
    assert typed("train", "early-mask", toy, *SMALL, "--epochs", 1, "--out", early)[0] == 0
    for command in ("stress", "audit"):
        code, _, err = typed(command, early, *QUICK, "--masks", BY)
        assert code == 2
        assert "told by masks where to look" in err


def test_masks_that_show_nothing_give_no_figures(run, bare, tmp_path):
    black = tmp_path / "black" / "test"
    black.mkdir(parents=True)
    for path in (bare / "test").glob("*.png"):
        Image.new("1", Image.open(path).size).save(black / path.name)
    code, out, _ = typed("stress", run, bare, *ASKED, "--masks", black.parent)
    assert code == 0
    assert "for want of one: 8 of 8 pictures" in out
    assert stressed(run)["masks"] == {}


def test_a_report_on_other_data_names_them_and_shows_what_was_found_of_them(run, bare):
    data = bare.rename(bare.with_name("other data"))
    try:
        page = audited(run, data, "--split", "test")
        assert f"`sightline stress {run} '{data}'`" in page.sections["maps"]
        assert typed("stress", run, data, "--limit", 8, "--tests", "curves", "--maps", "gae", *QUICK)[0] == 0
        page = audited(run, data)
        assert stressed(run)["sentences"][0] in page.sections["maps"]
    finally:
        data.rename(bare)
