"""The state of the training loop: the position, the loss sums of the epoch, and all objects a step needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Loop
from ..data.augment import Augment
from ..data.batches import Batches
from .checkpoint import CheckpointTimer
from .progress import Progress
from .stopping import StopRequest
from .trackers import LogLine
from .trainable import Trainable, TrainContext

NOT_STORED = ("sums", "unsaved")  # of the position; the sums of all processes are stored


@dataclass
class LoopPosition:
    """How far training has come. Stored in last.safetensors, so the names of the fields are part of its format."""

    epoch: int = 0
    step: int = 0  # within the epoch
    best: float | None = None  # validation score
    best_epoch: int | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # losses of the epoch so far, in this process
    finished: bool = False
    micro_batches: int = 0  # into which every batch is split; 0: not decided yet
    unsaved: dict[str, Tensor] = field(default_factory=dict)  # best weights, on the main process, until they are saved

    def stored(self, sums: dict[str, list[float]]) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in NOT_STORED} | {"sums": sums}

    def by_process(self, accelerator: Accelerator) -> dict[str, list[float]]:
        """The losses of the epoch so far, summed over steps, of every process."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        sums = accelerator.gather(torch.stack([self.sums[name].float() for name in names])[None])
        return dict(zip(names, sums.T.tolist(), strict=True))


def own_sum(stored: list[float] | float, accelerator: Accelerator) -> float:
    """What this process continues: its own sum, so that numbers are added in the same order as without the
    interruption; with another number of processes, the main one continues the sum of all."""
    sums = stored if isinstance(stored, list) else [stored]  # one number: as checkpoints held it before
    if len(sums) == accelerator.num_processes:
        return sums[accelerator.process_index]
    return sum(sums) * accelerator.is_main_process


@dataclass(frozen=True)
class TrainState:
    """A model in training, with everything that a step, validation and a checkpoint need."""

    model: Trainable
    wrapped: nn.Module  # the model, wrapped for several processes
    optimizer: Any
    ema: Trainable | None  # the model with averaged weights
    replica: Trainable | None  # with FSDP: an undivided copy, for validation and the final evaluation
    position: LoopPosition
    batches: Batches
    val_batches: Batches
    augment: Augment
    progress: Progress
    log_line: LogLine
    timer: CheckpointTimer
    stopping: StopRequest
    context: TrainContext
    config: Loop
