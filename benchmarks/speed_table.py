"""What two stages cost: looking, judging and training steps, as ratios to one dense forward or fine-tuning step.

    python benchmarks/speed_table.py --device cuda --precision bf16 --out benchmarks/results/speed_h200.json
    python benchmarks/speed_table.py --backbones augreg-ti16 --batches 1 8 --out benchmarks/results/speed_table_cpu.json

Weights are random: time does not depend on them. Sights are given, ragged and a quarter of the image on average, after
stage 1 has run, so that the cost does not depend on what an untrained selector finds. Every round times every variant
once, in a new order; a ratio is the median over rounds of variant / reference of the same round, its spread the middle
80 % of rounds. Needs neither tyro nor rich, so it runs where only PyTorch is installed.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bare  # noqa: F401 (first, for machines without tyro)
from record import middle, record, rounds_of, seconds_of
from sightline.config import Erm, Ifam
from sightline.sight import Sight
from sightline.verify.verify import verify
from two_stages import (
    BACKBONES,
    SIGHTS,
    GivenSight,
    Stepping,
    build,
    classifier,
    in_padded_form,
    initialise_quickly,
    masked,
    padded,
    precision_of,
)

GOALS = {  # at most so much of the reference, for ViT-B; by work, sight and batch
    ("look and judge", 224, 64): 1.30,
    ("look and judge", 518, 32): 1.28,
    ("look and judge", 224, 1): 1.40,
    ("step", 224, 32): 1.80,
    ("memory of a step", 224, 32): 1.50,
}
DENSE = "dense"
# ---- what is timed is right ------------------------------------------------------------------------------------------


def checks(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """The path that is timed is proved blind, and equals the padded reference, also in its gradients."""
    side = settings.side
    model = build(settings.backbones[0], side, 8, SIGHTS["default"], settings.device).eval()
    images = torch.rand(8, 3, side, side, generator=torch.Generator().manual_seed(1)).to(settings.device)
    found = {}
    with precision_of(settings):
        certificate = verify(model, images, model.given, draws=1, ascent_steps=2)
        for name, form in (("packed", nullcontext), ("padded", padded)):
            model.zero_grad()
            with form():
                out = model.what.vit(*masked(model, images))
            assert out.logits is not None
            out.logits.float().square().mean().backward()
            gradient = model.what.vit.blocks[0].attn.qkv.weight.grad
            assert gradient is not None
            found[name] = out.path, out.logits.detach().float(), gradient.clone()

    def difference(k: int) -> float:
        one, reference = found["packed"][k], found["padded"][k]
        return float(f"{float((one - reference).norm() / reference.norm()):.3g}")

    return [
        {"verdict": certificate.verdict, "sentence": certificate.sentence, "paths": certificate.conditions["paths"]},
        {"paths": [found["packed"][0], found["padded"][0]], "logits": difference(1), "gradient": difference(2)},
    ]


# ---- inference -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def inference(settings: argparse.Namespace, backbone: str, side: int, batch: int) -> list[dict[str, Any]]:
    device = settings.device
    dense = classifier(backbone).to(device).eval()
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device)
    runs: dict[tuple[str, str], Callable[[], object]] = {(DENSE, "everything"): lambda: dense.vit(images).logits}
    paths: dict[tuple[str, str], str] = {}
    for name in settings.sights:
        if name == "patches, no mask gradient":  # the same in inference
            continue
        model = build(backbone, side, batch, SIGHTS[name], device).eval()
        sight = model.given

        def look(model: GivenSight = model) -> Sight:
            return model.look(images)

        def judge(model: GivenSight = model, sight: Sight = sight) -> Tensor:
            return model.judge(images, sight).logits

        def both(model: GivenSight = model) -> Tensor:
            return model.judge(images, model.look(images)).logits

        runs |= {("look", name): look, ("judge", name): judge, ("look and judge", name): both}
        if name in ("patches", "default"):
            runs[("judge, padded", name)] = in_padded_form(judge)
        with precision_of(settings):
            out = model.what.vit(*masked(model, images))
        paths[("judge", name)] = out.path
        shown = round(float((out.patches != 0).any(dim=2).float().mean()), 3)
        paths[("look and judge", name)] = f"{shown:.0%} of the tokens visible"
    return timed(settings, runs, (DENSE, "everything"), backbone, side, batch, paths)


def timed(
    settings: argparse.Namespace,
    runs: dict[tuple[str, str], Callable[[], object]],
    reference: tuple[str, str],
    backbone: str,
    side: int,
    batch: int,
    notes: dict[tuple[str, str], str],
) -> list[dict[str, Any]]:
    device, cast = settings.device, precision_of(settings)

    def in_precision(run: Callable[[], object]) -> Callable[[], object]:
        def cast_run() -> object:
            with cast:
                return run()

        return cast_run

    named = {" | ".join(key): in_precision(run) for key, run in runs.items()}
    for run in named.values():
        run(), run()
    to = " | ".join(reference)
    repeats = max(1, round(settings.seconds / seconds_of(named[to], device, 3)))
    times, rows = rounds_of(named, settings.rounds, device, repeats), []
    for key in runs:
        values = times[" | ".join(key)]
        ratio, spread = middle([value / other for value, other in zip(values, times[to], strict=True)], 3)
        milliseconds = middle([1000 * value for value in values], 3)[0]
        row = row_of(backbone, side, batch, key, ratio, spread) | {"milliseconds": milliseconds}
        rows.append(row | ({"note": notes[key]} if key in notes else {}))
    return rows


def row_of(backbone: str, side: int, batch: int, key: tuple[str, str], ratio: float, spread: list[float]) -> dict:
    work, sight = key
    row = {"work": work, "backbone": backbone, "size": side, "batch": batch, "sight": sight}
    goal = GOALS.get((work, side, batch)) if sight in ("patches", "default") else None
    return row | {"ratio": ratio, "spread": spread} | ({} if goal is None else {"goal": goal, "met": ratio <= goal})


# ---- training --------------------------------------------------------------------------------------------------------


def training(settings: argparse.Namespace, backbone: str, side: int, batch: int) -> list[dict[str, Any]]:
    device, memory, runs = settings.device, {}, {}
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device)
    cast = precision_of(settings)

    def add(key: tuple[str, str], make: Callable[[], Stepping]) -> None:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        runs[key] = make()
        if device == "cuda":
            with cast:
                runs[key](), runs[key]()
                torch.cuda.reset_peak_memory_stats()
                runs[key]()
            memory[key] = torch.cuda.max_memory_allocated() - before

    add(("step", "everything"), lambda: Stepping(classifier(backbone), images, Erm.ema))
    for name in settings.sights:
        if "3 blocks" in name:  # distilled from a trained run
            continue
        add(
            ("step", name),
            lambda name=name: Stepping(build(backbone, side, batch, SIGHTS[name], device), images, Ifam.ema),
        )
    for name in ("patches, no mask gradient", "default"):
        if name in settings.sights:
            runs[("step, padded", name)] = in_padded_form(runs[("step", name)])
    rows = timed(settings, runs, ("step", "everything"), backbone, side, batch, {})
    reference = memory.get(("step", "everything"))
    for (_, name), peak in memory.items():
        ratio = round(peak / reference, 3)
        row = row_of(backbone, side, batch, ("memory of a step", name), ratio, [ratio, ratio])
        rows.append(row | {"megabytes": round(peak / 2**20)})
    return rows


# ---- one training run beside others ----------------------------------------------------------------------------------

LANE_BATCH, LANE_SECONDS = 64, 5.0


def lane(settings: argparse.Namespace, options: dict[str, Any] | None, ready: Any, result: Any) -> None:
    """A process of its own, as training runs are: images per second of steps with augmentation, from a resident set."""
    from sightline.data.augment import PRESETS, AnnotatedImages

    backbone, side, device = settings.backbones[0], settings.side, settings.device
    torch.set_num_threads(1)
    initialise_quickly()
    large = round(side / 0.875)
    pool = torch.randint(0, 256, (512, 3, large, large), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool, augment = pool.to(device), replace(PRESETS["light"], size=(side, side), crop=0.875)
    images = torch.rand(LANE_BATCH, 3, side, side).to(device)
    if options is None:
        step = Stepping(classifier(backbone), images, Erm.ema)
    else:
        step = Stepping(build(backbone, side, LANE_BATCH, options, device), images, Ifam.ema)
    cast, count = precision_of(settings), 0

    def one(number: int) -> None:
        indices = (torch.arange(LANE_BATCH) + number * LANE_BATCH) % len(pool)
        seen = augment(AnnotatedImages(pool[indices.to(device)]), seed=0, epoch=number, indices=indices)
        step.batch = replace(step.batch, images=seen.images)
        with cast:
            step()

    for number in range(10):
        one(number)
    synchronize(device)
    ready.wait()
    began = time.perf_counter()
    while time.perf_counter() - began < LANE_SECONDS:
        one(10 + count)
        count += 1
        if count % 10 == 0:
            synchronize(device)
    synchronize(device)
    result.put(count * LANE_BATCH / (time.perf_counter() - began))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def lanes(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Images per second of one ViT-Ti run alone, against eight of them together on the same device."""
    from torch import multiprocessing

    context, rows = multiprocessing.get_context("spawn"), []
    for name, options in (("everything", None), ("default", {})):
        speeds = {}
        for count in (1, settings.lanes):
            ready, result = context.Barrier(count), context.Queue()
            processes = [
                context.Process(target=lane, args=(settings, options, ready, result), daemon=True) for _ in range(count)
            ]
            for process in processes:
                process.start()
            try:
                speeds[count] = sum(result.get(timeout=120) for _ in processes)
            finally:
                for process in processes:
                    process.join(timeout=10)
                    process.kill()
        ratio = round(speeds[1] / speeds[settings.lanes], 3)
        row = {"work": f"training, one lane against {settings.lanes}", "backbone": settings.backbones[0]}
        row |= {"size": settings.side, "batch": LANE_BATCH, "sight": name, "ratio": ratio, "spread": [ratio, ratio]}
        rows.append(row | {"images_per_second": {str(lanes): round(speed) for lanes, speed in speeds.items()}})
    return rows


