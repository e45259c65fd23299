"""What a set of weights is, in one number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def weights_sha256(module: nn.Module, *, without: tuple[str, ...] = ()) -> str:
    """Over every parameter and buffer, stored in files or not: name, type, shape and content."""
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        if not name.startswith(without or ("\0",)):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
