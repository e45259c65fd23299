"""What relevance costs: GAE of a batch against one picture after the other, other maps, and a step of training.

    python benchmarks/relevance_cost.py --out benchmarks/results/relevance_cost_cpu.json

Toy pictures, random weights. Everything is timed in the same run; see ratios.py for how. Memory is what autograd
keeps for one more picture: bytes of saved tensors, each storage counted once, weights left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from ratios import ratios, verdicts
from torch import Tensor

from record import record
from sightline.datasets.toy_images import make_toy
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone
from sightline.where.relevance import KINDS, MAPS, gae

LOOP = "one picture after the other"
BATCH = "one backward for the batch"


@dataclass(frozen=True)
class RelevanceCost:
    backbone: str = "random:augreg-ti16"
    classes: int = 1000
    batch: tuple[int, ...] = (8,)
    rounds: int = 5
    device: str = "cpu"
    out: Path | None = None
    """Write the figures there, as JSON."""


def as_list(vit: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """As published: a forward and a backward for every picture, and whole matrices through the blocks."""
    found = []
    for image, label in zip(images, classes, strict=True):
        out = vit(image[None], attention=range(vit.config.depth))
        gradients = torch.autograd.grad(out.logits[0, label], out.attention)
        R = torch.eye(out.attention[0].shape[-1], device=image.device)
        for a, g in zip(out.attention, gradients, strict=True):
            R = R + (a * g).clamp(min=0)[0].mean(dim=0) @ R
        found.append(R[0, vit.prefix :].view(out.grid).detach())
    return torch.stack(found)


def step(vit: ViT, images: Tensor, classes: Tensor, *, second_order: bool) -> None:
    found = gae(vit, images, classes, second_order=second_order)
    (found.maps.mean() + found.logits.mean()).backward()
    vit.zero_grad()


def plain_step(vit: ViT, images: Tensor) -> None:
    vit(images).logits.mean().backward()
    vit.zero_grad()


def megabytes_kept(vit: ViT, run: Callable[[Tensor], object], images: Tensor) -> float:
    """For one more picture: the difference between two and one."""
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


def measure(config: RelevanceCost, vit: ViT, batch: int) -> list[dict[str, Any]]:
    images = (make_toy(batch, size=vit.config.input.size[0]).images.float() / 255).to(config.device)
    classes = torch.arange(batch, device=config.device) % config.classes
    error = (MAPS["gae"](vit, images, classes) - as_list(vit, images, classes)).abs().max()
    assert error < 1e-4 * as_list(vit, images, classes).max(), "the two are not the same map"
    maps = {
        LOOP: partial(as_list, vit, images, classes),
        BATCH: partial(MAPS["gae"], vit, images, classes),
        "rollout": partial(MAPS["rollout"], vit, images),
        "attention": partial(MAPS["attention"], vit, images),
        "gradient": partial(MAPS["gradient"], vit, images, classes),
    }
    steps = {
        "ERM": partial(plain_step, vit, images),
        "through GAE, first order": partial(step, vit, images, classes, second_order=False),
        "through GAE, second order": partial(step, vit, images, classes, second_order=True),
    }
    rows = []
    for what, runs, to in (("maps", maps, LOOP), ("steps", steps, "ERM")):
        found = ratios(runs, to, rounds=config.rounds, device=config.device)
        rows += [{"what": what, "batch": batch} | row for row in found]
    return rows


def memory(config: RelevanceCost, vit: ViT) -> dict[str, float]:
    images = (make_toy(2, size=vit.config.input.size[0]).images.float() / 255).to(config.device)
    runs = {
        "ERM": lambda some: vit(some).logits,
        **{kind: lambda some, kind=kind: KINDS[kind](vit, some) for kind in KINDS},
        "gae, second order": lambda some: gae(vit, some, second_order=True),
    }
    return {name: megabytes_kept(vit, run, images) for name, run in runs.items()}


def main() -> None:
    config = tyro.cli(RelevanceCost, description=__doc__)
    vit = load_backbone(config.backbone, classes=config.classes).to(config.device)
    rows = [row for batch in config.batch for row in measure(config, vit, batch)]
    kept = memory(config, vit)
    for row in rows:
        print(row)
    print("megabytes that autograd keeps per picture:", kept)
    if config.out:
        met = verdicts([row for row in rows if row["what"] == "maps"], LOOP, {BATCH: 1.0})
        content = {"backbone": config.backbone, "rows": rows, "verdicts": met, "megabytes_per_picture": kept}
        record(config.out, config.device, content)


if __name__ == "__main__":
    main()
