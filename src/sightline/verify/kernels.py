"""Which attention kernels a computation runs: what PyTorch dispatches its scaled dot-product attention to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PREFIX = "_scaled_dot_product_"
NAMES = {
    "flash_attention": "flash",
    "flash_attention_for_cpu": "flash (CPU)",
    "efficient_attention": "mem_efficient",
    "cudnn_attention": "cudnn",
    "varlen": "flash (variable length)",
}


class _Calls(TorchFunctionMode):
    """Counts the attention that a model asks for."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **kwargs or {})


class _Kernels(TorchDispatchMode):
    """The fused kernels that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []
        self.packed: set[str] = set()  # where sequences are packed, kernels are called by themselves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(PREFIX):
            self.used.append(name.removeprefix(PREFIX))
        elif name == "_varlen_attn":
            self.packed.add("varlen")
        return func(*args, **kwargs or {})


def attention_kernels(run: Callable[[], object]) -> list[str]:
    """The kernels of scaled dot-product attention that `run` used; `math` is attention without a fused kernel. [] if it
    computes attention in another way."""
    with torch.no_grad(), _Calls() as asked, _Kernels() as kernels:
        run()
    found = {NAMES.get(name, name) for name in {*kernels.used, *kernels.packed}}
    return sorted(found | {"math"} if asked.count > len(kernels.used) else found)
