"""What several processes that train together know of each other; one alone knows all."""

from __future__ import annotations

import os
from importlib import import_module

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from ..errors import UserError


def make_accelerator(device: str = "auto", precision: str = "fp32") -> Accelerator:
    """Where to compute: `auto`, `cpu` or `cuda`; and how exactly: `fp32` or `bf16`. Ends the one made before."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no GPU that torch can use")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # Accelerate keeps the first settings of a Python process for all later ones.
        AcceleratorState._reset_state(reset_partial_state=True)
    elif torch.distributed.is_available():
        # Imported later, by the first model that is wrapped, its functions' defaults would hold the group of processes
        # for good; then the group's threads outlive Python, and now and then abort.
        import_module("torch.distributed.nn.functional")
    return Accelerator(cpu=device == "cpu", mixed_precision="bf16" if precision == "bf16" else "no")


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def over_processes(sums: Tensor) -> Tensor:
    if processes() > 1:
        dist.all_reduce(sums)
    return sums


def from_all_processes(rows: Tensor) -> Tensor:
    """Each process has as many rows as the others: `pretrain` sees to that."""
    if processes() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(processes())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)
