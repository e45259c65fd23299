"""Optimiser, learning-rate schedule with warmup and cosine decay, and the exponential moving average (EMA)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..config import Loop
from ..data.batches import Batches
from .trainable import StepInfo, Trainable


def make_optimizer(model: Trainable, config: Loop, batches: Batches, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; the weight decay is divided by the square root of the number of steps."""
    lr = base_lr(config, batches)
    decay = config.weight_decay / math.sqrt(max(1, len(batches) * config.epochs))
    groups = [
        {"params": g.parameters, "lr": lr * g.lr, "initial_lr": lr * g.lr, "weight_decay": decay * g.decay}
        for g in model.parameter_groups(config.head_lr_factor)
        if g.parameters
    ]
    return torch.optim.AdamW(groups, fused=device.type in ("cuda", "cpu"))


def base_lr(config: Loop, batches: Batches) -> float:
    """Scaled with the square root of the actual batch size, which a small dataset may limit."""
    return config.lr * math.sqrt(batches.batch / 128)


def set_learning_rate(optimizer: torch.optim.Optimizer, info: StepInfo, warmup: float) -> None:
    """Cosine decay per epoch, times linear warmup per step during the first `warmup` epochs."""
    factor = cosine_decay(info.epoch, info.epochs) * warmup_factor((info.number + 1) / info.steps, warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def warmup_factor(epochs_done: float, warmup: float) -> float:
    """Linear warmup: the fraction of the learning rate after `epochs_done` epochs."""
    return min(1.0, epochs_done / warmup) if warmup else 1.0


def cosine_decay(epoch: int, epochs: int) -> float:
    """The fraction of the learning rate in an epoch (counted from 0), constant within it: from 1 towards 0."""
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def update_ema(ema_model: nn.Module, model: nn.Module, decay: float, updates: int) -> None:
    """One EMA update after `updates` earlier ones; the decay ramps up, so that initial weights are forgotten."""
    decay = min(decay, 1 - (1 + updates) ** (-2 / 3))
    with torch.no_grad():
        torch._foreach_lerp_(list(ema_model.parameters()), list(model.parameters()), 1 - decay)
        for averaged, current in zip(ema_model.buffers(), model.buffers(), strict=True):
            averaged.copy_(current)
