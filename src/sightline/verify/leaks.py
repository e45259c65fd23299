"""The leak finder: do hidden pixels reach the output of a model, and in which module do they enter?

For any `nn.Module` that takes images. It redraws the hidden pixels, compares the output bit by bit, and names the first
module in which something that must not depend on them (a kept token, a kept cell of a feature map) changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..console.files import write
from ..errors import UserError
from ..sight import Sight
from .perturbations import NOT_NUMBERS, fill, images_changed, noise_like, redraws

MOST_PREFIX_TOKENS = 16  # a sequence longer than the patch grid by up to this is read as prefix tokens + patches
TRACED_IMAGES = 2  # a trace holds the inputs and outputs of every submodule, so only few images fit


@dataclass(frozen=True)
class Leak:
    """Whether hidden pixels reach the output of a model, by how much, and where they enter."""

    leaks: bool
    images: int
    trials: int  # redraws of images that hide something
    changed: int  # trials in which the output was not bit-identical
    largest_change: float  # of any output value, over the redraws with finite pixels
    relative_change: float | None  # divided by the standard deviation of the output; None where that is 0
    module: str | None  # the first module in which a kept value changes
    kind: str | None  # its class
    what: str | None  # what changes there

    @property
    def sentence(self) -> str:
        tried = f"{self.trials:,} redraws of the hidden pixels of {self.images} image{'s' * (self.images != 1)}"
        if not self.leaks:
            return f"No leak found: {tried} changed no bit of the output; redrawing visible pixels did."
        place = f" They enter at {self.module} ({self.kind}): {self.what}." if self.module else ""
        spread = "" if self.relative_change is None else f" ({self.relative_change:.2g} standard deviations)"
        by = f"by up to {self.largest_change:.3g}{spread}"
        if not self.largest_change:
            by = "but only where hidden pixels were NaN or infinite"
        return f"Leak found: {tried} changed the output {self.changed:,} times, {by}.{place}"

    def to_dict(self) -> dict[str, Any]:
        return {"sentence": self.sentence} | asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        write(Path(path), self.to_json() + "\n")


@torch.no_grad()
def find_leak(
    module: nn.Module,
    images: Tensor,
    sight: Sight,
    *,
    call: Callable[[Tensor], Any] | None = None,
    draws: int = 3,
    seed: int = 0,
) -> Leak:
    """Redraw the pixels of `images` [B, 3, h, w] that `sight` hides and check whether the output of `module` changes.

    `call(images)` runs the module where `module(images)` does not suffice, for instance to pass a mask as well. The
    sight's `keep` defines the kept tokens.
    """
    if sight.keep is None:
        raise ValueError("the leak finder needs a sight with a `keep` grid, for example from Sight.of_pixels")
    call = call or module
    visible = sight.visible(images.shape[-2:])
    generator = torch.Generator().manual_seed(seed)
    before = model_outputs(call, images)
    check_informative(module, call, images, visible, before, generator)

    first, trials, count, largest = None, 0, 0, 0.0
    for kind, redrawn in redraws(images, ~visible, draws, generator):
        after = model_outputs(call, redrawn)
        tried = images_changed(images, redrawn)
        differs = torch.stack([images_that_differ(a, b) for a, b in zip(before, after, strict=True)]).any(dim=0)
        trials, count = trials + int(tried.sum()), count + int((differs & tried).sum())
        if kind not in NOT_NUMBERS:
            gaps = [(a.double() - b.double()).abs().max().item() for a, b in zip(before, after, strict=True)]
            largest = max([largest, *(gap for gap in gaps if math.isfinite(gap))])
        if first is None and differs.any():
            leaking = differs.nonzero()[:, 0].to(images.device)
            traced = leaking[torch.arange(TRACED_IMAGES, device=leaking.device) % len(leaking)]
            first = locate_leak(module, call, images, redrawn, sight.keep, visible, traced)
    spread = torch.cat([t.double().flatten() for t in before]).std().item()
    return Leak(
        leaks=count > 0,
        images=len(images),
        trials=trials,
        changed=count,
        largest_change=largest,
        relative_change=largest / spread if spread > 0 else None,
        module=first[0].module if first else None,
        kind=first[0].kind if first else None,
        what=first[1] if first else None,
    )


def check_informative(module, call, images: Tensor, visible: Tensor, before: list[Tensor], generator) -> None:
    """Raise if "no leak found" would be trivially true, or the model is not deterministic."""
    name = type(module).__name__
    if bool(visible.all()):
        raise UserError("the sight hides nothing, so no leak could be found: hide some patches")
    if not all(bool(t.isfinite().all()) for t in before):
        raise UserError(
            f"the output of {name} is not finite even before pixels are redrawn: check its weights and input"
        )
    if any(bool(images_that_differ(a, b).any()) for a, b in zip(before, model_outputs(call, images), strict=True)):
        raise UserError(f"{name} is not deterministic on the same images: call .eval() and fix its seeds")
    redrawn = fill(images, visible, images + noise_like(images, generator))
    if visible.any() and not any(
        images_that_differ(a, b).any() for a, b in zip(before, model_outputs(call, redrawn), strict=True)
    ):
        raise UserError(f"the output of {name} does not depend on visible pixels either, so the test shows nothing")


def model_outputs(call: Callable[[Tensor], Any], images: Tensor) -> list[Tensor]:
    """The floating-point outputs of the model that have a row per image."""
    tensors = [t for t in float_tensors(call(images)) if t.ndim and len(t) == len(images)]
    if not tensors:
        raise UserError("the model returns no floating-point tensor with a row for each image")
    return tensors


# ---- where hidden pixels enter ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceEntry:
    """The inputs or outputs of one module during a forward pass."""

    module: str  # that computed the tensors: the module itself or, for its inputs, the module that called it
    kind: str
    before: str | None  # for inputs: the submodule that received them
    tensors: list[Tensor]


def locate_leak(module, call, images: Tensor, redrawn: Tensor, keep: Tensor, visible: Tensor, traced: Tensor):
    """The first entry of the trace in which a kept value changes, in the `traced` images, and what changes there."""
    others = torch.ones(len(images), dtype=torch.bool, device=images.device)
    others[traced] = False
    mixed = torch.where(others[:, None, None, None], images, redrawn)
    before, after = trace(module, call, images, traced), trace(module, call, mixed, traced)
    for entry, redrawn_entry in zip(before, after, strict=True):
        for a, b in zip(entry.tensors, redrawn_entry.tensors, strict=True):
            name, cells = kept_values(a, keep[traced], visible[traced])
            if cells is not None and bool((bits_differ(a, b) & cells).any()):
                return entry, f"{name} changes" + (f" before its {entry.before}" if entry.before else "")
    return None


def trace(module: nn.Module, call: Callable[[Tensor], Any], images: Tensor, traced: Tensor) -> list[TraceEntry]:
    """One forward pass: the inputs and outputs of every submodule for the `traced` images, in time; the output last."""
    entries: list[TraceEntry] = []
    running = [("the model itself", type(module).__name__)]

    def select(content: Any) -> list[Tensor]:
        return [t[traced].clone() for t in float_tensors(content) if t.ndim and len(t) == len(images)]

    def enter(name: str) -> Callable:
        def record_inputs(m: nn.Module, args: tuple, kwargs: dict) -> None:
            entries.append(TraceEntry(*running[-1], name.rpartition(".")[2], select([args, kwargs])))
            running.append((name, type(m).__name__))

        return record_inputs

    def leave(_m: nn.Module, _args: tuple, out: Any) -> None:
        entries.append(TraceEntry(*running.pop(), None, select(out)))

    hooks = []
    for name, m in module.named_modules():
        if name:
            hooks.append(m.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(m.register_forward_hook(leave))
    try:
        tensors = select(call(images))
    finally:
        for hook in hooks:
            hook.remove()
    return [*entries, TraceEntry(*running[0], None, tensors)]


def float_tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a module returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from float_tensors(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from float_tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from float_tensors(vars(output))


def kept_values(x: Tensor, keep: Tensor, visible: Tensor) -> tuple[str, Tensor | None]:
    """The values of `x` that must not change, in words and as a mask of its shape; None where its layout is unknown."""
    B, h, w = visible.shape
    patches = keep.flatten(1)
    if x.ndim == 4 and h % x.shape[2] == 0 and w % x.shape[3] == 0 and h // x.shape[2] == w // x.shape[3]:
        cell = h // x.shape[2]
        whole = visible.unflatten(2, (-1, cell)).unflatten(1, (-1, cell)).all(dim=4).all(dim=2)
        return "a kept cell of the feature map", whole[:, None].expand_as(x)
    for axis in range(1, x.ndim):
        prefix = x.shape[axis] - patches.shape[1]
        if prefix == 0 or (x.ndim > 2 and 0 < prefix <= MOST_PREFIX_TOKENS):
            tokens = torch.cat([patches.new_ones(B, prefix), patches], dim=1)
            rows = tokens.view(B, *(1,) * (axis - 1), -1, *(1,) * (x.ndim - 1 - axis))
            if axis == x.ndim - 2 and x.shape[-1] == x.shape[axis]:  # attention between tokens: kept to kept
                rows = rows & tokens.view(B, *(1,) * (x.ndim - 2), -1)
            return "a kept token", rows.expand_as(x)
    if x.ndim <= 2:
        return "the pooled feature vector", torch.ones_like(x, dtype=torch.bool)
    return "", None


def bits_differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ in any bit; a NaN equals the same NaN."""
    if a.shape != b.shape:
        raise UserError(f"shapes inside the model depend on hidden pixels: {list(a.shape)} became {list(b.shape)}")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(bits) != b.contiguous().view(bits)


def images_that_differ(a: Tensor, b: Tensor) -> Tensor:
    """bool [B], on the CPU: the images for which any bit differs."""
    return bits_differ(a, b).reshape(len(a), -1).any(dim=1).cpu()
