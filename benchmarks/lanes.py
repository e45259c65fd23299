"""Rows of a benchmark, several at once: a process for each lane, a JSON line for each row."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from typing import Any

import tyro

from sightline import config as commands
from sightline.errors import UserError


@dataclass(frozen=True)
class Row:
    """A line of a table: the arguments of `sightline train`, on one set of data."""

    set: str
    name: str
    line: str
    seed: int = 0

    @property
    def about(self) -> dict[str, Any]:
        return {"set": self.set, "row": self.name, "seed": self.seed}


# ---- what a row says -------------------------------------------------------------------------------------------------


def all_methods() -> list[type[commands.Train]]:
    return [c for c in vars(commands).values() if isinstance(c, type) and issubclass(c, commands.Train) and c.method]


def as_typed(row: str, method: str, given: Sequence[str], *, compile: bool = False) -> Any:
    """What a user would type after `sightline train`, parsed as the command line does it."""
    kinds: dict[str, Any] = {kind.method: kind for kind in all_methods()}
    if method not in kinds:
        raise UserError(f"{row}: there is no method {method!r}")
    if compile and issubclass(kinds[method], commands.Loop):
        given = [*given, "--compile"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return tyro.cli(kinds[method], args=given)
        except SystemExit:
            typed = shlex.join(["sightline", "train", method, *given])
            raise UserError(f"{row}: `{typed}` is not understood: {said.getvalue()}") from None


def with_files(row: str, flags: Sequence[str], files: Mapping[str, tuple[str, str]]) -> list[str]:
    """The words of a row, such as SELF in `--masks found:SELF`, by what they stand for: word -> (file, its option)."""
    found = []
    for flag in flags:
        before, word = flag[: flag.rfind(":") + 1], flag[flag.rfind(":") + 1 :]
        file, option = files.get(word, (word, ""))
        if not file and option:
            raise UserError(f"{row}: needs {option}")
        found.append(before + file)
    return found


# ---- side by side ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """`work` of `arguments`, in another process; what it returns is said, and so is `about` where it fails."""

    about: dict[str, Any]
    work: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


def deadline_in(minutes: float | None) -> float | None:
    return None if minutes is None else time.time() + 60 * minutes


def side_by_side(jobs: Iterable[Job], parallel: int, deadline: float | None = None) -> None:
    """Small models leave a GPU idle. Who comes first makes the cache of pictures that others wait for and share. A
    process that dies, or has no memory left, takes only its own row with it, which is tried once more."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # for processes to come
    todo: SimpleQueue[tuple[Job, bool]] = SimpleQueue()
    for job in jobs:
        todo.put((job, True))
    count = max(1, min(parallel, todo.qsize()))
    with ThreadPoolExecutor(count) as threads:
        for lane in [threads.submit(work_off, todo, deadline) for _ in range(count)]:
            lane.result()


def work_off(todo: SimpleQueue[tuple[Job, bool]], deadline: float | None) -> None:
    """One job after the other, in a process of this lane; a new one after a failure, which may have left memory."""
    process: Executor | None = None
    while True:
        try:
            job, again = todo.get_nowait()
        except Empty:
            break
        if deadline is not None and time.time() > deadline:
            say(job.about | {"skipped": "no time left"})
            continue
        try:
            process = process or one_process()
            say(process.submit(until, deadline, job.work, *job.arguments).result())
        except BaseException as error:  # one row must not take the others with it; it is listed as missing
            if process is not None:
                process.shutdown()
            process, late = None, isinstance(error, KeyboardInterrupt)
            retried = again and is_out_of_memory(error)
            why = {"stopped": "saved, to go on with"} if late else {"failed": f"{type(error).__name__}: {error}"}
            say(job.about | why | {"tried_again": retried})
            if retried:
                todo.put((job, False))
    if process is not None:
        process.shutdown()


def one_process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def until(deadline: float | None, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """At the deadline as if somebody pressed Ctrl-C, upon which training saves."""
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
    """Of the GPU, which says so; or of the machine, which ends the process."""
    return isinstance(error, BrokenProcessPool) or type(error).__name__ == "OutOfMemoryError"


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False), flush=True)
