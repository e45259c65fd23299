"""Pretraining: how fast the loop is against its own limit, and what a family of sizes learns from the same images.

    python benchmarks/pretrain.py speed  --compile --precision bf16 --out benchmarks/results/pretrain-speed.json
    python benchmarks/pretrain.py family --compile --precision bf16 --out benchmarks/results/pretrain-family.json
    python benchmarks/pretrain.py measure --backbone sightline-nano --out benchmarks/results/pretrain-nano.json

`speed` takes turns: an epoch of the real loop, then as many steps of the same student and teacher on fixed crops (no
data, no augmentation). `family` pretrains every size, and compares it on held-out images with random weights and with
a supervised model of the same size: k-NN accuracy, and the attention mass on the creature.
`measure` does so for weights that are there already, beside random ones.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from record import record
from sightline.config import Erm, Pretrain
from sightline.data.drawing import image_grid, overlay_attention
from sightline.data.images import Preprocess, decode
from sightline.data.rows import Rows, read_rows
from sightline.datasets.toy import write_toy
from sightline.load import load_as_trained as load
from sightline.methods.dino import knn_correct, patch_attention
from sightline.metrics.attention import mass_and_hit
from sightline.metrics.intervals import wilson
from sightline.pretrain import new_model, pretrain
from sightline.train import now, set_up, train, train_epoch, train_step
from sightline.training.distributed import make_accelerator
from sightline.training.run_folder import begin_run
from sightline.training.trainable import StepInfo, TrainContext
from sightline.vit.model import ViT
from sightline.vit.weights import load_backbone, save_backbone


@dataclass(frozen=True)
class Common:
    data: Path | None = None
    """A folder that `sightline toy` wrote. Default: one is made."""
    images: int = 8192
    """How many to make for training."""
    pixels: int = 96
    patch: int = 8
    large: int = 64
    small: int = 32
    batch: int = 512
    prototypes: int = 16384
    head_width: int = 2048
    workers: int = 8
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    seed: int = 0
    out: Path | None = None
    """Write the results there, as JSON; figures beside it."""
    runs: Path | None = None
    """Keep data and runs in this folder, and resume what is there. Default: they are deleted."""


@dataclass(frozen=True)
class Speed(Common):
    size: Literal["nano", "ti", "s", "b"] = "nano"
    rounds: int = 7


@dataclass(frozen=True)
class Family(Common):
    images: int = 60_000
    sizes: tuple[Literal["nano", "ti", "s", "b"], ...] = ("nano", "ti", "s")
    epochs: int = 50
    warmup: float = 5.0
    supervised_epochs: int = 10
    supervised_lr: float = 5e-4
    test: int = 2000
    validate_every: int = 1
    keep_every: int | None = None
    """Keep the backbones of every so many epochs, to compare sizes at the same k-NN accuracy."""
    bank: int = 10_000
    """Training images whose labels the nearest neighbours vote with."""


@dataclass(frozen=True)
class Measure(Common):
    backbone: str = "sightline-nano"
    images: int = 10_000
    test: int = 2048


def pretraining(config: Common, data: Path, out: Path, arch: str, epochs: int, warmup: float) -> Pretrain:
    shared = ("patch", "batch", "prototypes", "head_width", "workers", "device", "precision", "compile", "seed")
    settings: Any = {name: getattr(config, name) for name in shared}
    settings |= {"arch": arch, "size": config.pixels, "global_size": config.large, "local_size": config.small}
    return Pretrain(data, out=out, epochs=epochs, warmup=warmup, cache=out.parent / "cache", resume=True, **settings)


def toy_images(config: Common, folder: Path, test: int) -> Path:
    if config.data is not None or (folder / "toy" / "rows.csv").is_file():
        return config.data or folder / "toy"
    held_out = {"val": min(2000, max(16, config.images // 8)), "test": test}
    side = -(-round(config.pixels / 0.875) // 8) * 8  # room for crops at full size, as the loop decodes them
    return write_toy(
        folder / "toy", train=config.images, size=side, correlation=0.5, seed=1, workers=config.workers, **held_out
    )


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(config: Speed, folder: Path) -> dict:
    data = toy_images(config, folder, test=16)
    asked = pretraining(config, data, folder / "run", config.size, config.rounds + 1, 1.0)
    asked = replace(asked, full_size_fraction=0.0, save_minutes=1e9)
    rows = read_rows(data)
    accelerator = make_accelerator(config.device, config.precision)
    model = new_model(asked)
    context = TrainContext(rows, begin_run(asked, rows), accelerator, model.teacher.vit.config.input)
    turns = []
    with ExitStack() as to_close:
        state = set_up(model, context, asked, to_close)
        device, steps = accelerator.device, len(state.batches)
        batch = next(state.batches.epoch(0)).to(device)
        when = StepInfo(0, 0, 0, asked.epochs, steps, torch.arange(len(batch)))
        train_batch = model.make_train_batch(batch, state.augment, when)
        for turn in range(config.rounds + 1):  # the first one warms up
            state.position.epoch, state.position.step, state.position.sums = turn, 0, {}
            real = train_epoch(state)
            began = now(device)
            for _ in range(steps):
                train_step(state.wrapped, train_batch, state.optimizer, accelerator, asked, state.batches.batch)
                model.after_step(when)
            limit = steps * state.batches.batch / (now(device) - began)
            began = now(device)
            for _ in range(steps):
                model.make_train_batch(batch, state.augment, when)
            turns.append((real.rate, limit, real.waiting_share, (now(device) - began) / real.seconds))
    rates, limits, waiting, cropping = zip(*turns[1:], strict=True)
    shares = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "size": config.size, "batch": state.batches.batch, "steps_per_round": steps, "rounds": config.rounds,
        "crops": [f"2 × {config.large} px", f"{asked.local_crops} × {config.small} px"],
        "precision": config.precision, "compiled": config.compile,
        "images_per_second": round(statistics.median(rates)),
        "limit_images_per_second": round(statistics.median(limits)),
        "share_of_limit": round(statistics.median(shares), 4),
        "share_of_limit_lowest_highest": [round(min(shares), 4), round(max(shares), 4)],
        "waiting_for_data": round(statistics.median(waiting), 4),
        "cropping_alone": round(statistics.median(cropping), 4),
        "gpu_memory_gib": None if memory is None else round(memory, 1),
    }  # fmt: skip


# ---- the family ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledPredictions:
    """Features and attention of some images."""

    features: torch.Tensor  # [n, D]
    attention: torch.Tensor  # [n, heads, N]


@torch.no_grad()
def look(vit: ViT, images: torch.Tensor, device: torch.device) -> LabelledPredictions:
    vit = vit.to(device).eval()
    features, attention = [], []
    for some in images.split(512):
        out = vit(some.to(device).float() / 255, cls_attention=[-1])
        features.append(F.normalize(out.cls.float(), dim=1).cpu())
        attention.append(patch_attention(vit, out.cls_attention).cpu())
    return LabelledPredictions(torch.cat(features), torch.cat(attention))


def open_images(
    rows: Rows, indices: np.ndarray, preprocess: Preprocess
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    samples = [decode(rows, int(i), preprocess) for i in indices]
    masks = torch.stack([sample.mask for sample in samples if sample.mask is not None])
    return torch.stack([sample.image for sample in samples]), torch.from_numpy(rows.labels[indices]), masks


def with_interval(values: torch.Tensor, seed: int = 0) -> dict[str, object]:
    """The mean, with a bootstrap over images."""
    numbers = values.double().numpy()
    draws = np.random.default_rng(seed).integers(0, len(numbers), (2000, len(numbers)))
    low, high = np.quantile(numbers[draws].mean(axis=1), [0.025, 0.975])
    return {
        "value": round(float(numbers.mean()), 4),
        "interval": [round(float(end), 4) for end in (low, high)],
        "n": len(numbers),
    }


def maps_of(vit: ViT, seen: LabelledPredictions) -> torch.Tensor:
    """[n, 1 + heads, H, W]: the heads' mean, then each head."""
    side = vit.config.input.size[0] // vit.config.patch
    maps = torch.cat([seen.attention.mean(1, keepdim=True), seen.attention], dim=1)
    return maps.unflatten(2, (side, side))


