"""What commands show on the screen and write where they are told to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from .verify.verify import Certificate

Item = TypeVar("Item")
THE_TERMINAL = threading.Lock()  # one bar at a time


def show(certificate: Certificate, *, brief: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not brief:
        table = Table("hidden", "redrawn with", "trials", "changed", "largest change", box=None, pad_edge=False)
        for row in certificate.tried:
            largest = "–" if row.largest_change is None else f"{row.largest_change:.3g}"
            table.add_row(row.level, row.kind, f"{row.trials:,}", f"{row.changed:,}", largest)
        console.print(table)
    colour = "green" if certificate.verdict == "blind" else "red"
    console.print(f"[bold {colour}]{certificate.verdict}[/]  {certificate.sentence}", soft_wrap=True)
    if certificate.end_to_end:
        console.print(
            "End to end (a figure, not a proof: the selector sees the whole image), with hidden pixels redrawn:"
        )
        table = Table(
            "redrawn with", "n", "answer changed", "sight changed", "overlap of sights", box=None, pad_edge=False
        )
        for kind, row in certificate.end_to_end["redrawn_with"].items():
            shares = [
                f"{row[figure] / row['n']:.0%} [{low:.0%}, {high:.0%}]"
                for figure in ("answer_changed", "sight_changed")
                for low, high in [row[f"{figure}_interval"]]
            ]
            table.add_row(kind, str(row["n"]), *shares, f"{row['sight_iou']:.2f}")
        console.print(table)


def show_metrics(folder: Path, split: str) -> None:
    """The table of one split, under what it is about, and what to know about it."""
    from rich.console import Console
    from rich.markup import escape

    from .metrics.cost import Cost
    from .metrics.estimates import Metrics, read_metrics
    from .training.run_folder import read_run

    content = read_metrics(folder / "metrics.json")
    about = content.get("data") or read_run(folder).facts["data"] | {"own": True}
    shown = split if split in content["splits"] else next(iter(content["splits"]))
    metrics = Metrics.from_dict(content["splits"][shown])
    selected = content.get("selected_by") is not None
    console = Console(highlight=False)
    console.print(f"{escape(about['name'])}, split {shown!r}: {counted(metrics.n)}", soft_wrap=True)
    console.print(metrics.table())
    notes = [f"there is no split {split!r}, so this is {shown!r}"] if shown != split else []
    if about["own"] and shown == "train":
        notes.append("the model was trained on these pictures: expect less on others")
    if about["own"] and selected and shown == content["selected_on"]:
        notes.append("these pictures also chose the weights: expect less on others")
    print_notes(console, (*notes, *about["notes"], *metrics.warnings))
    chosen = f"Weights selected by {content['selected_by']} on the {content['selected_on']} data."
    rule = chosen if selected else "Nothing was selected."
    console.print(f"[bold]{escape(metrics.headline())}[/]. {rule}", soft_wrap=True)
    if shown in content.get("cost", {}):
        console.print(Cost(**content["cost"][shown]).sentence, soft_wrap=True)


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


def make_way(path: Path | None) -> None:
    """Before the work, so that it is not done in vain."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    if path.is_dir():
        raise UserError(f"{path}: cannot be written (it is a folder); name a file")


def write(path: Path, text: str) -> None:
    make_way(path)
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def fail(message: str, code: int) -> int:
    print(f"sightline: {message}", file=sys.stderr)
    return code
