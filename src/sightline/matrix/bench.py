"""What all cells of the matrix share: the decoded data, the cache of earlier computations, and the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..config.matrix import Matrix
from ..console.terminal import watched
from ..data.batches import Batches
from ..data.cache import Cache, cache_fingerprint
from ..data.images import Preprocess
from ..data.rows import Rows, fingerprint
from ..data.shared_cache import fetch, on_disk, publish
from ..errors import UserError
from ..training.checkpoint import load_cached, save_tensors

FORMAT = 1
Found = TypeVar("Found")


class MatrixContext:
    def __init__(self, config: Matrix, rows: Rows, device: torch.device):
        self.config, self.rows, self.device = config, rows, device
        self.folder = on_disk(config.cache or config.folder / "cache")
        self.data = fingerprint(rows)
        default_precision = {"cuda": "bf16"}.get(device.type, "fp32")
        self.precision: Any = default_precision if config.precision == "auto" else config.precision
        self.bare = replace(rows, masks=None)  # decoded images do not depend on the masks
        self._made: dict[Hashable, Any] = {}

    @property
    def every(self) -> np.ndarray:
        return np.arange(len(self.rows))

    @property
    def arithmetic(self) -> str:
        return f"{self.device.type} {self.precision}"

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Computed on the first call, then kept in memory."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def kept(self, name: str, facts: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Read from the cache, or computed and cached; `facts` must name everything it depends on."""
        path = self.folder / f"{name}-{short_hash(f'{FORMAT} {facts}')}.safetensors"
        fetch(path)
        if (found := load_cached(path)) is not None:
            return found
        made = make()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from error
        save_tensors(path, made, {"rows": self.rows.name})
        publish(path)
        return made

    def files(self, preprocess: Preprocess) -> str:
        """Fingerprint of the image files and their preprocessing."""
        return self.once(("files", preprocess), lambda: cache_fingerprint(self.bare, preprocess, self.every))

    def images(self, preprocess: Preprocess) -> Cache:
        """All images, decoded; on the GPU if they fit."""

        def decoded() -> Cache:
            cache = Cache.open(self.bare, preprocess, self.folder, self.every, workers=max(1, self.config.workers))
            return cache.to(self.device) if self.device.type == "cuda" else cache

        return self.once(("images", preprocess), decoded)

    @torch.no_grad()
    def over(
        self, function: Callable[[Tensor, Tensor], Tensor], indices: np.ndarray, preprocess: Preprocess, *, exact: bool
    ) -> Tensor:
        """[n, ...] in the order of `indices`: `function` of every batch of images and their row indices."""
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=not exact and self.precision == "bf16")
        made, batch = [], self.config.batch
        batches = Batches(
            self.bare, indices, preprocess, batch, shuffle=False, seed=0, cache=self.images(preprocess), masks=False
        )
        with closing(batches), cast:
            for loaded in watched(batches.epoch(0), len(batches)):
                loaded = loaded.to(self.device)
                made.append(function(loaded.images.float() / 255, loaded.indices))
        return torch.cat(made).cpu()

    def packed_masks(self, rows: Rows, preprocess: Preprocess) -> Tensor:
        """uint8 [rows, ⌈h·w / 8⌉]: the masks of these rows, one bit per pixel."""
        workers = self.config.workers
        batches = Batches(rows, self.every, preprocess, self.config.batch, shuffle=False, seed=0, workers=workers)
        packed = []
        with closing(batches):
            for loaded in batches.epoch(0):
                assert loaded.masks is not None
                packed.append(np.packbits(loaded.masks.flatten(1).numpy(), axis=1))
        return torch.from_numpy(np.concatenate(packed))


def short_hash(facts: str) -> str:
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
