"""What several processes that train together know of each other; one alone knows all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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
