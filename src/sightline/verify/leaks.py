"""The leak finder: does what a model should not see reach its output, and where does it get in?

For anybody's `nn.Module` that takes images. It redraws the hidden pixels, compares the output, and names the first
module in which something that should be untouched (a kept token, a kept cell of a feature map) changes.
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

from ..errors import UserError
from ..sight import Sight
from .perturbations import NOT_NUMBERS, fill, noise_like, redraws, touched

MOST_PREFIX_TOKENS = 16  # a sequence up to this much longer than the patch grid is taken as prefix tokens + patches
TRACED = 2  # images: a trace holds what every submodule was given and gave out


@dataclass(frozen=True)
class Leak:
    """Whether hidden pixels reach the output of a model, by how much, and where they get in."""

    leaks: bool
    images: int
    trials: int  # redraws of images that had something to hide
    changed: int  # trials in which the output was not bit-identical
    largest_change: float  # of any number in the output, over the redraws with finite pixels
    relative_change: float | None  # the same, over the standard deviation of the output; None where that is 0
    module: str | None  # the first module in which something kept changes
    kind: str | None  # its class
    what: str | None  # what changes there

    @property
    def sentence(self) -> str:
        tried = f"{self.trials:,} redraws of the hidden pixels of {self.images} image{'s' * (self.images != 1)}"
        if not self.leaks:
            return f"No leak found: {tried} changed no bit of the output; redrawing visible ones did."
        place = f" They get in at {self.module} ({self.kind}): {self.what}." if self.module else ""
        spread = "" if self.relative_change is None else f" ({self.relative_change:.2g} standard deviations)"
        by = f"by up to {self.largest_change:.3g}{spread}"
        if not self.largest_change:
            by = "but only where hidden pixels were NaN or infinite"
        return f"Leaks: {tried} changed the output {self.changed:,} times, {by}.{place}"

    def to_dict(self) -> dict[str, Any]:
        return {"sentence": self.sentence} | asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


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
    """Redraw what `sight` hides of `images` [B, 3, h, w] and see whether `module` notices.

    `call(images)` runs the module where `module(images)` is not the way, for instance to hand it the mask as well.
    The sight's `keep` says which tokens count as kept.
    """
    if sight.keep is None:
        raise ValueError("the leak finder follows tokens: give the sight a `keep` grid, e.g. with Sight.of_pixels")
    call = call or module
    visible = sight.visible(images.shape[-2:])
    generator = torch.Generator().manual_seed(seed)
    before = outputs(call, images)
    check_what_shows_nothing(module, call, images, visible, before, generator)

    first, trials, count, largest = None, 0, 0, 0.0
    for kind, redrawn in redraws(images, ~visible, draws, generator):
        after = outputs(call, redrawn)
        tried = touched(images, redrawn)
        differs = torch.stack([rows_that_differ(a, b) for a, b in zip(before, after, strict=True)]).any(dim=0)
        trials, count = trials + int(tried.sum()), count + int((differs & tried).sum())
        if kind not in NOT_NUMBERS:
            gaps = [(a.double() - b.double()).abs().max().item() for a, b in zip(before, after, strict=True)]
            largest = max([largest, *(gap for gap in gaps if math.isfinite(gap))])
        if first is None and differs.any():
            at = differs.nonzero()[:, 0].to(images.device)
            some = at[torch.arange(max(TRACED, 1), device=at.device) % len(at)][:TRACED]
            first = first_change(module, call, images, redrawn, sight.keep, visible, some)
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


def check_what_shows_nothing(module, call, images: Tensor, visible: Tensor, before: list[Tensor], generator) -> None:
    """An all-clear must mean something."""
    name = type(module).__name__
    if bool(visible.all()):
        raise UserError("the sight hides nothing, so there is nothing to find: hide something")
    if not all(bool(t.isfinite().all()) for t in before):
        raise UserError(f"{name} answers with numbers that are not finite, before anything was redrawn")
    if any(bool(rows_that_differ(a, b).any()) for a, b in zip(before, outputs(call, images), strict=True)):
        raise UserError(f"{name} answers the same images differently each time: call .eval() and fix its seeds")
    redrawn = fill(images, visible, images + noise_like(images, generator))
    if visible.any() and not any(
        rows_that_differ(a, b).any() for a, b in zip(before, outputs(call, redrawn), strict=True)
    ):
        raise UserError(f"{name} does not notice visible pixels either, so that it misses hidden ones means nothing")


def outputs(call: Callable[[Tensor], Any], images: Tensor) -> list[Tensor]:
    """What the model gives out, image by image."""
    found = [t for t in floats(call(images)) if t.ndim and len(t) == len(images)]
    if not found:
        raise UserError("the model gives out no floating-point tensor with a row for each image")
    return found


# ---- the place -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one module was given, or gave out, during a pass."""

    module: str  # where this was computed: the module itself, or for what it was given, the one that called it
    kind: str
    before: str | None  # the submodule that was given it
    tensors: list[Tensor]


def first_change(module, call, images: Tensor, redrawn: Tensor, keep: Tensor, visible: Tensor, some: Tensor):
    """The first step in time at which something kept is not the same, in a few images that show it."""
    others = torch.ones(len(images), dtype=torch.bool, device=images.device)
    others[some] = False
    mixed = torch.where(others[:, None, None, None], images, redrawn)
    before, after = trace(module, call, images, some), trace(module, call, mixed, some)
    for one, two in zip(before, after, strict=True):
        for a, b in zip(one.tensors, two.tensors, strict=True):
            name, cells = kept(a, keep[some], visible[some])
            if cells is not None and bool((changed(a, b) & cells).any()):
                return one, f"{name} changes" + (f" on the way to its {one.before}" if one.before else "")
    return None


def trace(module: nn.Module, call: Callable[[Tensor], Any], images: Tensor, some: Tensor) -> list[Step]:
    """Run once and note what every submodule was given and gave out for `some` images, in time; the output last."""
    steps: list[Step] = []
    running = [("the model itself", type(module).__name__)]

    def of_some(content: Any) -> list[Tensor]:
        return [t[some].clone() for t in floats(content) if t.ndim and len(t) == len(images)]

    def enter(name: str) -> Callable:
        def note(m: nn.Module, args: tuple, kwargs: dict) -> None:
            steps.append(Step(*running[-1], name.rpartition(".")[2], of_some([args, kwargs])))
            running.append((name, type(m).__name__))

        return note

    def leave(_m: nn.Module, _args: tuple, out: Any) -> None:
        steps.append(Step(*running.pop(), None, of_some(out)))

    hooks = []
    for name, m in module.named_modules():
        if name:
            hooks.append(m.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(m.register_forward_hook(leave))
    try:
        tensors = of_some(call(images))
    finally:
        for hook in hooks:
            hook.remove()
    return [*steps, Step(*running[0], None, tensors)]


def floats(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a module gives out."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from floats(value)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from floats(vars(output))


def kept(x: Tensor, keep: Tensor, visible: Tensor) -> tuple[str, Tensor | None]:
    """What in `x` must not change, in words and as a mask that broadcasts over it; None where its layout is unknown."""
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


def changed(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ in any bit; NaN is equal to the same NaN."""
    if a.shape != b.shape:
        raise UserError(f"the model's shapes depend on hidden pixels: {list(a.shape)} became {list(b.shape)}")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(bits) != b.contiguous().view(bits)


def rows_that_differ(a: Tensor, b: Tensor) -> Tensor:
    """bool [B], on the CPU."""
    return changed(a, b).reshape(len(a), -1).any(dim=1).cpu()
