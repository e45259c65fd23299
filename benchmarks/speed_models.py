"""Speeds of ViTs: hidden patches, relevance maps, and crops at attention peaks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from record import limits_met, ratios, seconds_of
from sightline.datasets.toy_images import make_toy
from sightline.vit.backbones import BACKBONES
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone
from sightline.what.probe import BoxProbe
from sightline.where.crops import CropSight, greedy_crops
from sightline.where.relevance import KINDS, MAPS, gae
from speed import Result, Speed

# ---- hidden patches --------------------------------------------------------------------------------------------------

SHARES = (1.0, 0.5, 0.25, 0.1)


@torch.inference_mode()
def masking(config: Speed) -> Result:
    """Hiding and removal against the dense ViT."""
    backbone, rows = (config.backbones or ("dino-s16",))[0], []
    dtype = "bfloat16" if config.precision == "bf16" else "float32"
    for batch in config.batches or (1, 16):
        torch.manual_seed(0)
        vit = ViT(BACKBONES[backbone].config).eval().to(config.device, getattr(torch, dtype))
        images = torch.rand(batch, 3, *vit.config.input.size, device=config.device)
        timed = ratios(masking_variants(vit, images), "dense", rounds=config.rounds or 25, device=config.device)
        rows += [{"batch": batch} | row for row in timed]
    met = limits_met(rows, "dense", {"mask, 50% visible": 1.1, "removal, 25% visible": 0.5})
    return Result({"backbone": backbone, "dtype": dtype, "verdicts": met, "rows": rows})


def masking_variants(vit: ViT, images: Tensor) -> dict[str, Callable[[], object]]:
    grid = vit.grid(images)
    patches = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(0)

    def visible(share: float) -> Tensor:
        order = torch.rand(len(images), patches, generator=generator).argsort(dim=1)
        return (order < round(share * patches)).view(-1, *grid).to(images.device)

    keeps = {share: visible(share) for share in SHARES}
    runs: dict[str, Callable[[], object]] = {"dense": lambda: vit(images)}
    for share, keep in keeps.items():
        runs[f"removal, {share:.0%} visible"] = lambda keep=keep: vit(images, keep)
    runs["mask, 50% visible"] = lambda: vit(images, keeps[0.5], hide="mask")
    pixels = torch.rand(len(images), *images.shape[-2:], generator=generator).to(images.device) < 0.5
    runs["removal, 25% visible, pixels blanked"] = lambda: vit(images, keeps[0.25], pixels)
    uneven = torch.rand(len(images), *grid, generator=generator).to(images.device) < 0.25
    runs["removal, about 25% visible, rows of unequal length"] = lambda: vit(images, uneven)
    runs["dense, CLS attention of the last block"] = lambda: vit(images, cls_attention=[-1])
    return runs


# ---- relevance -------------------------------------------------------------------------------------------------------

LOOP, BATCH = "one picture after the other", "one backward for the batch"
CLASSES = 1000


def relevance(config: Speed) -> Result:
    """GAE of a batch against image by image, other maps, and a training step; and the memory that autograd keeps."""
    backbone, rows = (config.backbones or ("random:augreg-ti16",))[0], []
    vit = load_backbone(backbone, classes=CLASSES).to(config.device)
    for batch in config.batches or (8,):
        for what, runs, to in relevance_variants(vit, toy_images(vit, batch, config.device)):
            timed = ratios(runs, to, rounds=config.rounds or 5, device=config.device)
            rows += [{"what": what, "batch": batch} | row for row in timed]
    met = limits_met([row for row in rows if row["what"] == "maps"], LOOP, {BATCH: 1.0})
    images = toy_images(vit, 2, config.device)
    kept: dict[str, Callable[[Tensor], object]] = {
        "ERM": lambda some: vit(some).logits,
        **{kind: lambda some, kind=kind: KINDS[kind](vit, some) for kind in KINDS},
        "gae, second order": lambda some: gae(vit, some, second_order=True),
    }
    memory = {name: megabytes_kept(vit, run, images) for name, run in kept.items()}
    return Result({"backbone": backbone, "rows": rows, "verdicts": met, "megabytes_per_picture": memory})


def toy_images(vit: ViT, count: int, device: str) -> Tensor:
    return (make_toy(count, size=vit.config.input.size[0]).images.float() / 255).to(device)


def relevance_variants(vit: ViT, images: Tensor) -> list[tuple[str, dict[str, Callable[[], object]], str]]:
    classes = torch.arange(len(images), device=images.device) % CLASSES
    looped = one_by_one(vit, images, classes)
    assert (MAPS["gae"](vit, images, classes) - looped).abs().max() < 1e-4 * looped.max(), "not the same map"

    def step(order: int) -> None:
        if order == 0:
            vit(images).logits.mean().backward()
        else:
            found = gae(vit, images, classes, second_order=order == 2)
            (found.maps.mean() + found.logits.mean()).backward()
        vit.zero_grad()

    maps = {
        LOOP: partial(one_by_one, vit, images, classes),
        BATCH: partial(MAPS["gae"], vit, images, classes),
        "rollout": partial(MAPS["rollout"], vit, images),
        "attention": partial(MAPS["attention"], vit, images),
        "gradient": partial(MAPS["gradient"], vit, images, classes),
    }
    steps = {"ERM": 0, "through GAE, first order": 1, "through GAE, second order": 2}
    return [("maps", maps, LOOP), ("steps", {name: partial(step, order) for name, order in steps.items()}, "ERM")]


def one_by_one(vit: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """As published: a forward and a backward for every image, and whole matrices through the blocks."""
    found = []
    for image, label in zip(images, classes, strict=True):
        out = vit(image[None], attention=range(vit.config.depth))
        gradients = torch.autograd.grad(out.logits[0, label], out.attention)
        R = torch.eye(out.attention[0].shape[-1], device=image.device)
        for a, g in zip(out.attention, gradients, strict=True):
            R = R + (a * g).clamp(min=0)[0].mean(dim=0) @ R
        found.append(R[0, vit.prefix :].view(out.grid).detach())
    return torch.stack(found)


def megabytes_kept(vit: ViT, run: Callable[[Tensor], object], images: Tensor) -> float:
    """By autograd for one more image: bytes of saved tensors, each storage counted once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in vit.parameters()}

    def kept(count: int) -> int:
        held: dict[int, tuple[Tensor, int]] = {}  # the tensors too, so that no address is used twice

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run(images[:count])
        return sum(size for _, size in held.values())

    return round((kept(2) - kept(1)) / 1e6, 2)


