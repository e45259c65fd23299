"""Every configuration that claims to be blind outside its sight, under many redraws of hidden pixels.

    python benchmarks/proof_stress.py --device cuda --redraws 1000000 --out proof_stress_h200.json
    python benchmarks/proof_stress.py --device cpu --redraws 20000 --out proof_stress_cpu.json

Method × architecture and image size × way of hiding × number format × batch size, then compiled blocks and ONNX files.
A redraw is one image with other hidden pixels; the sight is held fixed. The outputs (logits and kept tokens) are
compared bit by bit, and none may differ; as a control, redrawn visible pixels must change them. Runs without the
packages of the command line (tyro) and the app.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bare  # noqa: F401
from proof_cases import ARCHITECTURES, MAKES, SIGHTS, Case, cases
from record import record
from sightline.sight import Prediction, Sight
from sightline.verify.kernels import attention_kernels
from sightline.verify.perturbations import NOISE_SCALES, NOT_NUMBERS, fill
from trust import commit
from trust import record as record_row

FORMATS = ("float32", "bfloat16", "float16", "float32, bfloat16 autocast")
BATCHES = {"cpu": (1, 3, 16), "cuda": (1, 16, 256)}
INTEGERS = {4: torch.int32, 2: torch.int16}
Rows = Iterator[dict[str, Any]]
KINDS = (*(f"noise of scale {scale:g}" for scale in NOISE_SCALES), *NOT_NUMBERS, "another image's pixels")


@dataclass
class Tally:
    """What was redrawn, and what changed, for one configuration; counted on the device."""

    device: str
    redraws: Tensor = field(init=False)
    changed: Tensor = field(init=False)
    bits: list[Tensor | None] = field(default_factory=lambda: [None, None])  # which bits ever differed
    passes: int = 0

    def __post_init__(self) -> None:
        self.redraws = torch.zeros((), dtype=torch.int64, device=self.device)
        self.changed = torch.zeros((), dtype=torch.int64, device=self.device)

    def add(self, before: list[Tensor], after: list[Tensor], tried: Tensor) -> None:
        differs = torch.zeros_like(tried)
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            other = as_integers(a) ^ as_integers(b)
            other = torch.where(tried.view(-1, *[1] * (other.ndim - 1)), other, torch.zeros_like(other))
            seen = self.bits[i]
            self.bits[i] = other if seen is None else seen | other
            differs |= (other != 0).flatten(1).any(dim=1)
        self.redraws += tried.sum()
        self.changed += (differs & tried).sum()
        self.passes += 1

    @property
    def differing_bits(self) -> int:
        return sum(count_ones(each) for each in self.bits if each is not None)


def as_integers(values: Tensor) -> Tensor:
    return values.contiguous().view(INTEGERS[values.element_size()])


def count_ones(values: Tensor) -> int:
    return sum(int(((values >> bit) & 1).sum()) for bit in range(8 * values.element_size()))


def outputs_of(prediction: Prediction) -> list[Tensor]:
    return [each for each in (prediction.logits, prediction.tokens) if each is not None]


def redrawn(images: Tensor, hidden: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Noise is drawn on the device, because a million redraws are many."""
    kind = number % len(KINDS)
    if kind < len(NOISE_SCALES):
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        return fill(images, hidden, images + (NOISE_SCALES[kind] * noise).to(images.dtype))
    kind -= len(NOISE_SCALES)
    if kind < len(NOT_NUMBERS):
        return fill(images, hidden, torch.full_like(images, list(NOT_NUMBERS.values())[kind]))
    if len(images) == 1:
        return fill(images, hidden, images.flip(3))
    shift = 1 + number // len(KINDS) % (len(images) - 1)
    return fill(images, hidden, images.roll(shift, dims=0).flip(3) * 0.5)  # also where images repeat in a batch


def try_case(
    judge: Callable[[Tensor, Sight], list[Tensor]], images: Tensor, sight: Sight, passes: int, seed: int
) -> tuple[Tally, bool]:
    """Redraws in this many passes; and whether redrawn visible pixels change the output."""
    device = images.device.type
    generator = torch.Generator(images.device).manual_seed(seed)
    visible = sight.visible(tuple(images.shape[-2:]))
    before, tally = judge(images, sight), Tally(device)
    for number in range(passes):
        other = redrawn(images, ~visible, number, generator)
        tried = (other != images).flatten(1).any(dim=1)
        tally.add(before, judge(other, sight), tried)
    noise = torch.randn(images.shape, generator=generator, device=images.device).to(images.dtype)
    control = judge(fill(images, visible, images + noise), sight)
    return tally, not torch.equal(as_integers(before[0]), as_integers(control[0]))


