"""Progress of training: a bar on a terminal, a line per epoch and half minute, throughput."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..console.terminal import SCREEN, TERMINAL_LOCK, ProgressLines, duration, say

STEPS_MEASURED = 3  # after the first, which is slower, to tell how long training will take
SECONDS_WAITED = 10.0  # in an epoch, from which a cache is advised
WAITS = "Training waits for images: --cache FOLDER keeps them decoded, and more --workers decode them faster."
LONG = 180.0  # seconds of training on a CPU from which cheaper ways are named


@dataclass(frozen=True)
class Speed:
    """Throughput of training in one epoch, without validation."""

    images: int
    seconds: float
    waiting: float  # seconds of these spent waiting for data

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


def now(device: torch.device) -> float:
    """The time, once the device has finished its pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Progress:
    """A bar over all steps of a training run, or a line every half minute; and a line per epoch."""

    def __init__(self, steps: int, done: int, show: bool, processes: int = 1, cheaper: str = "", cached: bool = False):
        self.show = show and not SCREEN.quiet
        self.loss_label = "loss" if processes == 1 else "loss of this process"
        self.bar, self.steps, self.first, self.total = None, 0, done, steps
        self.cheaper, self.began, self.waits = cheaper, 0.0, "" if cached else WAITS
        self.lines = None
        if not self.show:
            return
        if SCREEN.stage is not None:
            return
        if not sys.stderr.isatty():
            self.lines = ProgressLines("training", steps, first=done)
        elif TERMINAL_LOCK.acquire(blocking=False):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=steps, completed=done)
            self.bar.start()

    def step(self, loss: Callable[[], float]) -> None:
        """The loss is read only every 20 steps, because reading it waits for the device."""
        self.steps += 1
        if not self.show:
            return
        if SCREEN.stage is not None:
            SCREEN.stage.update("training", self.first + self.steps, self.total)
        elif self.lines is not None:
            self.lines(self.first + self.steps)
        elif self.bar is not None:
            description = f"{self.loss_label} {loss():.3f}" if self.steps % 20 == 1 else None
            self.bar.update(self.task, advance=1, description=description)
        if self.cheaper:
            self.announce_duration()

    def announce_duration(self) -> None:
        """Without a GPU, after a few steps: how long this will take, and what would take less."""
        if self.steps == 1:
            self.began = time.perf_counter()
        if self.steps == 1 + STEPS_MEASURED:
            left = (time.perf_counter() - self.began) / STEPS_MEASURED * (self.total - self.first - self.steps)
            if left > LONG:
                say(f"On this CPU the training will take about {duration(left)}. {self.cheaper}")

    def epoch(self, line: Mapping, metric: str, speed: Speed) -> None:
        if self.show:
            metrics = pretraining_metrics(line) if metric == "last" else [f"validation {metric} {line[metric]:.1%}"]
            if "coverage" in line:
                metrics.append(f"sees {line['coverage']:.0%} ± {line['coverage_sd']:.0%} of the image")
            say(", ".join([f"epoch {line['epoch']}: loss {line['loss']:.4f}", *metrics, str(speed)]))
            if self.waits and speed.waiting_share > 0.3 and speed.waiting > SECONDS_WAITED:
                say(self.waits)
                self.waits = ""

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
            TERMINAL_LOCK.release()


def pretraining_metrics(line: Mapping) -> list[str]:
    """The metrics of an epoch of pretraining, as far as labels and masks allow and the epoch was measured."""
    labels = {"knn": "k-NN accuracy", "mass": "attention mass on the masks", "hit": "attention peak on the masks"}
    return [f"{label} {line[name]:.1%}" for name, label in labels.items() if name in line]
