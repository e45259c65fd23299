"""The proof that nothing outside the sight reaches the prediction, on the running model.

`verify` redraws the hidden pixels many times and in many ways, with the sight held fixed, and compares the logits and
the kept tokens bit by bit. It is a proof by trial under the conditions stated in the certificate, not for all inputs;
but hiding is structural, so a single changed bit is a bug. It also measures, without proving anything, how often the
sight and the prediction change end to end, since the selector does see the whole image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import __version__
from ..config import Verify
from ..console.files import prepare_output, write
from ..console.terminal import counted, present
from ..errors import UserError
from ..metrics.intervals import wilson
from ..sight import Judge, Method, Prediction, Sight, cells_to_pixels
from ..vit.model import ViT, ViTOutput
from ..vit.weights import weights_sha256
from .kernels import attention_kernels
from .leaks import Leak, find_leak, images_that_differ
from .perturbations import NOT_NUMBERS, fill, images_changed, noise_like, plausible_redraws, redraws

ASCENT = "gradient ascent"


@dataclass
class RedrawResult:
    """The results of one kind of redraw of hidden pixels. A trial is one redraw of one image."""

    level: Literal["patches", "pixels"]
    kind: str
    trials: int = 0
    changed: int = 0
    largest_change: float | None = 0.0  # None for NaN and infinities, which have no distance


@dataclass(frozen=True)
class Certificate:
    verdict: Literal["blind", "leaks", "refused"]
    sentence: str
    images: int
    tried: list[RedrawResult]
    largest_gradient: float | None  # of the logits with respect to a hidden pixel; None: the method has no gradient
    control: dict[str, int]  # the same with *visible* pixels, which must make a difference
    end_to_end: dict[str, Any] | None  # measured, not proved; None if the sight was given
    leak: dict[str, Any] | None  # where hidden pixels enter, if they do
    conditions: dict[str, Any]
    model: dict[str, Any]

    @property
    def trials(self) -> int:
        return sum(t.trials for t in self.tried)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        write(Path(path), self.to_json() + "\n")


def verify(
    method: Judge,
    images: Tensor,
    sight: Sight | None = None,
    *,
    draws: int = 5,
    ascent_steps: int = 5,
    batch: int = 16,
    seed: int = 0,
) -> Certificate:
    """Prove on `images` [n, 3, h, w] that `method` is blind outside its own sight, or outside the given `sight`."""
    if sight is None and not isinstance(method, Method):
        raise ValueError(f"{type(method).__name__} has no `look`: give verify the sight")
    proof = Proof(method, draws, ascent_steps, torch.Generator().manual_seed(seed))
    with evaluation_mode(method):
        for start in range(0, len(images), batch):
            chunk = images[start : start + batch]
            with torch.no_grad():
                if sight is not None:
                    proof.add(chunk, sight[start : start + batch].to(chunk.device))
                elif isinstance(method, Method):
                    own_sight = method.look(chunk)
                    proof.add(chunk, own_sight)
                    proof.add_end_to_end(method, chunk, own_sight)
        return proof.certificate(images)


class Proof:
    """Collects trials over batches of images."""

    def __init__(self, method: Judge, draws: int, ascent_steps: int, generator: torch.Generator):
        self.method, self.draws, self.ascent_steps, self.generator = method, draws, ascent_steps, generator
        self.images, self.coverage = 0, 0.0
        self.batch_shapes: set[tuple[int, ...]] = set()
        self.kernels: set[str] = set()
        self.predictions_in: set[str] = set()
        self.tried: dict[tuple[str, str], RedrawResult] = {}
        self.largest_gradient: float | None = None
        self.control = {"trials": 0, "changed": 0}
        self.end_to_end: dict[str, dict[str, Any]] = {}
        self.hiding: set[str] = set()
        self.paths: set[str] = set()
        self.refusals: list[str] = []
        self.leak: Leak | None = None
        self.compared = "logits"

    def add(self, images: Tensor, sight: Sight) -> None:
        visible = sight.visible(images.shape[-2:])
        before = self.judge(images, sight)
        self.images += len(images)
        self.coverage += sight.coverage(images.shape[-2:]).sum().item()
        if tuple(images.shape) not in self.batch_shapes:
            self.kernels.update(attention_kernels(lambda: self.method.judge(images, sight)))
        self.batch_shapes.add(tuple(images.shape))
        self.predictions_in.add(dtype_name(before.logits.dtype))
        self.compared = "logits" if before.tokens is None else "logits and kept tokens"
        if not before.logits.isfinite().all():
            self.refusals.append("the logits are not finite")
        if compare_predictions(before, self.judge(images, sight))[0].any():
            self.refusals.append("the model is not deterministic on the same images")
        leaked = False
        for level, hidden in hidden_levels(sight, visible):
            for kind, redrawn in self.redraws(images, hidden, sight):
                leaked |= self.record(level, kind, before, self.judge(redrawn, sight), images_changed(images, redrawn))
        if leaked and self.leak is None and not self.refusals:
            self.leak = self.find_leak(images, sight)
        self.add_control(images, visible, before, sight)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        with record_hiding(self.method, self.hiding, self.paths):
            return self.method.judge(images, sight)

    def redraws(self, images: Tensor, hidden: Tensor, sight: Sight) -> Iterator[tuple[str, Tensor]]:
        yield from redraws(images, hidden, self.draws, self.generator)
        yield from ((ASCENT, x) for x in self.ascend(images, hidden, sight))

    def ascend(self, images: Tensor, hidden: Tensor, sight: Sight) -> Iterator[Tensor]:
        """Hidden pixels moved by gradient ascent to change the output most, if they could; none without a gradient."""
        x = fill(images, hidden, images + 0.1 * noise_like(images, self.generator))
        directions: list[Tensor] = []
        for _ in range(self.ascent_steps):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                prediction = self.method.judge(x, sight)
                outputs = [t for t in (prediction.logits, prediction.tokens) if t is not None and t.requires_grad]
                if not outputs:
                    return
                directions = directions or [noise_like(t, self.generator) / t[0].numel() ** 0.5 for t in outputs]
                goal = torch.stack([(t * d).float().sum() for t, d in zip(outputs, directions, strict=True)]).sum()
                (gradient,) = torch.autograd.grad(goal, x, allow_unused=True)
            gradient = torch.zeros_like(x) if gradient is None else gradient
            at_hidden = gradient.masked_select(hidden[:, None].expand_as(gradient)).abs()
            if not at_hidden.isfinite().all():
                self.refusals.append("the gradient at hidden pixels is not finite")
            elif len(at_hidden):
                self.largest_gradient = max(self.largest_gradient or 0.0, at_hidden.max().item())
            random_signs = noise_like(images, self.generator).sign()
            x = fill(images, hidden, x.detach() + 0.1 * torch.where(gradient == 0, random_signs, gradient.sign()))
            yield x

    def record(self, level, kind: str, before: Prediction, after: Prediction, tried: Tensor) -> bool:
        """Count a redraw for the images that it really changed; whether it changed any output."""
        row = self.tried.setdefault((level, kind), RedrawResult(level, kind))
        differs, by = compare_predictions(before, after)
        row.trials += int(tried.sum())
        row.changed += int((differs & tried).sum())
        row.largest_change = None if kind in NOT_NUMBERS else max(row.largest_change or 0.0, by)
        return bool((differs & tried).any())

    def find_leak(self, images: Tensor, sight: Sight) -> Leak | None:
        """Where hidden pixels enter; None where that cannot be located."""
        if sight.keep is None or not isinstance(self.method, nn.Module):
            return None
        try:
            return find_leak(self.method, images, sight, call=lambda x: self.method.judge(x, sight).logits, draws=1)
        except UserError:
            return None

    def add_control(self, images: Tensor, visible: Tensor, before: Prediction, sight: Sight) -> None:
        redrawn = fill(images, visible, images + noise_like(images, self.generator))
        differs, _ = compare_predictions(before, self.judge(redrawn, sight))
        sees_something = visible.flatten(1).any(dim=1)
        self.control["trials"] += int(sees_something.sum())
        self.control["changed"] += int((differs & sees_something.cpu()).sum())

    def add_end_to_end(self, method: Method, images: Tensor, sight: Sight) -> None:
        size = images.shape[-2:]
        visible, labels = sight.visible(size), method.judge(images, sight).labels
        for kind, redrawn in plausible_redraws(images, ~visible, self.generator):
            new_sight = method.look(redrawn)
            now, new_labels = new_sight.visible(size), method.judge(redrawn, new_sight).labels
            row = self.end_to_end.setdefault(
                kind, {"n": 0, "prediction_changed": 0, "sight_changed": 0, "sight_iou": 0.0}
            )
            row["n"] += len(images)
            row["prediction_changed"] += int((new_labels != labels).sum())
            row["sight_changed"] += int((now != visible).flatten(1).any(dim=1).sum())
            union = (now | visible).flatten(1).sum(dim=1)
            row["sight_iou"] += torch.where(union > 0, (now & visible).flatten(1).sum(dim=1) / union, 1.0).sum().item()

    def certificate(self, images: Tensor) -> Certificate:
        tried = list(self.tried.values())
        verdict, sentence = self.verdict_and_sentence(tried)
        return Certificate(
            verdict=verdict,
            sentence=sentence,
            images=self.images,
            tried=tried,
            largest_gradient=self.largest_gradient,
            control=self.control,
            end_to_end=self.end_to_end_rates(),
            leak=self.leak.to_dict() if self.leak else None,
            conditions=self.conditions(images),
            model=fingerprint(self.method),
        )

    def verdict_and_sentence(self, tried: list[RedrawResult]) -> tuple[Literal["blind", "leaks", "refused"], str]:
        trials, count = sum(t.trials for t in tried), sum(t.changed for t in tried)
        what = f"{trials:,} redraws of hidden pixels on {self.images} image{'s' * (self.images != 1)}"
        refusals = list(dict.fromkeys(self.refusals))
        if "weighted" in self.hiding:
            refusals.append("it hides by weighting, a form for training in which hidden patches keep their content")
        if not trials:
            refusals.append("its sight hides nothing, so there is nothing to prove")
        elif not self.control["trials"]:
            refusals.append("nothing is visible in any of these images, so blindness would be trivial")
        if self.control["trials"] and not self.control["changed"]:
            refusals.append("visible pixels do not change the output either, so blindness would be trivial")
        if refusals:
            found = f" ({what}: {count:,} changed the {self.compared})" if trials else ""
            return "refused", f"No certificate: {'; '.join(refusals)}{found}."
        if count or self.largest_gradient:
            worst = max(t.largest_change or 0.0 for t in tried)
            place = f" They enter at {self.leak.module} ({self.leak.kind})." if self.leak and self.leak.module else ""
            return "leaks", f"Not blind: of {what}, {count:,} changed the {self.compared}, by up to {worst:.3g}.{place}"
        return "blind", (
            f"Blind outside its sight: {what} ({self.coverage / self.images:.0%} visible) changed no bit of the "
            f"{self.compared}; redrawing visible pixels changed {self.control['changed']} of {self.control['trials']}."
        )

    def end_to_end_rates(self) -> dict[str, Any] | None:
        if not self.end_to_end:
            return None
        rows = {}
        for kind, row in self.end_to_end.items():
            n = row["n"]
            rows[kind] = row | {"sight_iou": row["sight_iou"] / n}
            for rate in ("prediction_changed", "sight_changed"):
                rows[kind][f"{rate}_interval"] = [round(bound, 4) for bound in wilson(row[rate], n)]
        return {"note": "the selector sees the whole image; intervals: Wilson, 95 %", "redrawn_with": rows}

    def conditions(self, images: Tensor) -> dict[str, Any]:
        kernels = ("flash", "mem_efficient", "math")
        allowed = [name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
        device = images.device.type
        parameters = self.method.parameters() if isinstance(self.method, nn.Module) else ()
        return {
            "sight": "held fixed while hidden pixels were redrawn",
            "hiding": sorted(self.hiding) or ["not observed"],
            "paths": sorted(self.paths) or ["not observed"],
            "visible_share": round(self.coverage / self.images, 4),
            "batch_shapes": [list(shape) for shape in sorted(self.batch_shapes)],
            "images_in": dtype_name(images.dtype),
            "weights_in": sorted({dtype_name(p.dtype) for p in parameters}),
            "predictions_in": sorted(self.predictions_in),
            "autocast": dtype_name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None,
            "device": torch.cuda.get_device_name(images.device) if device == "cuda" else device,
            "attention_kernels": sorted(self.kernels) or ["none: attention is computed in another way"],
            "attention_kernels_allowed": allowed if device == "cuda" else ["cpu"],
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "sightline": __version__,
        }


def hidden_levels(sight: Sight, visible: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The hidden pixels, by level: whole patches and, in a pixel-exact sight, pixels inside kept patches."""
    whole = torch.zeros_like(visible) if sight.keep is None else ~cells_to_pixels(sight.keep, visible.shape[1:])
    if whole.any():
        yield "patches", whole
    if (~visible & ~whole).any():
        yield "pixels", ~visible & ~whole


