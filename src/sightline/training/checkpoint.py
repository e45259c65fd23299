"""Checkpoints without pickle: tensors in safetensors, the rest as JSON in its header, replaced atomically."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..console.files import FREE_SPACE
from ..errors import UserError
from ..vit.checksums import check_content, save_with_checksum
from .distributed import like_parameter, whole

MIN_SECONDS = 20.0  # between checkpoints of finished epochs


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], remedy: str = FREE_SPACE) -> None:
    """At any moment either the old or the new file exists, also if the power fails in between."""
    on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    save_with_checksum(path, on_cpu, {"facts": json.dumps(facts)}, remedy=remedy)


def load_tensors(path: Path, *, checksum: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts. With `checksum`, the file is known to have been written with one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        check_content(path, tensors, metadata, "restore it, or train again", required=checksum)
        return tensors, json.loads(metadata.get("facts", "{}"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the run has no checkpoint, train it again") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged checkpoint ({error}); restore it, or train again") from error


def load_cached(path: Path) -> dict[str, Tensor] | None:
    """Tensors from a cache; None if they are not there, or, with a line about it, damaged."""
    if not path.exists():
        return None
    try:
        return load_tensors(path, checksum=True)[0]
    except UserError:
        print(f"sightline: {path}: damaged; it is computed again", file=sys.stderr)
        return None


# ---- the training state ----------------------------------------------------------------------------------------------


def pack(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None, *, keep: bool = True
) -> dict[str, Tensor]:
    """The tensors of the training state: weights, EMA weights (stored as `average.`) and optimiser state.

    With FSDP all processes must call this, those that do not save with keep=False: each tensor is put together, and
    goes to the CPU of the one that saves before the next. The file is the same as without FSDP."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if ema is not None:
        found |= {f"average.{name}": tensor for name, tensor in ema.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    tensors = {}
    for name, tensor in found.items():
        full = whole(tensor)
        if keep:
            tensors[name] = tensor if full is tensor else full.cpu()
    return tensors


def unpack_weights(tensors: Mapping[str, Tensor], model: nn.Module, ema: nn.Module | None) -> None:
    model.load_state_dict(with_prefix("model.", tensors))
    if ema is not None:
        ema.load_state_dict(with_prefix("average.", tensors))


def unpack_optimizer(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in with_prefix("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = like_parameter(tensor, parameters[int(index)])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class CheckpointTimer:
    """Decides when to save: at a fixed interval within an epoch, and after each epoch, but not within MIN_SECONDS of
    the previous checkpoint, because short epochs would otherwise spend their time on saving.

    All processes decide in the same step, by the clock of the main process. With several processes the clock is only
    read in steps known to all of them beforehand, because reading it synchronises them."""

    def __init__(self, minutes: float, accelerator: Accelerator):
        self.seconds, self.accelerator = 60 * minutes, accelerator
        self.restart()

    def restart(self) -> None:
        self.began, self.limit, self.steps, self.next = time.monotonic(), self.seconds, 0, 1

    def due(self) -> bool:
        """Whether to save after this step."""
        self.steps += 1
        return (self.steps >= self.next or self.accelerator.num_processes == 1) and self.is_late()

    def due_after_epoch(self) -> bool:
        """Whether to save after this epoch; if not, it is saved in the first step after MIN_SECONDS."""
        self.limit = min(MIN_SECONDS, self.seconds)
        return self.is_late()

    def is_late(self) -> bool:
        passed = time.monotonic() - self.began
        if self.accelerator.num_processes > 1:
            (passed,) = broadcast_object_list([passed])
        if passed >= self.limit:
            self.restart()
            return True
        needed = math.ceil(self.steps * self.limit / max(passed, 1e-6))
        self.next = max(self.steps + 1, min(2 * self.steps, needed))
        return False
