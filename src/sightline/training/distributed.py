"""Device, precision, determinism, and communication between training processes."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from ..errors import UserError
from ..vit.model import Block


def make_accelerator(device: str = "auto", precision: str = "fp32") -> Accelerator:
    """For a device (`auto`, `cpu`, `cuda`) and a precision (`auto`, `fp32`, `bf16`). Replaces the accelerator made
    before."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU that PyTorch can use; choose --device cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # Accelerate keeps the first settings of a Python process for all later ones.
        AcceleratorState._reset_state(reset_partial_state=True)
    elif torch.distributed.is_available():
        # If the first wrapped model imported it, the default arguments of its functions would keep the process group
        # alive; the group's threads would then outlive Python and occasionally abort.
        import_module("torch.distributed.nn.functional")
    if precision == "auto":
        precision = "bf16" if device != "cpu" and computes_in_bf16() else "fp32"
    return Accelerator(cpu=device == "cpu", mixed_precision="bf16" if precision == "bf16" else "no")


def computes_in_bf16() -> bool:
    """Whether there is a GPU that computes in bf16 itself, instead of converting to fp32 and back."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def deterministic(wanted: bool) -> Generator[None]:
    """Deterministic kernels, also on a GPU; afterwards torch's setting is restored."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def process_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(sums: Tensor) -> Tensor:
    if process_count() > 1:
        dist.all_reduce(sums)
    return sums


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes; each must have equally many, which `pretrain` ensures."""
    if process_count() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(process_count())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


# ---- FSDP: parameters, gradients and optimiser state divided among the processes -------------------------------------


def shard_parameters(model: nn.Module, accelerator: Accelerator) -> None:
    """Divide the model among all processes, in place: a block is whole only while it computes. Its parameters become
    DTensors, so make the optimiser afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    forward = model.forward

    def in_precision(*arguments: object) -> object:  # what accelerate does to a model that it wraps
        with accelerator.autocast():
            return forward(*arguments)

    model.forward = in_precision
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it would be on one process. All processes must call this, in the same order."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The share of a whole tensor that belongs to this process's share of a parameter of that shape."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements)  # ty: ignore[missing-attribute]