# ---- crops -----------------------------------------------------------------------------------------------------------

PLANS = {"1 crop": (64,), "2 crops": (64, 32), "4 crops": (64, 64, 64, 64)}
ONE_BY_ONE, CHUNK, SIDE = 500, 512, 224  # maps that are searched one after the other, maps at once, pixels


def crops(config: Speed) -> Result:
    """The search of the best crops of many attention maps, against map by map and NumPy; and the whole pipeline against
    embedding whole images, and against its own limit, which is the two ViTs without search, cutting and resizing."""
    search, pipeline = crop_search(config), crop_pipeline(config)
    batch = (config.batches or (256,))[0]
    dtype = "bfloat16" if config.precision == "bf16" else "float32"
    return Result({"batch": batch, "dtype": dtype, "search": search, "pipeline": pipeline}, [*search, *pipeline])


def crop_search(config: Speed) -> list[dict[str, Any]]:
    count, rounds = config.count or 10_000, config.rounds or 5
    patches = torch.rand(count, 1, 14, 14, generator=torch.Generator().manual_seed(0)).pow(8)  # few bright patches
    chunks = [
        F.interpolate(some.to(config.device), (SIDE, SIDE), mode="bilinear")[:, 0] for some in patches.split(CHUNK)
    ]
    few, rows = torch.cat(chunks)[: min(ONE_BY_ONE, count)], []
    in_numpy = few.cpu().numpy()
    for plan, sides in PLANS.items():
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "batched": (count, lambda s=sides: torch.cat([greedy_crops(some, s) for some in chunks])),
            "one by one": (len(few), lambda s=sides: torch.cat([greedy_crops(one[None], s) for one in few])),
            "one by one, NumPy": (len(few), lambda s=sides: torch.tensor([crops_in_numpy(one, s) for one in in_numpy])),
        }
        found = {name: work() for name, (_, work) in ways.items()}
        alike = torch.equal(found["batched"][: len(few)], found["one by one"])
        same = (found["batched"][: len(few)].cpu() == found["one by one, NumPy"]).all(dim=2).float().mean().item()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (of, work) in ways.items():
                times[name].append(seconds_of(work, config.device) / of)
        for name, (of, _) in ways.items():
            relative = [slow / fast for slow, fast in zip(times[name], times["batched"], strict=True)]
            rows.append(
                {
                    "crops": plan, "way": name, "maps": of, "of_side": SIDE, "rounds": rounds,
                    "maps_per_second": round(1 / statistics.median(times[name])),
                    "times_as_long_as_batched": round(statistics.median(relative), 2),
                    "lowest_highest": [round(min(relative), 2), round(max(relative), 2)],
                    "same_boxes_as_one_by_one": alike, "share_of_boxes_as_numpy": round(same, 4),
                }
            )  # fmt: skip
    return rows


