"""Ctrl-C and SIGTERM between steps: all processes stop after the same step, whichever of them was asked to."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Generator

import torch
from accelerate import Accelerator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS = 1.0  # at most, between two agreements of several processes; they cost one small message


class StopRequest:
    """Whether to stop. With several processes they agree in steps known to all of them beforehand, by the clock of the
    main process, because asking synchronises them."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.requested = accelerator, threading.Event()
        self.began, self.steps, self.next = time.monotonic(), 0, 1

    @property
    def alone(self) -> bool:
        return self.accelerator.num_processes == 1

    def after_step(self) -> bool:
        """Whether to stop after this step. All processes must call this after every step."""
        self.steps += 1
        if self.alone:
            return self.requested.is_set()
        return self.steps >= self.next and self.agreed()

    def agreed(self) -> bool:
        """Whether any process was asked to stop. All processes must call this at the same point."""
        if self.alone:
            return self.requested.is_set()
        passed = time.monotonic() - self.began if self.accelerator.is_main_process else 0.0
        known = torch.tensor([float(self.requested.is_set()), passed], device=self.accelerator.device)
        asked, passed = self.accelerator.reduce(known, "sum").tolist()
        wanted = math.ceil(self.steps * SECONDS / max(passed, 1e-6))
        self.next = max(1, min(2 * self.steps, wanted)) if self.steps else 1
        self.began, self.steps = time.monotonic(), 0
        return asked > 0


@contextlib.contextmanager
def stopping_between_steps(accelerator: Accelerator) -> Generator[StopRequest]:
    """A signal takes effect at the end of a step, so that the checkpoint is consistent. A second one takes effect at
    once, but not with several processes: their launcher repeats to each of them what the terminal has sent to all."""
    stopping = StopRequest(accelerator)
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def request_stop(*_: object) -> None:
        stopping.requested.set()
        if stopping.alone:
            restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, request_stop)
    try:
        yield stopping
    finally:
        restore()
