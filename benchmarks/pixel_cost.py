"""What iFAM's sight costs when it is exact to the pixel, against whole patches in the same run.

    python benchmarks/pixel_cost.py                                       # ViT-Ti at 224, batch 1 and 16, on the CPU
    python benchmarks/pixel_cost.py --device cuda --precision bf16 --batches 1 16 64
    python benchmarks/pixel_cost.py --count waterbirds --out benchmarks/results/pixel_operations.json

Every round times every variant once, in a new random order; a ratio is the median over rounds of variant / patches of
the same round, with the interval that covers the middle 80 % of rounds. What is judged are sights made of the true
masks of toy pictures, so that the cost does not hang on what an untrained model happens to see. A training step is
forward and backward, without the optimiser, with prototypes that roughly find the same things. There patches cost more
than they need to: their mask passes a gradient, so that nothing can be removed; that of pixels passes none by default.

`--count` times nothing: it counts the operations of looking and judging, on pictures of these data that are evenly
spread over a split, again with their true masks as sights; the interval is over pictures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from ratios import Runs, ratios, verdicts
from rich.console import Console
from rich.table import Table
from torch import Tensor

from record import record
from sightline.config import Ifam
from sightline.data.images import Canvas, decode
from sightline.data.rows import fingerprint, read_rows
from sightline.datasets.toy_images import Toy, make_toy
from sightline.methods.base import PartSettings, selector
from sightline.methods.erm import Classifier
from sightline.methods.ifam import IFam, Pixels, predictor
from sightline.metrics.cost import cost
from sightline.sight import Prediction, Sight, cell_share
from sightline.training.context import TrainBatch, StepInfo
from sightline.vit.weights import load_backbone
from sightline.where.fine import Fine, fine_share

VARIANTS: dict[str, dict[str, Any]] = {
    "patches": {"sight": "patches"},
    "pixels": {"zoom": False, "look_again": False},
    "pixels, zoom": {"look_again": False},
    "pixels, zoom, look again": {},
    "pixels, zoom, look at twice the size": {"look_again": False, "look_size": 2},  # times the picture's
    "the default": {"look_size": 2},
}
ASKED = {"pixels": 1.15}


@dataclass(frozen=True)
class PixelCost:
    backbone: str = "random:augreg-ti16"
    """By name or file; random:NAME does as well."""
    batches: tuple[int, ...] = (1, 16)
    rounds: int = 15
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: by autocast."""
    count: Path | None = None
    """Count operations on pictures of these data, which have masks, instead of timing toys."""
    split: str = "val"
    pictures: int = 64
    out: Path | None = None
    """Write the figures there, as JSON."""


def ifam(config: PixelCost, toy: Toy, images: Tensor, told: dict[str, Any]) -> IFam:
    """Its prototypes are the mean patches of things and of backgrounds."""
    vit = load_backbone(config.backbone)
    larger = {"look_size": told["look_size"] * images.shape[-1]} if "look_size" in told else {}
    settings = asdict(Ifam(Path("toy"), **told | larger))
    parts = selector(vit, settings, 2), predictor(vit, settings, 2)
    model = IFam(*parts, PartSettings.of(settings), Pixels.of(settings)).to(config.device)
    with torch.no_grad():
        features = model.where.discover(images).features
        inside = cell_share(toy.masks.to(images.device), features.shape[2:]) > 0.5
        tokens = features.movedim(1, -1)
        found = [tokens[inside].mean(dim=0)] * model.where.parts + [tokens[~inside].mean(dim=0)]
        model.where.prototypes.copy_(torch.stack(found))
    return model


def true_sight(model: IFam, images: Tensor, masks: Tensor) -> Sight:
    grid, pixels = model.what.vit.grid(images), model.pixels
    return Sight.of_pixels(masks, grid, at_least=0.5 if pixels is None else pixels.fine.at_least, exact=bool(pixels))


def answering(models: dict[str, IFam], images: Tensor, toy: Toy) -> Runs:
    """Looking and judging, and of that the filter that follows the picture's edges."""
    masks, runs = toy.masks.to(images.device), {}
    for name, model in models.items():
        sight = true_sight(model, images, masks)
        runs[name] = lambda model=model, sight=sight: (model.look(images), model.judge(images, sight))
    coarse = cell_share(masks, models["patches"].where.grid(images))
    runs["of which following edges, once"] = lambda: fine_share(coarse, images, Fine())
    return runs