def crops_in_numpy(attention: np.ndarray, sides: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Sums of all squares by an integral image, and the best that overlaps none before it."""
    integral = np.pad(attention.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    boxes: list[tuple[int, int, int, int]] = []
    for s in sides:
        sums = integral[s:, s:] - integral[:-s, s:] - integral[s:, :-s] + integral[:-s, :-s]
        for left, top, right, bottom in boxes:
            sums[max(0, top - s + 1) : bottom, max(0, left - s + 1) : right] = -np.inf
        y, x = np.unravel_index(sums.argmax(), sums.shape)
        boxes.append((int(x), int(y), int(x) + s, int(y) + s))
    return boxes


@torch.inference_mode()
def crop_pipeline(config: Speed) -> list[dict[str, Any]]:
    names, batch = config.backbones or ("random:nano",), (config.batches or (256,))[0]
    vits = {Path(name).stem: load_backbone(name, classes=0).eval().to(config.device) for name in names}
    rows = []

    def cast(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with torch.autocast(config.device, torch.bfloat16, enabled=config.precision == "bf16"):
                return work()

        return run

    for what_name, what in vits.items():
        size = what.config.input.size
        images = torch.rand(batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(config.device)
        runs, limits = {"full": cast(lambda w=what, i=images: w(i).cls)}, {}
        for name, vit in vits.items():
            looking = CropSight(vit, (2 / 7,))
            runs[f"attention of {name}"] = cast(lambda v=looking, i=images: v.attention(i))
            for count in (1, 2):
                sight, embed = CropSight(vit, (2 / 7,) * count), BoxProbe(what, size, count)
                words = f"A2 {name}>{what_name}, {count} crop{'s' * (count > 1)}"
                runs[words] = cast(lambda c=sight, e=embed, i=images: e.embed(i, c.look(i)))
                limits[words] = name, count
        every = ratios(runs, "full", rounds=config.rounds or 5, device=config.device)
        timed = {row["variant"]: row["milliseconds"] for row in every}
        for row in every:
            row["images_per_second"] = round(1000 * batch / row["milliseconds"])
            if row["variant"] in limits:
                name, count = limits[row["variant"]]
                least = timed[f"attention of {name}"] + count * timed["full"]
                row["share_of_its_limit"] = round(least / row["milliseconds"], 3)
            rows.append(row | {"what": what_name})
    return rows
