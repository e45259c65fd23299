"""What commands print: progress bars, notes, counts, errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
THE_TERMINAL = threading.Lock()  # one bar at a time


def counted(count: int, noun: str = "picture") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_notes(console: Console, notes: Iterable[str]) -> None:
    from rich.markup import escape

    for note in notes:
        console.print(f"[yellow]note[/]  {escape(note)}", soft_wrap=True)


@contextmanager
def bar(what: str, total: int) -> Generator[Callable[[int], None] | None]:
    """A bar to be told how much is done, which says how long the rest will take; None where nobody would see it, or
    where one is shown already."""
    if not sys.stderr.isatty() or not THE_TERMINAL.acquire(blocking=False):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    try:
        with Progress(console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(what, total=total)
            yield lambda done: shown.update(task, completed=done)
    finally:
        THE_TERMINAL.release()


def watched(several: Iterable[Item], total: int, what: str = "looking at pictures") -> Generator[Item]:
    """The same, one by one, with a bar in the main process."""
    if not sys.stderr.isatty() or not is_main_process():
        yield from several
        return
    with bar(what, total) as tick:
        for done, each in enumerate(several, start=1):
            yield each
            if tick is not None:
                tick(done)


def is_main_process() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


def fail(message: str, code: int) -> int:
    print(f"sightline: {message}", file=sys.stderr)
    return code
