"""Class names from strangers: shown in tables, logs and CSV files, never obeyed by the terminal or a spreadsheet."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sightline.console.files import as_csv
from sightline.console.printable import PrintableStream, from_cell, is_number, printable, to_cell
from sightline.metrics.predictions import Predictions

from ..commands import SMALL, typed

NAMES = ("[/bold]", "cat [old]", "\x1b]0;owned\x07dog", "=cmd|' /C calc'!A0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Classes, groups and images with such names."""
    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    lines = [["image", "label", "group_[red]x", "split"]]
    for number in range(64):
        name = f"@{number}.png"
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / name)
        split = ("train", "train", "val", "test")[number // 16]
        lines.append([name, NAMES[number % 4], "[/]" if number % 8 < 4 else "+1+1", split])
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    code, _, err = typed("train", "probe", data, *SMALL, "--out", out)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def other(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "[/other]"
    code, _, err = typed("train", "probe", data, *SMALL, "--untuned", "--out", out)
    assert code == 0, err
    return out


def harmless(text: str) -> bool:
    return not any(ord(letter) < 32 and letter not in "\n\t" for letter in text)


def test_every_table_shows_the_names_as_they_are(data, run, other, tmp_path):
    commands = (
        ("check", data, "--workers", 0), ("evaluate", run, "--workers", 0, "--device", "cpu"), ("compare", run, other),
        ("predict", run, data / "@1.png", "--device", "cpu"),
        ("stress", run, "--tests", "curves", "--maps", "gae", "--limit", 4, "--workers", 0, "--device", "cpu", "--out",
         tmp_path / "stress", "--no-figures"),
    )  # fmt: skip
    for command in commands:
        code, out, err = typed(*command)
        assert code in (0, 1), (command, err)
        assert harmless(out + err), command
        if command[0] == "evaluate":
            assert "[/bold]" in out
            assert "cat [old]" in out
            assert "\\x1b]0;owned" in out


def test_predictions_are_written_harmless_and_read_back_equal(run):
    path = run / "predictions" / "test.csv"
    with path.open(newline="") as file:
        for line in csv.reader(file):
            assert all(cell[:1] not in "=+-@\t\r" or is_number(cell) for cell in line if cell)
    read = Predictions.load_csv(path)
    assert set(read.classes) == {*NAMES}
    assert all(image.startswith("@") for image in read.images)
    read.save_csv(path.with_name("again.csv"))
    assert path.with_name("again.csv").read_bytes() == path.read_bytes()
    metrics = json.loads((run / "metrics.json").read_text())
    assert {*metrics["splits"]["test"]["classes"]} == {*NAMES}


def test_errors_about_such_files_are_one_plain_line(tmp_path):
    (tmp_path / "evil\x1b[2J\nname.png").write_bytes(b"no image")
    code, _, err = typed("check", tmp_path / "gone\x1b[2J\nname")
    assert (code, err.count("\n")) == (2, 1)
    assert "\\x1b[2J\\nname" in err


@given(st.text())
def test_every_text_is_harmless_as_a_cell_and_read_back_equal(text):
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert not cell or cell[0] not in "=+-@\t\r" or is_number(cell)


@given(st.floats(allow_nan=False) | st.integers())
def test_numbers_stay_as_they_are(number):
    assert to_cell(repr(number)) == repr(number)


def test_csv_files_of_every_command_are_written_so():
    text = as_csv(["name", "value"], [{"name": "=1+1", "value": -1.5}, {"name": "-2", "value": None}])
    assert [*csv.reader(io.StringIO(text))] == [["name", "value"], ["'=1+1", "-1.5"], ["-2", ""]]


@given(st.text())
def test_nothing_printed_controls_the_terminal(text):
    assert harmless(printable(text).replace("\r", ""))
    held = io.StringIO()
    PrintableStream(held).write(text)
    assert harmless(held.getvalue())


def test_styles_remain_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    held = Terminal()
    PrintableStream(held).write("\x1b[1mbold\x1b[0m \x1b]0;title\x07 \x1b[2J \x1b[2K")
    assert held.getvalue() == "\x1b[1mbold\x1b[0m \\x1b]0;title\\x07 \\x1b[2J \x1b[2K"
