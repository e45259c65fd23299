"""Terminal output of the commands: progress with the time left, notes, counts, errors.

Progress goes to standard error: a bar on a terminal, a line every half minute elsewhere, nothing with --quiet.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .printable import printable

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
TERMINAL_LOCK = threading.Lock()  # one progress bar at a time
SECONDS_PER_LINE = 30.0  # of progress where standard error is not a terminal


@dataclass(eq=False)
class Screen:
    """What the running command may show."""

    quiet: bool = False  # nothing but errors
    stage: Stage | None = None  # shows all progress, while there is one


SCREEN = Screen()


def counted(count: int, noun: str = "image") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Rounded: 40 s, 3 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def paragraph(console: Console, text: str, mark: str = "", style: str = "") -> None:
    """A line of text, wrapped between words on a terminal and nowhere else; before it, perhaps a coloured mark."""
    from rich.text import Text

    marked = Text.assemble((f"{mark}  ", style) if mark else "", (text, "" if mark or style == "bold red" else style))
    console.print(marked, soft_wrap=not console.is_terminal)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        paragraph(console, note, "note", "yellow")


def say(text: str) -> None:
    """A line about the work in progress, on standard error; nothing with --quiet or inside a stage."""
    if not SCREEN.quiet and SCREEN.stage is None:
        print(text, file=sys.stderr, flush=True)


def present(command: Any, content: Mapping[str, Any], show: Callable[[], None]) -> None:
    """The result of a command: as JSON on standard output with --json, nothing with --quiet, otherwise for people."""
    if command.json:
        print(json.dumps(content, indent=1, ensure_ascii=False, default=str))
    elif not command.quiet:
        show()


# ---- progress --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ProgressLines:
    """For a file or a log: a line every half minute."""

    what: str
    total: int
    first: int = 0  # done before this began

    def __post_init__(self) -> None:
        self.began = self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last < SECONDS_PER_LINE or done <= self.first:
            return
        self.last = now
        left = (now - self.began) / (done - self.first) * (self.total - done)
        share = f"{done:,} of {self.total:,} ({done / max(1, self.total):.0%})"
        print(f"{self.what}: {share}, about {duration(left)} left", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str, total: int) -> Generator[Callable[[int], None] | None]:
    """Progress with the remaining time, as a function that takes the number done; None with --quiet, or if another bar
    is shown already."""
    if SCREEN.quiet:
        yield None
        return
    if SCREEN.stage is not None:
        current = SCREEN.stage
        yield lambda done: current.update(what, done, total)
        return
    if not sys.stderr.isatty():
        yield ProgressLines(what, total)
        return
    if not TERMINAL_LOCK.acquire(blocking=False):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    try:
        with Progress(console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(what, total=total)
            yield lambda done: shown.update(task, completed=done)
    finally:
        TERMINAL_LOCK.release()


def watched(items: Iterable[Item], total: int, what: str = "processing images") -> Generator[Item]:
    """The items, with progress in the main process."""
    if not is_main_process():
        yield from items
        return
    with bar(what, total) as tick:
        for done, item in enumerate(items, start=1):
            yield item
            if tick is not None:
                tick(done)


class Stage:
    """One line on standard output for a piece of work: a bar with the time left of whatever runs inside, which prints
    no progress of its own; in the end, how long it all took."""

    def __init__(self, title: str):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.title, self.doing, self.live = title, "", None
        if sys.stdout.isatty():
            columns = (
                TextColumn(title),
                BarColumn(20),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
            )
            self.live = Progress(*columns, console=Console(highlight=False), transient=True)
            self.task = self.live.add_task("", total=None)

    def update(self, what: str, done: int, total: int) -> None:
        if self.live is None:
            return
        if what != self.doing:
            self.doing = what
            self.live.reset(self.task, description=what, total=max(1, total))
        self.live.update(self.task, completed=done)


@contextmanager
def stage(title: str) -> Generator[None]:
    """A `Stage` for the work inside."""
    shown, began = Stage(title), time.monotonic()
    SCREEN.stage = shown
    if shown.live is not None:
        shown.live.start()
    else:
        print(title, end="", flush=True)
    try:
        yield
    finally:
        SCREEN.stage = None
        if shown.live is not None:
            shown.live.stop()
            print(title, end="")
        print(f"{duration(time.monotonic() - began):>8}", flush=True)


def is_main_process() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


def fail(message: str, code: int) -> int:
    print(f"sightline: {printable(message)}".replace("\n", "\\n"), file=sys.stderr)
    return code
