"""Texts of users' data, such as class names, in terminals and in spreadsheets: shown or read as text, never obeyed."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

# Control characters, and those that change the direction of text; a tab and the end of a line are harmless.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Colours and the movements of progress bars. They cannot set titles, answer questions, or write to the clipboard.
STYLE = re.compile(r"(\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]|\r)")
FORMULA = re.compile(r"'*[=+\-@\t\r]")


def printable(text: str) -> str:
    """With control characters written out, as in Python: \\x1b."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A stream that writes control characters out, but for the styles of this program where it is a terminal."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        if not CONTROL.search(text):
            return self.stream.write(text)
        parts = STYLE.split(text) if self.stream.isatty() else [text]
        self.stream.write("".join(part if i % 2 else printable(part) for i, part in enumerate(parts)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def only_printable() -> Generator[None]:
    """Whatever is printed meanwhile."""
    import sys

    out, err = (cast(TextIO, PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def to_cell(text: str) -> str:
    """As a cell of a CSV file. Spreadsheets take a cell that begins with = + - or @ for a formula, which may start
    programs; an apostrophe before it makes it text. Numbers stay as they are."""
    return f"'{text}" if FORMULA.match(text) and not is_number(text) else text


def from_cell(cell: str) -> str:
    """The text that `to_cell` wrote."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
