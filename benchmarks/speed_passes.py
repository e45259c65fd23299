"""What is done beside the forward passes: localisation, leave-one-out and A², as ratios to the passes they consist of.

    python benchmarks/speed_passes.py --out benchmarks/results/speed_passes_cpu.json
    python benchmarks/speed_passes.py --device cuda --batch 64 --out benchmarks/results/speed_passes_h200.json

Weights are random, images are toy images. Every round times the work and each of its passes once, in a new random
order; a ratio is the median over rounds of the work / the sum of its passes, its spread the middle 80 % of rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bare  # noqa: F401 (first, for machines without tyro)
from record import middle, record, rounds_of
from sightline.data.rows import read_rows
from sightline.datasets.toy import write_toy
from sightline.explain.localize import localize
from sightline.methods.ifam import IFam
from sightline.metrics.inference import inference_batches
from sightline.training.distributed import make_accelerator
from sightline.what.probe import BoxProbe
from sightline.where.corrections import Correction
from sightline.where.crops import CropSight
from two_stages import assemble, random_vit

GOALS = {"A² pipeline": 1.10, "localize": 1.20, "leave-one-out": 1.20}
Work = tuple[Callable[[], object], list[Callable[[], object]]]  # and the passes that it consists of


def pipeline(settings: argparse.Namespace) -> Work:
    """One forward pass for the attention, one for the crop."""
    vit = random_vit(settings.backbone, 0).to(settings.device).eval()
    side = vit.config.input.size[0]
    images = torch.rand(settings.batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(settings.device)
    look, probe = CropSight(vit, (2 / 7,)), BoxProbe(vit, (side, side), 1)

    def dense() -> object:
        return vit(images).cls

    return lambda: probe.embed(images, look.look(images)), [dense, dense]


def leave_one_out(settings: argparse.Namespace) -> Work:
    """One look, and a prediction with every part left out in turn, and with all of them."""
    side = random_vit(settings.backbone, 0).config.input.size[0]
    model = assemble(IFam, settings.backbone, side, {}, settings.device).eval()
    images = torch.rand(settings.batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(settings.device)
    tried = [Correction(), *(Correction(drop=(part,)) for part in range(model.part_count))]
    found = model.detect(images)
    sights = [model.sight_from(images, found, correction) for correction in tried]

    def work() -> object:
        detected = model.detect(images)
        return [model.predict_from(images, detected, correction) for correction in tried]

    judges = [lambda sight=sight: model.judge(images, sight) for sight in sights]
    return work, [lambda: model.look(images), *judges]


def localisation(settings: argparse.Namespace, folder: Path) -> Work:
    """A look at every image of a split, from the file on."""
    vit = random_vit(settings.backbone, 0)
    side = vit.config.input.size[0]
    write_toy(folder / "toy", train=8, val=8, test=2 * settings.batch, size=side)
    rows, accelerator = read_rows(folder / "toy"), make_accelerator(settings.device)
    indices = rows.split_indices("test")
    model, expects = assemble(IFam, settings.backbone, side, {}, settings.device).eval(), vit.config.input

    def looks() -> object:
        batches = inference_batches(rows, indices, expects, accelerator, batch=settings.batch, workers=0)
        return [model.look(batch.to(accelerator.device).images.float() / 255) for batch in batches.epoch(0)]

    def work() -> object:
        return localize(model, rows, indices, expects, accelerator, batch=settings.batch, workers=0)

    return work, [looks]


@torch.no_grad()
def measure(settings: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        works = {
            "A² pipeline": pipeline(settings),
            "localize": localisation(settings, Path(name)),
            "leave-one-out": leave_one_out(settings),
        }
        for what, (work, passes) in works.items():
            runs = {"work": work} | {str(k): run for k, run in enumerate(passes)}
            for run in runs.values():
                run()
            times = rounds_of(runs, settings.rounds, settings.device)
            sums = [sum(each) for each in zip(*(times[str(k)] for k in range(len(passes))), strict=True)]
            ratio, spread = middle([one / total for one, total in zip(times["work"], sums, strict=True)], 3)
            row = {"work": what, "backbone": settings.backbone, "batch": settings.batch, "passes": len(passes)}
            found.append(row | {"ratio": ratio, "spread": spread, "goal": GOALS[what], "met": ratio <= GOALS[what]})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backbone", default="augreg-ti16", help="an architecture, by name")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    settings = parser.parse_args()
    rows = measure(settings)
    if settings.out:
        record(settings.out, settings.device, {"rows": rows})


if __name__ == "__main__":
    main()
