"""Weights files that cannot be what they claim: refused before anything is built or unpacked.

A file from a stranger can be small and promise anything: an architecture of a million blocks, tensors that repeat one
number a billion times, archive members that unpack to gigabytes, or containers that contain themselves.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .config import ViTConfig

CONTAINERS = ("teacher", "state_dict", "model", "model_state", "module")  # keys under which .pth files hold the tensors
DEEPEST = 8  # containers within containers
SLACK = 1_000_000  # elements that need not be in the file: a new head, or position embeddings of another size


def parameter_count(config: ViTConfig) -> int:
    """About as many as the ViT has: its blocks, embeddings and head."""
    hidden = config.hidden or 4 * config.width
    block = 4 * config.width**2 + (3 if config.mlp == "swiglu" else 2) * config.width * hidden
    learned = 0 if config.positions == "rotary" else math.prod(config.grid)
    tokens = 1 + config.registers + learned + 3 * config.patch**2 + config.classes
    return config.depth * block + config.width * tokens


def check_plausible(config: ViTConfig, elements: int, path: Path | str) -> None:
    """The architecture must fit into a file with so many numbers."""
    needed = parameter_count(config)
    if needed > 2 * elements + SLACK:
        shape = f"width {config.width:,}, {config.depth:,} blocks"
        raise UserError(f"{path}: does not fit: {shape} need {needed:,} numbers, and the file has {elements:,}")


def elements_of(shapes: Iterable[Iterable[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def check_archive(path: Path) -> None:
    """PyTorch stores the members of its archives uncompressed; others could unpack to anything."""
    if not zipfile.is_zipfile(path):
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(f"{path}: a damaged archive ({error}); download it again") from None
    with archive:
        packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
        promised = sum(member.file_size for member in archive.infolist())
    if packed or promised > path.stat().st_size:
        raise UserError(f"{path}: not a file of PyTorch (it unpacks to {promised >> 20:,} MiB); download it again")


def state_dict_of(content: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of what was in a .pth file, out of the containers around them."""
    for _ in range(DEEPEST):
        inside = [content[name] for name in CONTAINERS if isinstance(content, Mapping) and name in content]
        inside = [each for each in inside if isinstance(each, Mapping)]
        if not inside:
            break
        content = inside[0]
    else:
        raise UserError(f"{path}: more than {DEEPEST} containers within each other; save its state dict as safetensors")
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: contains a {type(content).__name__}, not a state dict")
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(name[:40] for name in list(named)[:8])
        raise UserError(f"{path}: contains no tensors" + (f", only {keys}" if keys else ""))
    check_own_storage(tensors, path)
    return tensors


def check_own_storage(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A tensor may be a view that repeats a few numbers; each must have its own."""
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if tensor.layout is not torch.strided or size > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {name[:60]} {list(tensor.shape)} is not stored in full; save it as safetensors")
