"""A fair lock for one device and many threads: first come, first served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.batches import TransformedBatches

if TYPE_CHECKING:
    from ..data.batches import Batch

Progress = Callable[[int, int], None]  # batches done, and their total


class FairLock:
    """A first-come, first-served lock: long work that releases it between batches does not get it back at once."""

    def __init__(self) -> None:
        self._changed, self._given, self._served = threading.Condition(), 0, 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._given = self._given, self._given + 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


@dataclass(eq=False)
class LockedBatches(TransformedBatches):
    """Batches that hold the lock while they are processed."""

    device_lock: FairLock
    progress: Progress | None = None

    def epoch(self, number: int) -> Iterator[Batch]:
        for done, batch in enumerate(self.batches.epoch(number)):
            if self.progress is not None:
                self.progress(done, len(self.batches))
            with self.device_lock:
                yield batch
