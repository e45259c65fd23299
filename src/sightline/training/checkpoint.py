"""Checkpoints without pickle: tensors in safetensors, the rest as JSON in its header, replaced in one step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..console.files import replace_durably
from ..errors import UserError

SOON = 20.0  # seconds of work that are not worth a save


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Either the old file or the new one is there, at any moment: also when the power fails half-way."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    replace_durably(path, lambda partial: save_file(whole, str(partial), metadata={"facts": json.dumps(facts)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get("facts", "{}"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: a damaged checkpoint ({error}); restore it, or start the run anew") from error


# ---- the state of training -------------------------------------------------------------------------------------------


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    """Everything that training changes, under names that say whose it is."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return tensors


def unpack(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> None:
    model.load_state_dict(under("model.", tensors))
    if average is not None:
        average.load_state_dict(under("average.", tensors))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in under("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Clock:
    """When to save: so often within an epoch, and after it; but epochs of few pictures would do little else, so that a
    finished one may wait until SOON after the save before. All processes say so in the same step, by the main one's
    clock. Several ask it now and then only, in steps that all know beforehand: to ask is to wait for each other.
    """

    def __init__(self, minutes: float, accelerator: Accelerator):
        self.seconds, self.accelerator = 60 * minutes, accelerator
        self.start()

    def start(self) -> None:
        self.began, self.limit, self.steps, self.next = time.monotonic(), self.seconds, 0, 1

    def due(self) -> bool:
        """After a step."""
        self.steps += 1
        return (self.steps >= self.next or self.accelerator.num_processes == 1) and self.is_late()

    def due_after_epoch(self) -> bool:
        """If not, it is in the first step in which the finished epoch has waited long enough."""
        self.limit = min(SOON, self.seconds)
        return self.is_late()

    def is_late(self) -> bool:
        passed = time.monotonic() - self.began
        if self.accelerator.num_processes > 1:
            (passed,) = broadcast_object_list([passed])
        if passed >= self.limit:
            self.start()
            return True
        needed = math.ceil(self.steps * self.limit / max(passed, 1e-6))
        self.next = max(self.steps + 1, min(2 * self.steps, needed))
        return False
