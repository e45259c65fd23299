"""How far a long job has come, for a person to see: on a terminal only, and never in the way of the output."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from accelerate import Accelerator

from ..console.terminal import THE_TERMINAL


@dataclass(frozen=True)
class Speed:
    """Of training in one epoch, validation not counted."""

    images: int
    seconds: float
    waiting: float  # of these, for data

    @property
    def rate(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def waiting_share(self) -> float:
        return self.waiting / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"{self.rate:,.0f} images/s, {self.waiting_share:.0%} of the time waiting for data"

    def to_dict(self) -> dict[str, float]:
        return {"images_per_second": round(self.rate, 4), "waiting_share": round(self.waiting_share, 4)}


class Progress:
    """A bar over all steps of a training run, and a line per epoch."""

    def __init__(self, steps: int, done: int, show: bool, processes: int = 1):
        self.show = show
        self.whose = "loss" if processes == 1 else "this process's loss"
        self.bar, self.steps = None, 0
        if show and sys.stderr.isatty() and THE_TERMINAL.acquire(blocking=False):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=steps, completed=done)
            self.bar.start()

    def step(self, loss: Callable[[], float]) -> None:
        """The loss is asked for only now and then: to ask is to wait for the device."""
        if self.bar is not None:
            self.steps += 1
            description = f"{self.whose} {loss():.3f}" if self.steps % 20 == 1 else None
            self.bar.update(self.task, advance=1, description=description)

    def epoch(self, line: Mapping, metric: str, speed: Speed) -> None:
        if self.show:
            found = figures_of_pretraining(line) if metric == "last" else [f"validation {metric} {line[metric]:.1%}"]
            text = ", ".join([f"epoch {line['epoch']}: loss {line['loss']:.4f}", *found, str(speed)])
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
            THE_TERMINAL.release()


def figures_of_pretraining(line: Mapping) -> list[str]:
    """In words, as far as labels and masks allow to tell and the epoch was one to measure after."""
    words = {"knn": "neighbours of the right class", "mass": "attention on the masks", "hit": "its peak on them"}
    return [f"{what} {line[name]:.1%}" for name, what in words.items() if name in line]


@contextlib.contextmanager
def stopping_between_steps(accelerator: Accelerator) -> Generator[threading.Event]:
    """Ctrl-C waits for the end of the step, so that what is saved then is whole; a second one does not wait."""
    stopping = threading.Event()
    if accelerator.num_processes > 1 or threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        stopping.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, before)
