"""Is the GPU kept busy? Images per second of real training, against the same steps on one batch that is there already.

    python benchmarks/training.py DATA --out training_h200.json

The limit is the model's own: forward, backward, clipping and the optimiser's step on a lesson that stays on the device.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from tyro.conf import Positional

from record import record
from sightline.config import Erm
from sightline.data.rows import read_rows
from sightline.methods.base import open_backbone
from sightline.methods.erm import Classifier
from sightline.train import compile_blocks, make_optimizer, now, train_step, train
from sightline.training.context import TrainContext, TrainBatch, StepInfo, training_batches, view
from sightline.training.distributed import make_accelerator
from sightline.training.run_folder import begin, read_run


@dataclass(frozen=True)
class Training:
    data: Positional[Path]
    backbones: tuple[str, ...] = ("random:augreg-ti16", "random:deit-s16", "random:deit-b16")
    batches: tuple[int, ...] = (128, 256, 256)
    compile: tuple[bool, ...] = (False, True)
    decode: bool = True
    """Also without a cache, from the files, with as many processes as --workers."""
    workers: int = 14
    epochs: int = 3
    """The speed is that of the last one."""
    steps: int = 60
    """Of the limit."""
    device: str = "auto"
    precision: str = "bf16"
    out: Path | None = None


def settings(config: Training, k: int, out: Path, compiled: bool) -> Erm:
    return Erm(
        config.data, config.backbones[k], out, batch=config.batches[k], epochs=config.epochs, compile=compiled,
        precision=config.precision, device=config.device, workers=config.workers,
    )  # fmt: skip


def limit(erm: Erm, steps: int) -> float:
    """Images per second of steps on a lesson that is there already."""
    rows, accelerator = read_rows(erm.data), make_accelerator(erm.device, erm.precision)
    vit, expects = open_backbone(erm, len(rows.classes))
    model = Classifier(vit).to(accelerator.device).train()
    desk = TrainContext(rows, begin(erm, rows), accelerator, expects)
    batches = training_batches(desk, replace(erm, workers=0), model)
    optimizer = make_optimizer(model, erm, batches, accelerator.device)
    if erm.compile:
        compile_blocks(model)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    batch = next(iter(batches.epoch(0))).to(accelerator.device)
    when = StepInfo(0, 0, 0, 1, len(batches), torch.arange(len(batch)))
    lesson: TrainBatch = model.lesson(batch, view(erm.augment, expects)[1], when)
    began = 0.0
    for step in range(10 + steps):
        if step == 10:
            began = now(accelerator.device)
        train_step(wrapped, lesson, optimizer, accelerator, erm, batches.batch)
    return steps * batches.batch / (now(accelerator.device) - began)


def main() -> None:
    config = tyro.cli(Training, description=__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for k, backbone in enumerate(config.backbones):
            for compiled in config.compile:
                name = f"{k}-{compiled}"
                bound = limit(settings(config, k, folder / f"{name}-limit", compiled), config.steps)
                ways = {"cache": folder / "cache"} | ({"files": None} if config.decode and not compiled else {})
                for way, cache in ways.items():
                    erm = replace(settings(config, k, folder / f"{name}-{way}", compiled), cache=cache)
                    speed = read_run(train(erm)).facts["speed"]
                    row = {"backbone": backbone, "batch": erm.batch, "compiled": compiled, "from": way, "limit": bound}
                    row |= speed | {"share_of_limit": speed["images_per_second"] / bound}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if config.out:
        cuda = torch.cuda.is_available() and config.device != "cpu"
        note = "images_per_second: of the last epoch; waiting: share of the time in which the loop waited for a batch"
        record(config.out, "cuda" if cuda else "cpu", {"note": note, "precision": config.precision, "rows": rows})


if __name__ == "__main__":
    main()
