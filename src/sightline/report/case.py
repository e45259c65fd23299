"""The context of a report: the model, the images it is evaluated on, and how to load them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..batch.sample import draw_sample
from ..config import Audit
from ..console.terminal import bar
from ..data.batches import Batch, Batches, TransformedBatches
from ..data.images import Preprocess, decode
from ..data.rows import Rows
from ..errors import UserError
from ..explain.localize import images_of_split
from ..explain.replacement_masks import with_replacement_masks
from ..interventions.apply import load_intervention, load_part_names
from ..interventions.file import Intervention
from ..load import (
    EvaluationData,
    Model,
    announce_intervention,
    evaluation_data,
    match_classes,
    open_model,
    with_saved_intervention,
)
from ..methods.base import PartMethod
from ..metrics.inference import inference_batches, sight_and_maps
from ..sight import Method, Sight

BATCH = 32  # images drawn at once
SAMPLE = 1000  # images, if --sample does not say how many


@dataclass(frozen=True, eq=False)
class ReportContext:
    command: Audit
    accelerator: Accelerator
    model: Model  # with its saved intervention
    parts: PartMethod | None  # the same model without the intervention, if it discovers parts
    intervention: Intervention
    dataset: EvaluationData
    rows: Rows  # those of `dataset`, with the model's classes
    masks_from: str = ""  # where the masks come from, if they are not the data's own

    @property
    def method(self) -> Method:
        return self.model.method

    @property
    def indices(self) -> np.ndarray:
        return self.rows.split_indices(self.command.split)

    @property
    def blind(self) -> bool:
        return self.method.blind

    @contextmanager
    def batches(self, task: str, indices: np.ndarray) -> Generator[Batches]:
        """Batches as the method takes them, with a progress bar."""
        command = self.command
        batches = inference_batches(
            self.method.with_masks(self.rows), indices, self.model.expects, self.accelerator, batch=command.batch,
            workers=command.workers, cache=command.cache, masks=self.method.needs_masks,
        )  # fmt: skip
        with closing(batches), bar(task, len(indices)) as tick:
            yield cast(Batches, CountingBatches(batches, tick))

    def load_images(self, indices: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Floats [n, 3, h, w] in [0, 1], and the masks that the method takes as input, if any."""
        rows, needs_masks = self.method.with_masks(self.rows), self.method.needs_masks
        samples = [decode(rows, int(i), Preprocess.of(self.model.expects), mask=needs_masks) for i in indices]
        images = torch.stack([sample.image for sample in samples]).float() / 255
        masks = torch.stack([sample.mask for sample in samples if sample.mask is not None]) if needs_masks else None
        device = self.accelerator.device
        return images.to(device), None if masks is None else masks.to(device)

    @torch.no_grad()
    def iterate_sights(self, indices: np.ndarray) -> Iterator[tuple[Tensor, Sight, dict[str, Tensor]]]:
        """Images, their sights and the method's maps, batch by batch."""
        for start in range(0, len(indices), BATCH):
            images, masks = self.load_images(indices[start : start + BATCH])
            yield images, *sight_and_maps(self.method, images, masks)


def open_report(command: Audit) -> ReportContext:
    accelerator, model = open_model(command.run, command.device)
    if accelerator.num_processes > 1:
        raise UserError("`sightline audit` runs in one process: start it without a launcher")
    command = sampled(command, model)
    dataset = evaluation_data(command, model.run)
    rows = match_classes(model, dataset.rows, dataset.path)
    indices = images_of_split(rows, command.split, dataset.path)
    parts = cast(PartMethod, model.method) if model.method.part_count else None
    intervention = (load_intervention(model) if command.intervention else load_part_names(model)) or Intervention()
    model = with_saved_intervention(model) if command.intervention else model
    if intervention.changes:
        announce_intervention(model.run.folder, intervention.description)
    rows, masks_from = with_replacement_masks(rows, indices, command, model, dataset, accelerator)
    return ReportContext(command, accelerator, model, parts, intervention, dataset, rows, masks_from)


def sampled(command: Audit, model: Model) -> Audit:
    """With --sample-of: the same of the folder with the sample, which is drawn here."""
    given, count = command.sample_of, command.sample
    if given is None:
        if count is not None:
            raise UserError("--sample: needs --sample-of, which names what to draw the images from")
        return command
    if command.data is not None:
        raise UserError(f"--sample-of {given}: takes the place of DATA; leave one of them out")
    folder = draw_sample(given, model.classes, count or SAMPLE, command.seed, model.run.folder / "samples")
    return replace(command, data=folder, sample_of=None, sample=None)


@dataclass(eq=False)
class CountingBatches(TransformedBatches):
    """Batches that report how many images are done."""

    tick: Callable[[int], None] | None

    def epoch(self, epoch: int) -> Iterator[Batch]:
        done = 0
        for batch in self.batches.epoch(epoch):
            yield batch
            done += len(batch)
            if self.tick is not None:
                self.tick(done)


def hides_something(sight: Sight) -> bool:
    """Whether the sight is a selection at all, not everything by definition."""
    cells = 1 if sight.keep is None else sight.keep[0].numel()
    return cells > 1 or sight.keep_pixels is not None or sight.boxes is not None
