"""What all cells share: the data, decoded once; what was computed before, kept; and what to compute on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..config.matrix import Matrix
from ..console.terminal import watched
from ..data.batches import Batches
from ..data.cache import Cache
from ..data.cache import fingerprint as files_of
from ..data.images import Canvas
from ..data.rows import Rows, fingerprint
from ..errors import UserError
from ..training.checkpoint import load_tensors, save_tensors

FORMAT = 1
Found = TypeVar("Found")


class Bench:
    def __init__(self, config: Matrix, rows: Rows, device: torch.device):
        self.config, self.rows, self.device = config, rows, device
        self.folder: Path = config.cache or config.folder / "cache"
        self.data = fingerprint(rows)
        asked = config.precision if config.precision != "auto" else {"cuda": "bf16"}.get(device.type, "fp32")
        self.precision: Any = asked
        self.bare = replace(rows, masks=None)  # decoded pictures are the same whatever masks there are
        self._made: dict[Hashable, Any] = {}

    @property
    def every(self) -> np.ndarray:
        return np.arange(len(self.rows))

    @property
    def arithmetic(self) -> str:
        return f"{self.device.type} {self.precision}"

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Made now, or found in memory."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def kept(self, name: str, facts: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Made now, or found in a file; `facts` must say all that it depends on."""
        path = self.folder / f"{name}-{short_print(f'{FORMAT} {facts}')}.safetensors"
        if path.exists():
            return load_tensors(path)[0]
        made = make()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from error
        save_tensors(path, made, {"rows": self.rows.name})
        return made

    def files(self, canvas: Canvas) -> str:
        """Changes with any picture's file, and with how it is brought to size."""
        return self.once(("files", canvas), lambda: files_of(self.bare, canvas, self.every))

    def pictures(self, canvas: Canvas) -> Cache:
        """All of them, decoded; on the GPU if they fit."""

        def decoded() -> Cache:
            cache = Cache.open(self.bare, canvas, self.folder, self.every, workers=max(1, self.config.workers))
            return cache.to(self.device) if self.device.type == "cuda" else cache

        return self.once(("pictures", canvas), decoded)

    @torch.no_grad()
    def over(
        self, function: Callable[[Tensor, Tensor], Tensor], indices: np.ndarray, canvas: Canvas, *, exact: bool
    ) -> Tensor:
        """[n, ...] in the order of `indices`: what `function` makes of pictures and their numbers."""
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=not exact and self.precision == "bf16")
        made, batch = [], self.config.batch
        batches = Batches(
            self.bare, indices, canvas, batch, shuffle=False, seed=0, cache=self.pictures(canvas), masks=False
        )
        with closing(batches), cast:
            for some in watched(batches.epoch(0), len(batches)):
                some = some.to(self.device)
                made.append(function(some.images.float() / 255, some.indices))
        return torch.cat(made).cpu()

    def outlines(self, told: Rows, canvas: Canvas) -> Tensor:
        """uint8 [rows, ⌈h·w / 8⌉]: the masks that these rows have, one bit per pixel."""
        workers = self.config.workers
        batches = Batches(told, self.every, canvas, self.config.batch, shuffle=False, seed=0, workers=workers)
        packed = []
        with closing(batches):
            for some in batches.epoch(0):
                assert some.masks is not None
                packed.append(np.packbits(some.masks.flatten(1).numpy(), axis=1))
        return torch.from_numpy(np.concatenate(packed))


def short_print(facts: str) -> str:
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
