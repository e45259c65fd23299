"""What it costs to try many interventions, against as many full passes, in the same run.

    python benchmarks/intervention_cost.py --out benchmarks/results/intervention_cost_cpu.json

Eight parts and four quantiles, and no change: 13 interventions on toy pictures, with weights that are random but for
prototypes that roughly find the birds. See ratios.py for how it is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from pixel_cost import PixelCost, ifam
from ratios import ratios
from record import record
from sightline.data.toy import make_toy
from sightline.intervene import intervened
from sightline.interventions import Intervention
from sightline.methods.ifam import IFam

PARTS = 8
WAYS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "pixels, looked at once": {"look_again": False},
    "pixels, looked at again": {},
    "the default": {"look_size": 2},
}


@dataclass(frozen=True)
class InterventionCost:
    backbone: str = "random:augreg-ti16"
    batch: int = 4
    rounds: int = 7
    device: str = "cpu"
    out: Path | None = None
    """Write the figures there, as JSON."""


def interventions(model: IFam, images: torch.Tensor) -> list[Intervention]:
    distances = model.find(images).deciding.distances
    limits = {q: (float(distances.quantile(q)),) * PARTS for q in (0.9, 0.95, 0.97, 0.99)}
    dropped = [Intervention(drop=(part,)) for part in range(PARTS)]
    return [Intervention(), *dropped, *(Intervention(quantile=q, thresholds=far) for q, far in limits.items())]


@torch.no_grad()
def measure(config: InterventionCost, told: dict[str, Any]) -> list[dict[str, Any]]:
    toy = make_toy(config.batch, size=224)
    images = (toy.images.float() / 255).to(config.device)
    model = ifam(PixelCost(config.backbone, device=config.device), toy, images, told | {"parts": PARTS}).eval()
    tried = interventions(model, images)
    corrected = [intervened(model, one) for one in tried]

    def once() -> None:
        found = model.find(images)
        for one in tried:
            model.answer(images, found, one.correction)

    def each_time() -> None:
        for one in corrected:
            one.judge(images, one.look(images))

    runs = {f"{len(tried)} full passes": each_time, "looked at once for all": once}
    return ratios(runs, f"{len(tried)} full passes", rounds=config.rounds, device=config.device)


def main() -> None:
    config = tyro.cli(InterventionCost, description=__doc__)
    rows = [{"way": way, "batch": config.batch} | row for way, told in WAYS.items() for row in measure(config, told)]
    for row in rows:
        print(row)
    if config.out:
        record(config.out, config.device, {"backbone": config.backbone, "rows": rows})


if __name__ == "__main__":
    main()
