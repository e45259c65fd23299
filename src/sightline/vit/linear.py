"""Linear layers, by oneDNN where PyTorch would call a slower library.

In float32 on a CPU, PyTorch multiplies matrices with MKL, which uses AVX-512 on processors by Intel only. oneDNN, which
comes with PyTorch too, uses it on others as well, and takes half the time there. Both compute in full precision and
give the same result up to rounding.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN = Tensor, nn.Parameter  # not divided among processes, not traced


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`: [..., K], [N, K] and [N] -> [..., N]."""
    if torch.compiler.is_compiling() or not multiplies_faster(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return multiply(x, weight, bias)


def multiplies_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can multiply these, and is faster here."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and x.numel() > 0  # of nothing, oneDNN computes no gradient
        and mkl_lacks_avx512()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
    )


@cache
def mkl_lacks_avx512() -> bool:
    """Whether the processor has AVX-512, but is not Intel's; with PyTorch built with both libraries."""
    built = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    usable = built and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return usable and torch.backends.cpu.get_cpu_capability() == "AVX512" and "GenuineIntel" not in processor()


def processor() -> str:
    """What the system says of its processors, the name of their maker included."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN would ignore its stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def counted_operations() -> dict[Any, Callable[..., int]]:
    """oneDNN's product, which PyTorch's counter of floating-point operations does not know."""

    def operations(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    return {torch.ops.mkldnn._linear_pointwise: operations} if mkl_lacks_avx512() else {}


class _Linear(torch.autograd.Function):
    """With a gradient, which has one itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            linear(gradient, weight.t()) if to_x else None,
            linear(x.flatten(0, -2).t(), rows.t()).t() if to_weight else None,
            rows.sum(dim=0) if to_bias else None,
        )