def measure(vit: ViT, splits: dict[str, tuple], device: torch.device) -> tuple[dict, torch.Tensor]:
    """Figures on the test images (the best head is chosen on validation images), and the maps to draw."""
    bank, val, test = (look(vit, splits[name][0], device) for name in ("bank", "val", "test"))
    right = knn_correct(test.features, splits["test"][1], bank.features, splits["bank"][1])
    best = int(mass_and_hit(maps_of(vit, val), splits["val"][2])[0][:, 1:].mean(0).argmax())
    maps = maps_of(vit, test)[:, [0, 1 + best]]
    mass, hit = mass_and_hit(maps, splits["test"][2])
    low, high = wilson(int(right.sum()), len(right))
    figures = {
        "knn": {
            "value": round(right.float().mean().item(), 4), "interval": [round(low, 4), round(high, 4)], "n": len(right)
        },
        "mass": with_interval(mass[:, 0]),
        "hit": with_interval(hit[:, 0]),
        "best_head": best,
        "mass_of_best_head": with_interval(mass[:, 1]),
        "hit_of_best_head": with_interval(hit[:, 1]),
    }  # fmt: skip
    return figures, maps


def supervised(config: Family, data: Path, folder: Path, random: Path) -> ViT:
    asked = Erm(
        data, str(random), folder, batch=config.batch, epochs=config.supervised_epochs, lr=config.supervised_lr,
        head_lr_factor=1.0, warmup=1.0, workers=config.workers, device=config.device, precision=config.precision,
        compile=config.compile, cache=folder.parent / "cache", seed=config.seed, resume=True,
    )  # fmt: skip
    return load(train(asked)).method.vit


