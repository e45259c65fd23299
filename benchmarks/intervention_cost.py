"""What it costs to try many interventions, against as many full passes, in the same run.

    python benchmarks/intervention_cost.py --out benchmarks/results/intervention_cost_cpu.json

No change, every part left out, and every quantile that `sightline intervene --find` tries, on toy pictures; weights are
random but for prototypes that roughly find the birds. The first stage runs once for all of them, or else every time.
See ratios.py for how it is timed; here it says how many times as long full passes take, so that 1 / ratio is what is
left of their cost. About 40 s on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from ratios import ratios
from torch import Tensor

from pixel_cost import PixelCost, ifam, kept
from record import record
from sightline.datasets.toy_images import make_toy
from sightline.interventions.apply import QUANTILES, intervened
from sightline.interventions.file import Intervention
from sightline.methods.ifam import IFam
from sightline.sight import Prediction
from sightline.vit.weights import load_backbone

ONCE, EVERY_TIME = "looked at once for all", "full passes"
WAYS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "pixels, looked at once": {"look_again": False},
    "pixels, looked at again": {},
    "the default": {"look_size": 2},
}


@dataclass(frozen=True)
class InterventionCost:
    backbone: str = "random:augreg-ti16"
    ways: tuple[str, ...] = ("patches", "the default")
    parts: int = 4
    batch: int = 1
    rounds: int = 5
    device: str = "cpu"
    out: Path | None = None
    """Write the figures there, as JSON."""


def interventions(model: IFam, images: Tensor) -> list[Intervention]:
    distances, parts = model.find(images).deciding.distances, model.where.parts
    limits = {q: (float(distances.quantile(q)),) * parts for q in QUANTILES}
    dropped = [Intervention(drop=(part,)) for part in range(parts)]
    return [Intervention(), *dropped, *(Intervention(quantile=q, thresholds=far) for q, far in limits.items())]


def looked_at_once(model: IFam, images: Tensor, tried: list[Intervention]) -> list[Prediction]:
    found = model.find(images)
    return [model.answer(images, found, one.correction) for one in tried]


def looked_at_every_time(model: IFam, images: Tensor, tried: list[Intervention]) -> list[Prediction]:
    corrected = [intervened(model, one) for one in tried]
    return [one.judge(images, one.look(images)) for one in corrected]


def model_and_pictures(config: InterventionCost, way: str) -> tuple[IFam, Tensor]:
    told = PixelCost(config.backbone, device=config.device)
    toy = make_toy(config.batch, size=load_backbone(config.backbone).config.input.size[0])
    images = (toy.images.float() / 255).to(config.device)
    return ifam(told, toy, images, WAYS[way] | {"parts": config.parts}).eval(), images


@torch.no_grad()
def measure(config: InterventionCost, way: str) -> list[dict[str, Any]]:
    model, images = model_and_pictures(config, way)
    tried = interventions(model, images)
    runs = {
        ONCE: lambda: looked_at_once(model, images, tried),
        EVERY_TIME: lambda: looked_at_every_time(model, images, tried),
    }
    facts = {"way": way, "batch": config.batch, "interventions": len(tried)}
    facts["patches_visible"] = kept(model, images, None)
    return [facts | row for row in ratios(runs, ONCE, rounds=config.rounds, device=config.device)]


def main() -> None:
    config = tyro.cli(InterventionCost, description=__doc__)
    rows = [row for way in config.ways for row in measure(config, way)]
    for row in rows:
        print(row)
    if config.out:
        record(config.out, config.device, {"backbone": config.backbone, "parts": config.parts, "rows": rows})


if __name__ == "__main__":
    main()
