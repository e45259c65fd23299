"""Worker processes that draw images.

They are spawned, not forked: forked processes would share the file position of an open archive, and could inherit a
lock of the BLAS library that is never released.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from ..errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_processes(
    job: Callable[[Task], Result], tasks: Sequence[Task], workers: int, chunk: int = 1
) -> Iterator[Result]:
    """The results, in the order of the tasks; an error if a process is killed."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker) as pool:
        try:
            yield from pool.map(job, tasks, chunksize=chunk)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed; run the command again, perhaps with fewer workers (a script of your own "
                "must call this below `if __name__ == '__main__':`, since every worker imports it)"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker() -> None:
    """One thread per worker; Ctrl-C is handled by the parent, and a worker ends when its parent is killed."""
    # Not by OMP_NUM_THREADS: where the main script imports torch, torch has read it before this is called.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers wait for a parent"
    parent.join()
    os._exit(1)
