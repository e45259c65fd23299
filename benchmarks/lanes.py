"""Jobs in parallel: a process for each lane, a JSON line for each job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from typing import Any


@dataclass(frozen=True)
class Job:
    """`work(*arguments)` in another process; its result is reported, and so is `about` where it fails."""

    about: dict[str, Any]
    work: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


def deadline_in(minutes: float | None) -> float | None:
    return None if minutes is None else time.time() + 60 * minutes


def run_parallel(jobs: Iterable[Job], lanes: int, deadline: float | None = None) -> None:
    """Small models leave a GPU idle. The first job builds the cache of decoded images that the others wait for and
    share. A process that dies, or runs out of memory, takes only its own job with it, which is tried once more."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # for processes to come
    todo: SimpleQueue[tuple[Job, bool]] = SimpleQueue()
    for job in jobs:
        todo.put((job, True))
    count = max(1, min(lanes, todo.qsize()))
    with ThreadPoolExecutor(count) as threads:
        for lane in [threads.submit(run_lane, todo, deadline) for _ in range(count)]:
            lane.result()


def run_lane(todo: SimpleQueue[tuple[Job, bool]], deadline: float | None) -> None:
    """One job after the other, in the process of this lane; a new one after a failure, which may have left memory."""
    process: Executor | None = None
    while True:
        try:
            job, again = todo.get_nowait()
        except Empty:
            break
        if deadline is not None and time.time() > deadline:
            report(job.about | {"skipped": "no time left"})
            continue
        try:
            process = process or new_process()
            report(process.submit(run_until, deadline, job.work, *job.arguments).result())
        except BaseException as error:  # one job must not take the others with it; it is listed as missing
            if process is not None:
                process.shutdown()
            process, late = None, isinstance(error, KeyboardInterrupt)
            retried = again and is_out_of_memory(error)
            why = {"stopped": "saved, to be resumed"} if late else {"failed": f"{type(error).__name__}: {error}"}
            report(job.about | why | {"tried_again": retried})
            if retried:
                todo.put((job, False))
    if process is not None:
        process.shutdown()


def new_process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def run_until(deadline: float | None, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Interrupted at the deadline as by Ctrl-C, upon which training saves a checkpoint."""
    with interrupted_at(deadline):
        return work(*arguments)


@contextlib.contextmanager
def interrupted_at(deadline: float | None) -> Generator[None]:
    if deadline is None:
        yield
        return
    timer = threading.Timer(max(0.0, deadline - time.time()), os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU, which raises; or of the machine, which kills the process."""
    return isinstance(error, BrokenProcessPool) or type(error).__name__ == "OutOfMemoryError"


def report(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False), flush=True)