def compare_predictions(before: Prediction, after: Prediction) -> tuple[Tensor, float]:
    """Which images' logits or tokens differ in any bit, and the largest difference."""
    differs, largest = torch.zeros(len(before.logits), dtype=torch.bool), 0.0
    for a, b in ((before.logits, after.logits), (before.tokens, after.tokens)):
        assert (a is None) == (b is None), "a method returns tokens always or never"
        if a is None or b is None:
            continue
        differs |= images_that_differ(a, b)
        gap = (a.double() - b.double()).abs()
        largest = max(largest, gap[gap.isfinite()].max().item() if gap.isfinite().any() else 0.0)
    return differs, largest


@contextmanager
def record_hiding(method: Judge, hiding: set[str], paths: set[str]) -> Generator[None]:
    """Record how the ViTs inside a method hide patches while it runs, and by which computation."""

    def note(_: nn.Module, __: object, out: ViTOutput) -> None:
        hiding.add(out.hide or "nothing")
        paths.add(out.path)

    vits = [m for m in method.modules() if isinstance(m, ViT)] if isinstance(method, nn.Module) else []
    hooks = [vit.register_forward_hook(note) for vit in vits]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fingerprint(method: Judge) -> dict[str, Any]:
    """Identifies the verified model, so that a certificate cannot be used for another one."""
    name = f"{type(method).__module__}.{type(method).__qualname__}"
    if not isinstance(method, nn.Module):
        return {"class": name}
    origins = {str(m.origin) for m in method.modules() if isinstance(m, ViT) and m.origin is not None}
    return {
        "class": name,
        "architecture_sha256": hashlib.sha256(repr(method).encode()).hexdigest(),
        "weights_sha256": weights_sha256(method),
        "weights_from": sorted(origins),
    }


