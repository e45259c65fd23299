"""Free memory: of a GPU, or of this computer within the limit of the container."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes(folder: Path = CGROUP) -> float:
    """What the container may still take; infinite if it has no limit, or if there is none."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return math.inf if limit == "max" else int(limit) - int(used)
    except (OSError, ValueError):
        return math.inf
