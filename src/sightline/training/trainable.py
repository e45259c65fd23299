"""The interface of a model that is trained in the loop, and what it receives in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Train
from ..data.augment import AnnotatedImages, Augment
from ..data.batches import Batch, Batches
from ..data.rows import Rows
from ..metrics.groups import score
from ..metrics.inference import predict_batches
from ..sight import Method
from ..vit.model import Input
from .run_folder import Run


@dataclass(frozen=True)
class StepInfo:
    """The position of a training step. All random draws of the step depend on this and on nothing else."""

    seed: int
    epoch: int
    step: int  # within the epoch
    epochs: int
    steps: int  # per epoch
    positions: Tensor  # int64 [b]: positions of this process's images in the epoch

    @property
    def number(self) -> int:
        """The step, counted from the start of training."""
        return self.epoch * self.steps + self.step

    @property
    def progress(self) -> float:
        """The completed fraction of training, in [0, 1)."""
        return self.number / (self.epochs * self.steps)


@dataclass(frozen=True)
class TrainBatch:
    """The input of one training step, or of one micro-batch of it."""

    images: Tensor  # float [b, 3, h, w] in [0, 1], augmented
    labels: Tensor  # int64 [b]
    groups: Tensor | None
    masks: Tensor | None  # bool [b, h, w], transformed along with the images
    indices: Tensor  # int64 [b], into the rows
    info: StepInfo
    crops: tuple[Tensor, ...] = ()  # further views [b, ...], for multi-crop training

    def micro_batches(self, count: int) -> list[TrainBatch]:
        """At most `count` pieces, for gradient accumulation."""
        if count == 1:
            return [self]
        chunks = {name: value.chunk(count) for name, value in vars(self).items() if isinstance(value, Tensor)}
        crops = [crop.chunk(count) for crop in self.crops]
        return [
            replace(self, crops=tuple(c[k] for c in crops), **{name: chunk[k] for name, chunk in chunks.items()})
            for k in range(len(chunks["labels"]))
        ]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same learning rate and weight decay."""

    parameters: list[nn.Parameter]
    lr: float = 1.0  # as a multiple of the learning rate
    decay: bool = True


@dataclass(frozen=True)
class TrainContext:
    """What training works with: the data, the run folder, the processes, and the model's input format."""

    rows: Rows
    run: Run
    accelerator: Accelerator
    expects: Input


class Trainable(nn.Module):
    """A model that is trained in the loop. Everything that must survive an interruption is in its state_dict."""

    trains_with_masks = False
    divisible = False  # whether all of its training goes through `forward`, as FSDP needs it
    needs_masks = False
    class_log_prior: Tensor | None = None  # [C]: log class priors of the training data, for logit adjustment

    def classification_loss(self, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy, with logit adjustment if class priors are given (Menon et al. 2021, eq. 10)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.class_log_prior is None else logits + self.class_log_prior
        return F.cross_entropy(logits, labels, reduction=reduction)

    def prepare(self, context: TrainContext, train: Callable[[Train], Path]) -> None:
        """Called before the loop; a method that needs another model first trains it with `train`."""

    def train_indices(self, rows: Rows) -> np.ndarray:
        """The rows of an epoch; a repeated row is seen repeatedly."""
        return rows.split_indices("train")

    def train_groups(self, rows: Rows) -> np.ndarray | None:
        """int64 [n]: the groups from which `--balance groups` draws equally often."""
        return rows.groups

    def make_train_batch(self, batch: Batch, augment: Augment, info: StepInfo) -> TrainBatch:
        """Augment a batch. Every position of the epoch gets its own view, also of an image that is drawn twice."""
        annotated = AnnotatedImages(batch.images, batch.masks)
        seen = augment(annotated, seed=info.seed, epoch=info.epoch, indices=info.positions)
        return TrainBatch(seen.images, batch.labels, batch.groups, seen.masks, batch.indices, info)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        """The losses, each averaged over the images; `loss` is minimised."""
        raise NotImplementedError

    def parameter_groups(self, head_lr_factor: float) -> list[ParameterGroup]:
        raise NotImplementedError

    def after_step(self, info: StepInfo) -> None:
        """Called after each optimiser step."""

    def validate(self, val_batches: Batches, context: TrainContext, select: str) -> dict[str, float]:
        """Validation metrics after an epoch, including `select`, by which checkpoints are selected."""
        predictions = predict_batches(cast(Method, self), context.rows, val_batches, context.accelerator)
        return {select: score(predictions, select), "accuracy": score(predictions, "accuracy")}
