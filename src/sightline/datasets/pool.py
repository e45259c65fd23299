"""Processes that make pictures. Spawned, not forked: a fork would share the place where an open archive is being read,
and a lock of the library that multiplies matrices, if somebody happens to hold it, for good."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from ..errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(
    job: Callable[[Task], Result], tasks: Sequence[Task], workers: int, chunk: int = 1
) -> Iterator[Result]:
    """The results, in the order of the tasks; a process that dies is a BrokenProcessPool."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin) as pool:
        try:
            yield from pool.map(job, tasks, chunksize=chunk)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed; run it again, perhaps with fewer workers (in a script of your own, below "
                "`if __name__ == '__main__':`, since processes read it anew)"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it when it is killed; each process has one core for itself."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers wait for a parent"
    parent.join()
    os._exit(1)