# ---- where the time goes ---------------------------------------------------------------------------------------------


def profiles(settings: argparse.Namespace, backbone: str, batch: int) -> list[dict[str, Any]]:
    """The kernels that take most of the time, and the number of launches, of looking, judging and a step."""
    from torch.profiler import ProfilerActivity, profile

    side, device, found = settings.side, settings.device, []
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device)
    model = build(backbone, side, batch, SIGHTS["default"], device).eval()
    dense = classifier(backbone).to(device).eval()
    stepping = Stepping(build(backbone, side, batch, SIGHTS["default"], device), images, Ifam.ema)
    works: dict[str, Callable[[], object]] = {
        DENSE: lambda: dense.vit(images).logits,
        "look": lambda: model.look(images),
        "judge": lambda: model.judge(images, model.given).logits,
        "step": stepping,
    }
    cast = precision_of(settings)
    for work, run in works.items():
        with torch.set_grad_enabled(work == "step"), cast:
            run(), run()
            synchronize(device)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                run()
                synchronize(device)
        kernels = sorted(
            (e for e in seen.key_averages() if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total
        )
        top = [
            {"kernel": e.key[:90], "milliseconds": round(e.self_device_time_total / 1000, 3), "launches": e.count}
            for e in kernels[:12]
        ]
        total = round(sum(e.self_device_time_total for e in kernels) / 1000, 3)
        launches = sum(e.count for e in kernels)
        found.append({"work": work, "backbone": backbone, "milliseconds": total, "launches": launches, "top": top})
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), help="architectures, by name")
    parser.add_argument("--sights", nargs="+", default=list(SIGHTS), choices=list(SIGHTS))
    parser.add_argument("--side", type=int, default=224, help="of images, in pixels")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 1], help="of inference")
    parser.add_argument("--large", type=int, default=0, help="batch of inference at 518 pixels, for the last backbone")
    parser.add_argument("--train-batch", type=int, default=32, help="images of a training step; 0: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="of the reference in each round")
    parser.add_argument("--lanes", type=int, default=0, help="training runs at once, against one; 0: not measured")
    parser.add_argument("--profile", action="store_true", help="kernels of the last backbone; needs a GPU")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    settings = parser.parse_args()
    initialise_quickly()
    content: dict[str, Any] = {"precision": settings.precision}
    content |= {"checks": [], "rows": [], "profiles": [], "failed": []}
    last = settings.backbones[-1]

    def measure(what: str, work: Callable[..., list[dict[str, Any]]], *arguments: Any, into: str = "rows") -> None:
        """One part after the other; a failure is recorded, and costs no other part its figures."""
        began = time.perf_counter()
        try:
            content[into] += work(settings, *arguments)
        except Exception as error:
            traceback.print_exc()
            content["failed"].append({"what": what, "error": f"{type(error).__name__}: {error}"[:500]})
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
        if settings.out:
            record(settings.out, settings.device, content)

    measure("checks", checks, into="checks")
    for backbone in reversed(settings.backbones):
        for batch in settings.batches:
            measure(f"{backbone}, inference, batch {batch}", inference, backbone, settings.side, batch)
        if settings.train_batch:
            measure(f"{backbone}, training", training, backbone, settings.side, settings.train_batch)
    if settings.large:
        measure(f"{last}, inference at 518 pixels", inference, last, 518, settings.large)
    if settings.profile:
        measure("profile", profiles, last, max(settings.batches), into="profiles")
    if settings.lanes:
        measure("lanes", lanes)
    for row in content["rows"]:
        figures = f"{row['ratio']:.3f} {row['spread']} {row.get('milliseconds', row.get('megabytes', ''))}"
        told = "" if "goal" not in row else f" goal {row['goal']}: {'met' if row['met'] else 'missed'}"
        print(row["backbone"], row["size"], row["batch"], row["work"], "|", row["sight"], "|", figures + told)
    for profile in content["profiles"]:
        print(profile["work"], profile["milliseconds"], "ms,", profile["launches"], "launches")
        for kernel in profile["top"][:6]:
            print("   ", kernel)
    print("checks:", *content["checks"], sep="\n    ")
    print("failed:", content["failed"])


if __name__ == "__main__":
    main()
