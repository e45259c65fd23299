"""What fits the machine: the memory that a batch takes is measured on two images before the first step, and a batch
that is too large is split into micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..config import Loop
from ..config.machine import available_cores
from ..console.terminal import counted, say
from ..data.memory import free_bytes
from .state import TrainState
from .trainable import Trainable, TrainBatch

TRIED = 2  # images
SHARE = 0.6  # of the free memory that a step may take; the rest is for temporary tensors and for other programs


def micro_batch_count(state: TrainState, batch: TrainBatch) -> int:
    """Into how many micro-batches each batch is split: as --grad-accum says, else as many as the free memory asks for.
    Whoever trains reads in one line what was chosen."""
    config, accelerator = state.config, state.context.accelerator
    if config.grad_accum or config.fsdp or config.weighs_batches:  # the trial is on two images of an undivided model
        count = config.grad_accum or 1
        describe(state, count, "")
        return count
    images, free = len(batch.labels), free_bytes(accelerator.device)
    if accelerator.device.type == "cpu":
        free /= accelerator.num_processes
    need, room = step_bytes(state.model, batch, config), SHARE * free - optimizer_bytes(state.model)
    fitting = [n for n in range(1, images + 1) if images % n == 0 and need * images / n <= room]
    count = min(fitting, default=images) if may_split(config) else 1
    (count,) = broadcast_object_list([count])
    memory = f"{readable(need * images / count)} of {readable(free)} of free memory"
    describe(state, count, f", about {memory}")
    if need * images / count > room and accelerator.is_main_process:
        say(f"A step may not fit into the memory: choose a smaller --batch than {config.batch}, --size or --backbone.")
    return count


def may_split(config: Loop) -> bool:
    """Whether micro-batches give the loss of the whole batch."""
    return not (config.weighs_batches or config.compares_images)


def step_bytes(model: Trainable, batch: TrainBatch, config: Loop) -> float:
    """Bytes per image that a forward pass keeps for the backward pass, measured on some images of the batch. Nothing
    of the model or of its random numbers is changed."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sample = batch.micro_batches(max(1, len(batch.labels) // TRIED))[0]
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = batch.labels.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager") if config.compile else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
    ):
        losses = model(sample)  # holds the tensors until they are counted
    del losses
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return sum(kept.values()) / len(sample.labels)


def optimizer_bytes(model: Trainable) -> int:
    """The gradients and AdamW's two moments, which the first step creates."""
    return 3 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def readable(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def describe(state: TrainState, count: int, memory: str) -> None:
    config, accelerator, cores = state.config, state.context.accelerator, counted(available_cores(), "core")
    if not accelerator.is_main_process:
        return
    gpu = accelerator.device.type == "cuda"
    device = torch.cuda.get_device_name(accelerator.device) if gpu else f"the CPU ({cores})"
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    pieces = f" in {count} micro-batches" if count > 1 else ""
    batch = f"batch {state.batches.batch}{pieces}{memory}"
    say(f"Training on {device} in {precision}: {batch}; data-loading processes: {config.workers}.")