def open_splits(rows: Rows, pixels: int, bank: int) -> dict[str, tuple]:
    chosen = {
        "bank": rows.split_indices("train")[:bank],
        "val": rows.split_indices("val"),
        "test": rows.split_indices("test"),
    }
    return {name: open_images(rows, indices, Preprocess((pixels, pixels))) for name, indices in chosen.items()}


def attention_sheet(images: torch.Tensor, maps: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "held-out images": images,
        "attention of CLS in the last block, mean of the heads": overlay_attention(images, maps[:, 0]),
        "its best head (chosen on other images)": overlay_attention(images, maps[:, 1]),
    }


def measured(config: Measure, folder: Path) -> dict:
    rows = read_rows(toy_images(config, folder, config.test))
    splits, device = open_splits(rows, config.pixels, config.images), make_accelerator(config.device).device
    vits = {"pretrained": load_backbone(config.backbone), "random": load_backbone(f"random:{config.backbone}")}
    figures = {name: measure(vit, splits, device) for name, vit in vits.items()}
    if config.out is not None:
        few = slice(0, 8)
        figure = image_grid(attention_sheet(splits["test"][0][few].float() / 255, figures["pretrained"][1][few]))
        figure.save(config.out.with_suffix(".png"))
    return {"backbone": config.backbone} | {name: found for name, (found, _) in figures.items()}


def family(config: Family, folder: Path) -> dict:
    data = toy_images(config, folder, config.test)
    rows = read_rows(data)
    splits = open_splits(rows, config.pixels, config.bank)
    few, members, device = slice(0, 8), [], make_accelerator(config.device).device
    for size in config.sizes:
        asked = pretraining(config, data, folder / size, size, config.epochs, config.warmup)
        asked = replace(asked, validate_every=config.validate_every, keep_every=config.keep_every)
        random = new_model(asked).student.vit
        save_backbone(random, folder / f"random-{size}.safetensors")
        began = time.perf_counter()
        made = pretrain(asked)
        minutes = (time.perf_counter() - began) / 60
        vits = {"pretrained": load_backbone(made / "backbone.safetensors"), "random": random}
        vits["supervised"] = supervised(config, data, folder / f"erm-{size}", folder / f"random-{size}.safetensors")
        figures = {name: measure(vit, splits, device) for name, vit in vits.items()}
        maps = figures["pretrained"][1]
        images = splits["test"][0][few].float() / 255
        captions = attention_sheet(images, maps[few])
        captions["supervised, same size: mean of the heads"] = overlay_attention(
            images, figures["supervised"][1][few, 0]
        )
        where = (config.out or folder / "family.json").with_name(f"attention-{size}.png")
        where.parent.mkdir(parents=True, exist_ok=True)
        image_grid(captions).save(where)
        parameters = sum(p.numel() for p in random.parameters())
        row = {"size": size, "parameters": parameters, "minutes": round(minutes, 2)}
        members.append(row | {name: found for name, (found, _) in figures.items()})
        print(
            row, {name: (f["knn"]["value"], f["mass"]["value"], f["hit"]["value"]) for name, (f, _) in figures.items()}
        )
    even = mass_and_hit(torch.ones(len(splits["test"][2]), 1, 2, 2), splits["test"][2])[0]
    return {"pictures": len(rows.split_indices("train")), "pixels": config.pixels, "patch": config.patch,
            "epochs": config.epochs, "mass_of_even": with_interval(even[:, 0]), "family": members}  # fmt: skip


def main() -> None:
    sub = tyro.conf.subcommand
    kinds = Annotated[Speed, sub("speed")] | Annotated[Family, sub("family")] | Annotated[Measure, sub("measure")]
    config = tyro.cli(kinds, description=__doc__)  # ty: ignore[no-matching-overload]
    with tempfile.TemporaryDirectory() as name:
        folder = config.runs or Path(name)
        figures = {Speed: speed, Family: family, Measure: measured}[type(config)](config, folder)
    print(figures)
    if config.out is not None:
        device = "cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda"
        record(config.out, device, figures)


if __name__ == "__main__":
    main()