def training(models: dict[str, IFam], images: Tensor, toy: Toy) -> Runs:
    n = len(images)
    when, places = StepInfo(seed=0, epoch=0, step=0, epochs=1, steps=1, places=torch.arange(n)), torch.arange(n)
    lesson = TrainBatch(images, toy.labels.to(images.device), None, None, places.to(images.device), when)

    def step(model: IFam) -> None:
        model.zero_grad()
        model(lesson)["loss"].backward()

    return {name: lambda model=model: step(model) for name, model in models.items()}


def measure(config: PixelCost, batch: int) -> list[dict[str, Any]]:
    side = load_backbone(config.backbone).config.input.size[0]
    toy = make_toy(batch, size=side)
    images = (toy.images.float() / 255).to(config.device)
    models = {name: ifam(config, toy, images, told) for name, told in VARIANTS.items()}
    rows = []
    with torch.autocast(images.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        for what, runs in (("look and judge", answering), ("training step", training)):
            for model in models.values():
                model.train(what == "training step")
            with torch.set_grad_enabled(what == "training step"):
                timing = runs(models, images, toy)
                found = ratios(timing, "patches", rounds=config.rounds, device=config.device)
            masks = toy.masks.to(images.device) if what == "look and judge" else None
            shares = {name: {"patches_visible": kept(model, images, masks)} for name, model in models.items()}
            rows += [{"what": what, "batch": batch} | row | shares.get(row["variant"], {}) for row in found]
    return rows


@torch.no_grad()
def kept(model: IFam, images: Tensor, masks: Tensor | None) -> float:
    """Which share of the patches the second stage may see, of true masks or else by itself: much of the cost."""
    sight = model.look(images) if masks is None else true_sight(model, images, masks)
    told = sight.on_grid(model.what.vit.grid(images), (images.shape[2], images.shape[3]))
    return round(model.what.seen(images, *told).keep.float().mean().item(), 3)


# ---- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LooksAndIsTold:
    """Looks as ever, and then judges what true masks show."""

    model: IFam
    masks: Tensor

    def look(self, images: Tensor) -> Sight:
        self.model.look(images)
        return true_sight(self.model, images, self.masks)

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.model.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return self.model.maps(images)


def operations(config: PixelCost, data: Path) -> dict[str, Any]:
    vit, rows = load_backbone(config.backbone, classes=2), read_rows(data)
    there = rows.where(config.split)
    few = there[np.linspace(0, len(there) - 1, config.pictures).round().astype(int)]
    samples = [decode(rows, int(i), Canvas.of(vit.config.input)) for i in few]
    images = torch.stack([sample.image for sample in samples]).float() / 255
    masks = torch.stack([sample.mask for sample in samples if sample.mask is not None])
    dense, toy = Classifier(vit).eval(), make_toy(1, size=images.shape[-1])
    found = [per_picture("the dense ViT", [cost(dense, image[None]).gflops for image in images])]
    for name, told in VARIANTS.items():
        model = ifam(config, toy, toy.images.float() / 255, told).eval()
        pairs = [(image[None], LooksAndIsTold(model, mask[None])) for image, mask in zip(images, masks, strict=True)]
        found.append(per_picture(name, [cost(method, image).gflops for image, method in pairs]))
    pixels_seen = round(masks.float().mean().item(), 3)
    about = {"data": data.name, "fingerprint": fingerprint(rows), "split": config.split, "pixels_seen": pixels_seen}
    return {"backbone": config.backbone} | about | {"rows": found}


def per_picture(name: str, gflops: list[float]) -> dict[str, Any]:
    """With the 95 % interval of the mean."""
    mean, half = np.mean(gflops), 1.96 * np.std(gflops, ddof=1) / len(gflops) ** 0.5
    facts = {"gflops": round(float(mean), 2), "low": round(float(mean - half), 2), "high": round(float(mean + half), 2)}
    return {"variant": name} | facts | {"n": len(gflops)}


def main() -> None:
    config = tyro.cli(PixelCost, description=__doc__)
    if config.count is not None:
        counted = operations(config, config.count)
        for row in counted["rows"]:
            print(row)
        if config.out:
            record(config.out, "cpu", counted)
        return
    rows = [row for batch in config.batches for row in measure(config, batch)]
    table = Table("what", "batch", "variant", "ms", "ratio to patches", "middle 80 %", "patches visible", box=None)
    for row in rows:
        names = ("what", "batch", "variant", "milliseconds", "ratio_to_patches", "middle_80_percent")
        table.add_row(*(str(row[name]) for name in names), str(row.get("patches_visible", "")))
    Console(highlight=False, width=140).print(table)
    found = verdicts(rows, "patches", ASKED)
    for verdict in found:
        print(verdict)
    if config.out:
        facts = {"backbone": config.backbone, "precision": config.precision, "verdicts": found, "rows": rows}
        record(config.out, config.device, facts)


if __name__ == "__main__":
    main()
