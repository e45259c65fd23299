"""--json, --quiet and --details of the commands that print tables."""

import json

import pytest

from .commands import QUICK, SMALL, typed

COMMANDS = {
    "evaluate": lambda runs: ("evaluate", runs / "erm-0", *QUICK),
    "compare": lambda runs: ("compare", runs / "probe", runs / "erm-0"),
    "verify": lambda runs: ("verify", runs / "probe", "--limit", 2, "--draws", 1),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_all_that_is_on_standard_output_and_quiet_is_silent(name, runs):
    command = COMMANDS[name](runs)
    shown = typed(*command)
    code, out, _ = typed(*command, "--json")
    assert code == shown[0]
    assert isinstance(json.loads(out), dict)
    assert shown[1] != out
    assert typed(*command, "--quiet") == (shown[0], "", "")


def test_details_add_every_metric_and_how_its_interval_was_made(runs):
    short, long = (typed("evaluate", runs / "erm-0", *QUICK, *more)[1] for more in ((), ("--details",)))
    for words in ("Class-balanced accuracy", "Wilson", "precision", "GFLOPs", "Expected calibration error"):
        assert (words in short, words in long) == (False, True), words
    assert len(short.splitlines()) < 15


def test_ifam_is_compared_with_a_probe_that_is_trained_once(toy, tmp_path):
    small = ("ifam", toy, *SMALL, "--epochs", 1, "--parts", 2, "--selector-size", 32, "--refine", "False")
    code, out, err = typed("train", *small, "--out", tmp_path / "first")
    assert code == 0, err
    assert "linear probe on the same backbone" in out
    assert "Baseline: a linear probe" in err
    content = json.loads((tmp_path / "first" / "metrics.json").read_text())
    assert content["sight"]["test"]["coverage"]["n"] == 48
    baseline = content["baseline"]
    assert baseline["run"] == str(tmp_path / "first" / "baseline")
    probe = json.loads((tmp_path / "first" / "baseline" / "metrics.json").read_text())["splits"]["test"]
    assert baseline["splits"]["test"]["accuracy"] == probe["accuracy"]
    code, _, err = typed("train", *small, "--out", tmp_path / "second", "--seed", 1)
    assert "Baseline" not in err
    content = json.loads((tmp_path / "second" / "metrics.json").read_text())
    assert content["baseline"]["run"] == str((tmp_path / "first" / "baseline").resolve())
    assert typed("train", *small, "--out", tmp_path / "third", "--no-baseline")[0] == 0
    assert "baseline" not in json.loads((tmp_path / "third" / "metrics.json").read_text())
