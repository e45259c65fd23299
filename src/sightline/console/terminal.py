"""Terminal output of the commands: progress bars, notes, counts, errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
TERMINAL_LOCK = threading.Lock()  # one progress bar at a time


def counted(count: int, noun: str = "image") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_notes(console: Console, notes: Iterable[str]) -> None:
    from rich.markup import escape

    for note in notes:
        console.print(f"[yellow]note[/]  {escape(note)}", soft_wrap=True)


@contextmanager
def bar(what: str, total: int) -> Generator[Callable[[int], None] | None]:
    """A progress bar with the remaining time, as a function that takes the number done; None if standard error is not a
    terminal, or if another bar is shown already."""
    if not sys.stderr.isatty() or not TERMINAL_LOCK.acquire(blocking=False):
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
    """The items, with a progress bar in the main process."""
    if not sys.stderr.isatty() or not is_main_process():
        yield from items
        return
    with bar(what, total) as tick:
        for done, item in enumerate(items, start=1):
            yield item
            if tick is not None:
                tick(done)


def is_main_process() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


def fail(message: str, code: int) -> int:
    print(f"sightline: {message}", file=sys.stderr)
    return code
