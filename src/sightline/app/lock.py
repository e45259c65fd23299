"""Many threads, one device: who asks first is served first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.batches import OnTheWay

if TYPE_CHECKING:
    from ..data.batches import Batch

Progress = Callable[[int, int], None]  # batches done, and of how many


class Turns:
    """A lock that is fair: long work that lets others in between its batches is not always first again."""

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
class InTurns(OnTheWay):
    """Each is worked on in its turn."""

    turns: Turns
    progress: Progress | None = None

    def epoch(self, number: int) -> Iterator[Batch]:
        for done, batch in enumerate(self.batches.epoch(number)):
            if self.progress is not None:
                self.progress(done, len(self.batches))
            with self.turns:
                yield batch
