"""How far a long job has come, for a person to see: on a terminal only, and never in the way of the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Of training in one epoch, validation not counted."""

    images: int
    seconds: float
    waiting: float  # of these, for data

    def __str__(self) -> str:
        waiting = f"{self.waiting / self.seconds:.0%} of the time waiting for data"
        return f"{self.images / self.seconds:,.0f} images/s, {waiting}"

    def to_dict(self) -> dict[str, float]:
        shares = {"images_per_second": self.images / self.seconds, "waiting_share": self.waiting / self.seconds}
        return {name: round(value, 4) for name, value in shares.items()}


class Progress:
    """A bar over all steps of a training run, and a line per epoch."""

    def __init__(self, steps: int, done: int, show: bool):
        self.show = show
        self.bar, self.steps = None, 0
        if show and sys.stderr.isatty():
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
            description = f"loss {loss():.3f}" if self.steps % 20 == 1 else None
            self.bar.update(self.task, advance=1, description=description)

    def epoch(self, line: Mapping, metric: str, speed: Speed) -> None:
        if self.show:
            text = f"epoch {line['epoch']}: loss {line['loss']:.4f}, validation {metric} {line[metric]:.1%}, {speed}"
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