@dataclass
class Plan:
    """Spreads the redraws over the configurations, in passes of equal number, and keeps to the time."""

    redraws: int
    seconds: float
    images: int  # of one pass over every configuration
    began: float = field(default_factory=time.monotonic)
    done: int = 0  # redraws
    images_done: int = 0  # of configurations, at one pass each

    def passes(self, batch: int) -> int:
        late = time.monotonic() - self.began > self.seconds
        left = max(1, self.images - self.images_done)
        self.images_done += batch
        return len(KINDS) if late else max(len(KINDS), -(-(self.redraws - self.done) // left))


def in_format(case: Case, name: str, device: str) -> tuple[Tensor, Sight, AbstractContextManager]:
    dtype = getattr(torch, name.partition(",")[0])
    case.method.to(device, dtype)
    context = torch.autocast(device, torch.bfloat16) if "autocast" in name else nullcontext()
    return case.images.to(device, dtype), case.sight.to(device), context


def eager_rows(found: Iterable[Case], plan: Plan, arguments: argparse.Namespace) -> Rows:
    for case in found:
        for name in arguments.formats:
            images, sight, context = in_format(case, name, arguments.device)
            for batch in arguments.batches:
                at = torch.arange(batch, device=images.device) % SIGHTS
                some, shown = images[at], sight[at]

                def judge(x: Tensor, s: Sight, case: Case = case, context: Any = context) -> list[Tensor]:
                    with torch.no_grad(), context:
                        return outputs_of(case.method.judge(x, s))

                kernels = attention_kernels(lambda some=some, shown=shown, judge=judge: judge(some, shown))
                tally, control = try_case(judge, some, shown, plan.passes(batch), arguments.seed)
                row = describe(case, name, batch, "eager", kernels, tally, control)
                plan.done += row["redraws"]
                yield row


def compiled_rows(plan: Plan, arguments: argparse.Namespace) -> Rows:
    """The blocks are compiled as in training, with the static shapes of attention masks."""
    from sightline.vit.model import Block

    wanted = ("ifam, pixels, zoom", "early-mask, patches", "a2-dfr")
    batch = arguments.batches[-1]
    for case in cases(wanted, (next(iter(ARCHITECTURES)),), arguments.seed):
        if case.name not in wanted or case.hiding == "removal":
            continue
        for module in case.method.modules():
            if isinstance(module, Block):
                module.compile()
        yield from eager_rows([case], plan, argparse.Namespace(**vars(arguments) | {
            "formats": ("float32", "float32, bfloat16 autocast"), "batches": (batch,)
        }))  # fmt: skip


def onnx_rows(plan: Plan, arguments: argparse.Namespace) -> Rows:
    """Exported graphs whose sight does not depend on hidden pixels: given masks, and the centre crop."""
    import io

    from sightline.export.check import open_session, run_session
    from sightline.export.graph import build_graph, to_onnx

    wanted = ("early-mask", "centre-crop")
    batch = min(SIGHTS, arguments.batches[-1])
    for case in cases(wanted, (next(iter(ARCHITECTURES)),), arguments.seed):
        if case.hiding == "removal":  # a graph hides by masks, whatever the method does
            continue
        graph = build_graph(case.method, case.name)
        expects = ARCHITECTURES[case.architecture].input
        held = io.BytesIO(to_onnx(graph, expects).SerializeToString())
        session = open_session(held.getvalue())
        images, sight = case.images[:batch], case.sight[torch.arange(batch)]
        more = {"mask": toy_masks(case, arguments.seed)[:batch]} if case.method.accepts_masks else {}

        def judge(x: Tensor, _: Sight, session: Any = session, more: dict[str, Tensor] = more) -> list[Tensor]:
            return [run_session(session, {"images": x, **more})["logits"]]

        tally, control = try_case(judge, images, sight, plan.passes(batch), arguments.seed)
        row = describe(case, "float32", batch, "ONNX", ["onnxruntime on the CPU"], tally, control)
        plan.done += row["redraws"]
        yield row


def toy_masks(case: Case, seed: int) -> Tensor:
    from sightline.datasets.toy_images import make_toy

    return make_toy(SIGHTS, size=case.images.shape[-1], seed=seed).masks


def describe(
    case: Case, name: str, batch: int, engine: str, kernels: list[str], tally: Tally, control: bool
) -> dict[str, Any]:
    return {
        "method": case.name, "architecture": case.architecture, "hiding": case.hiding, "format": name, "batch": batch,
        "engine": engine, "attention_kernels": kernels, "passes": tally.passes, "redraws": int(tally.redraws),
        "changed": int(tally.changed), "differing_bits": tally.differing_bits, "visible_pixels_matter": control,
    }  # fmt: skip


def skipping(what: str, rows: Rows, notes: list[str]) -> Rows:
    """What this machine lacks (a compiler, the ONNX exporter) is recorded, not an error."""
    try:
        yield from rows
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:300]
        notes.append(f"{what}: not run ({type(error).__name__}: {reason})")


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--redraws", type=int, default=20_000, help="redraws in all; at least one of each kind is made")
    parser.add_argument("--seconds", type=float, default=170, help="after this time only one redraw of each kind")
    parser.add_argument("--methods", nargs="*", default=(), help="names begin with one of these. Default: all")
    parser.add_argument("--architectures", nargs="*", default=tuple(ARCHITECTURES), choices=tuple(ARCHITECTURES))
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument("--batches", nargs="*", type=int, help="default: 1 3 16 on the CPU, 1 16 256 on a GPU")
    parser.add_argument("--eager-only", action="store_true", help="neither compiled blocks nor ONNX files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--row", type=Path, help="JSON file for a row of the result: redraws, and those that changed")
    arguments = parser.parse_args(words)
    arguments.batches = tuple(arguments.batches or BATCHES[arguments.device])
    return arguments


def number_of_images(arguments: argparse.Namespace) -> int:
    """Of one pass over every configuration, roughly: most methods hide in two ways."""
    methods = sum(not arguments.methods or name.startswith(tuple(arguments.methods)) for name, _, _ in MAKES)
    masked = sum(
        name.startswith(("ifam", "early-mask"))
        for name, _, _ in MAKES
        if not arguments.methods or name.startswith(tuple(arguments.methods))
    )
    return (methods + masked) * len(arguments.architectures) * len(arguments.formats) * sum(arguments.batches)


def prove(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = Plan(arguments.redraws, arguments.seconds, number_of_images(arguments))
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    parts = [
        ("compiled", skipping("compiled", compiled_rows(plan, arguments), notes)),
        ("ONNX", skipping("ONNX", onnx_rows(plan, arguments), notes)),
    ]
    found = cases(tuple(arguments.methods), tuple(arguments.architectures), arguments.seed)
    parts = [*([] if arguments.eager_only else parts), ("eager", eager_rows(found, plan, arguments))]
    for what, made in parts:
        for row in made:
            rows.append(row | {"engine": what} if what == "compiled" else row)
            if row["changed"] or row["differing_bits"] or not row["visible_pixels_matter"]:
                print(json.dumps(row), flush=True)
        print(f"{what}: {len(rows):,} configurations, {sum(row['redraws'] for row in rows):,} redraws", flush=True)
    return {
        "sentence": sentence_of(rows),
        "configurations": len(rows),
        "redraws": sum(row["redraws"] for row in rows),
        "changed": sum(row["changed"] for row in rows),
        "differing_bits": sum(row["differing_bits"] for row in rows),
        "controls_without_effect": sum(not row["visible_pixels_matter"] for row in rows),
        "seconds": round(time.monotonic() - plan.began, 1),
        "not_run": notes,
        "kernels": sorted({kernel for row in rows for kernel in row["attention_kernels"]}),
        "rows": rows,
    }


def sentence_of(rows: list[dict[str, Any]]) -> str:
    redraws, changed = (sum(row[name] for row in rows) for name in ("redraws", "changed"))
    bits = sum(row["differing_bits"] for row in rows)
    return (
        f"{redraws:,} redraws of hidden pixels over {len(rows):,} configurations that claim to be blind: {changed:,} "
        f"changed the output, {bits:,} bits differ."
    )


def main() -> int:
    arguments = parsed()
    if arguments.row is not None:
        commit()
    found = prove(arguments)
    print(found["sentence"], *found["not_run"], sep="\n")
    if arguments.out is not None:
        record(arguments.out, arguments.device, found)
    if arguments.row is not None:
        record_row(arguments.row, f"proof under stress, {arguments.device}", found["redraws"], found["changed"])
    return int(bool(found["changed"] or found["differing_bits"] or found["controls_without_effect"]))


if __name__ == "__main__":
    sys.exit(main())
