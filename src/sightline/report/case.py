"""What a report is about: a model, the pictures that it is asked about, and how to get at them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..config import Audit
from ..console.terminal import bar
from ..data.batches import Batch, Batches, OnTheWay
from ..data.images import Canvas, decode
from ..data.rows import Rows
from ..errors import UserError
from ..explain.replacement_masks import with_other_masks
from ..interventions.apply import kept, only_names
from ..interventions.file import Intervention
from ..load import EvaluationData, Model, announce, evaluation_data, match_classes, opened, with_kept
from ..methods.base import PartMethod
from ..metrics.inference import inference_batches, sight_for
from ..sight import Method, Sight

LOOKED_AT = 32  # pictures at once, to be drawn


@dataclass(frozen=True, eq=False)
class Case:
    command: Audit
    accelerator: Accelerator
    model: Model  # with what is kept to correct it
    parts: PartMethod | None  # the same as it was trained, if it discovers parts
    intervention: Intervention
    asked: EvaluationData
    rows: Rows  # those of `asked`, with the model's classes
    masks_from: str = ""  # in words, where they are not the data's own

    @property
    def method(self) -> Method:
        return self.model.method

    @property
    def indices(self) -> np.ndarray:
        return self.rows.where(self.command.split)

    @property
    def blind(self) -> bool:
        return self.method.blind

    @contextmanager
    def batches(self, what: str, indices: np.ndarray) -> Generator[Batches]:
        """As the method is to see them, while a bar says how far it is."""
        said = self.command
        batches = inference_batches(
            self.method.with_masks(self.rows), indices, self.model.expects, self.accelerator, batch=said.batch,
            workers=said.workers, cache=said.cache, masks=self.method.needs_masks,
        )  # fmt: skip
        with closing(batches), bar(what, len(indices)) as tick:
            yield cast(Batches, Counted(batches, tick))

    def pictures(self, indices: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Floats [n, 3, h, w] in [0, 1], and the masks that the method is told by, if it is."""
        rows, told = self.method.with_masks(self.rows), self.method.needs_masks
        samples = [decode(rows, int(i), Canvas.of(self.model.expects), mask=told) for i in indices]
        images = torch.stack([sample.image for sample in samples]).float() / 255
        masks = torch.stack([sample.mask for sample in samples if sample.mask is not None]) if told else None
        device = self.accelerator.device
        return images.to(device), None if masks is None else masks.to(device)

    @torch.no_grad()
    def looked_at(self, indices: np.ndarray) -> Iterator[tuple[Tensor, Sight, dict[str, Tensor]]]:
        """Pictures, what is seen of them, and the method's maps, some at a time."""
        for start in range(0, len(indices), LOOKED_AT):
            images, masks = self.pictures(indices[start : start + LOOKED_AT])
            yield images, sight_for(self.method, images, masks), self.method.maps(images)


def open_case(command: Audit) -> Case:
    accelerator, model = opened(command.run, command.device)
    if accelerator.num_processes > 1:
        raise UserError("a report is written by one process: run `sightline audit` without a launcher")
    asked = evaluation_data(command, model.run)
    rows = match_classes(model, asked.rows, asked.path)
    if not len(rows.where(command.split)):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    if command.pictures < 0:
        raise UserError(f"--pictures {command.pictures}: must not be negative")
    parts = cast(PartMethod, model.method) if model.method.part_count else None
    found = (kept(model) if command.intervention else only_names(model)) or Intervention()
    model = with_kept(model) if command.intervention else model
    if found.changes:
        announce(model.run.folder, found.words)
    at = rows.where(command.split)
    rows, masks_from = with_other_masks(rows, at, command, model, asked, accelerator)
    return Case(command, accelerator, model, parts, found, asked, rows, masks_from)


@dataclass(eq=False)
class Counted(OnTheWay):
    """They say how many pictures are done."""

    tick: Callable[[int], None] | None

    def epoch(self, epoch: int) -> Iterator[Batch]:
        done = 0
        for some in self.batches.epoch(epoch):
            yield some
            done += len(some)
            if self.tick is not None:
                self.tick(done)


def counting(method: Method, tick: Callable[[int], None] | None) -> Method:
    """The same method, which says how many pictures it has made maps of."""
    counted, done = copy(method), 0

    def maps(images: Tensor) -> dict[str, Tensor]:
        nonlocal done
        done += len(images)
        if tick is not None:
            tick(done)
        return method.maps(images)

    setattr(counted, "maps", maps)  # noqa: B010 (a method of this copy alone)
    return counted


def hides(sight: Sight) -> bool:
    """Whether this is a choice at all, and not everything by definition."""
    cells = 1 if sight.keep is None else sight.keep[0].numel()
    return cells > 1 or sight.keep_pixels is not None or sight.boxes is not None


def few(indices: np.ndarray, most: int) -> np.ndarray:
    """At most so many, evenly spread."""
    return indices[np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int)]