@contextmanager
def evaluation_mode(method: Judge) -> Generator[None]:
    modules = list(method.modules()) if isinstance(method, nn.Module) else []
    training = [m for m in modules if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Verify) -> int:
    from .printing import print_certificate
    from .target import resolve_target

    prepare_output(command.out)
    target = resolve_target(command)
    kind = "image" if command.images else "toy image"

    def introduce() -> None:
        print(f"{target.name} on {counted(len(target.images), kind)}; sight: {target.where}.")
        if target.note:
            print(f"({target.note})")

    if isinstance(target.module, Judge):
        certificate = verify(target.module, target.images, target.sight, draws=command.draws, seed=command.seed)
        if command.out is not None:
            certificate.save(command.out)

        def show() -> None:
            introduce()
            print_certificate(certificate)
            if command.out is None and certificate.verdict != "refused":
                print("The certificate was not saved; save it with --out certificate.json.")

        present(command, json.loads(certificate.to_json()), show)
        return int(certificate.verdict != "blind")
    assert target.sight is not None, "only a method chooses its own sight"
    settings = {"call": target.call, "draws": command.draws, "seed": command.seed}
    leak = find_leak(target.module, target.images, target.sight, **settings)
    if command.out is not None:
        leak.save(command.out)

    def show_leak() -> None:
        introduce()
        print(leak.sentence)

    present(command, leak.to_dict(), show_leak)
    return int(leak.leaks)
