"""Speeds of data and of training: decoding, large CSV files, and the training loop against its own limit."""

from __future__ import annotations

import csv
import resource
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image

from record import middle, rounds_of
from sightline.config import Erm
from sightline.data.batches import Batches
from sightline.data.cache import Cache
from sightline.data.check import check
from sightline.data.images import Preprocess
from sightline.data.rows import Rows, read_rows
from sightline.datasets.toy_images import make_toy
from sightline.errors import UserError
from speed import Result, Speed

# ---- decoding --------------------------------------------------------------------------------------------------------

PACK = "cub224.zip"
PLAIN = "plain Pillow loop"
SIZE, CROP, BATCH = 224, 0.875, 64


def loader(config: Speed) -> Result:
    """CUB photographs, or toy images without a pack, onto 224×224. Files are warm: decoding is timed, not the disk."""
    with tempfile.TemporaryDirectory() as name:
        rows, packed, what = decodable(config, Path(name))
        runs = loader_variants(rows, packed, Path(name), config.workers or (0, 1, 2))
        for run in runs.values():
            run()
        rounds = config.rounds or 7
        times = rounds_of(runs, rounds, "cpu")
    figures = []
    for variant, values in times.items():
        ratio, ends = middle([plain / value for value, plain in zip(values, times[PLAIN], strict=True)], 2)
        speed = round(len(rows) / statistics.median(values))
        found = {"variant": variant, "images_per_second": speed, "ratio_to_plain": ratio, "middle_80_percent": ends}
        figures.append(found | {"rounds": rounds})
    facts = {"pillow": PIL.__version__, "pictures": what, "count": len(rows), "crop": CROP}
    return Result(facts | {"canvas": [SIZE, SIZE], "batch": BATCH, "rows": figures})


def decodable(config: Speed, folder: Path) -> tuple[Rows, Rows | None, str]:
    """Rows over plain files in the folder, the same rows straight from the pack, and what they show."""
    count, packed = config.count or 512, None
    if config.data is not None and (pack := config.data / PACK).is_file():
        with zipfile.ZipFile(pack) as archive:
            members = [name for name in archive.namelist() if name.startswith("images/")]
            names = members[:: max(1, len(members) // count)][:count]
            archive.extractall(folder, names)
        what, packed = "CUB photographs, WebP, short side 224", [f"{PACK}/{name}" for name in names]
    else:
        names, what = [f"{i}.jpg" for i in range(count)], "toy pictures, JPEG, 256×256"
        for name, image in zip(names, make_toy(count, size=256).images.permute(0, 2, 3, 1), strict=True):
            Image.fromarray(image.numpy()).save(folder / name, quality=90)
    n = len(names)
    rows = Rows("pictures", folder, names, np.zeros(n, dtype=np.int64), ("any",), np.zeros(n, dtype=np.int8))
    return rows, replace(rows, root=config.data, images=packed) if packed else None, what


def plain_loop(rows: Rows) -> list[np.ndarray]:
    side, decoded = int(SIZE / CROP), []
    for path in rows.images:
        image = Image.open(rows.root / path).convert("RGB")
        scale = side / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
        decoded.append(np.asarray(image.crop((left, top, left + SIZE, top + SIZE))))
        if len(decoded) > BATCH:
            decoded.pop(0)
    return decoded


def loader_variants(
    rows: Rows, packed: Rows | None, folder: Path, workers: tuple[int, ...]
) -> dict[str, Callable[[], object]]:
    canvas, everything = Preprocess((SIZE, SIZE), crop=CROP), np.arange(len(rows))

    def batches(rows: Rows, workers: int = 0, cache: Cache | None = None, *, shuffle: bool = True) -> Batches:
        return Batches(
            rows, everything, canvas, BATCH, shuffle=shuffle, seed=0, workers=workers, cache=cache, masks=False
        )

    def straight_through_from(loaded: Batches) -> Callable[[], object]:
        return lambda: sum(len(batch) for batch in loaded.epoch(0))

    def building() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as new:
            straight_through_from(batches(rows, cache=Cache.open(rows, canvas, Path(new), everything)))()

    kept = Cache.open(rows, canvas, folder / "cache", everything)
    first = next(batches(rows, cache=kept, shuffle=False).epoch(0)).images.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(first, np.stack(plain_loop(rows.take(everything[:BATCH])))), "not the same images"
    runs: dict[str, Callable[[], object]] = {PLAIN: lambda: plain_loop(rows)}
    for count in workers:
        runs[f"batches, {count} worker{'s' * (count != 1)}"] = straight_through_from(batches(rows, count))
    if packed is not None:
        runs["batches, 0 workers, straight from the zip"] = straight_through_from(batches(packed))
    runs["cache, first pass (built and read)"] = building
    runs["cache, second pass (recognised and read)"] = lambda: straight_through_from(
        batches(rows, cache=Cache.open(rows, canvas, folder / "cache", everything))
    )()
    runs["cache, later passes"] = straight_through_from(batches(rows, cache=kept))
    return runs


# ---- a large CSV file ------------------------------------------------------------------------------------------------


def rows(config: Speed) -> Result:
    """The images do not exist, so every row also costs a failed look at the disk, and is reported as missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "label", "group_place", "mask", "box", "split"])
            for i in range(config.count or 1_000_000):
                split = ("train", "train", "train", "val", "test")[i % 5]
                name = f"photos/camera{i % 40:02d}/picture_{i:08d}.jpg"
                background, box = ("land", "water")[i // 7 % 2], "10 20 110 140"
                writer.writerow([name, f"species{i % 100:03d}", background, f"masks/{i}.png", box, split])
        began = time.perf_counter()
        found = read_rows(path)
        read = time.perf_counter()
        report = check(found, open_images=False)
        checked = time.perf_counter()
    figures = {
        "rows": len(found),
        "seconds_to_read": round(read - began, 2),
        "seconds_to_check": round(checked - read, 2),
        "seconds": round(checked - began, 2),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "findings": len(report.findings),
    }
    return Result(figures, [figures])


# ---- training --------------------------------------------------------------------------------------------------------

TRAINED = {"random:augreg-ti16": 128, "random:deit-s16": 256, "random:deit-b16": 256}  # backbone: batch
STEPS, WARM_UP = 60, 10


def training(config: Speed) -> Result:
    """Images per second of real training, from a cache and from files, against the same steps on a resident batch."""
    from sightline.train import train
    from sightline.training.run_folder import read_run

    if config.data is None:
        raise UserError("--data: name the dataset to train on")
    backbones, found = config.backbones or tuple(TRAINED), []
    batches = config.batches or tuple(TRAINED.get(name, 256) for name in backbones)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for k, (backbone, batch) in enumerate(zip(backbones, batches, strict=True)):
            for compiled in (False, True):
                erm = Erm(
                    config.data, backbone, folder / f"{k}-{compiled}-limit", batch=batch, epochs=config.epochs,
                    compile=compiled, precision=config.precision, device=config.device,
                    workers=(config.workers or (14,))[0],
                )  # fmt: skip
                bound = training_limit(erm)
                for way, cache in {"cache": folder / "cache", **({} if compiled else {"files": None})}.items():
                    run = train(replace(erm, out=folder / f"{k}-{compiled}-{way}", cache=cache))
                    speed = read_run(run).facts["speed"]
                    row = {"backbone": backbone, "batch": batch, "compiled": compiled, "from": way, "limit": bound}
                    found.append(row | speed | {"share_of_limit": speed["images_per_second"] / bound})
    note = "images_per_second: of the last epoch; waiting: share of the time in which the loop waited for a batch"
    return Result({"note": note, "precision": config.precision, "rows": found})


def training_limit(erm: Erm) -> float:
    """Images per second of forward, backward, clipping and optimiser step on a batch that stays on the device."""
    from sightline.methods.base import open_backbone
    from sightline.methods.erm import Classifier
    from sightline.train import compile_blocks, make_optimizer, now, train_step
    from sightline.training.batches import training_batches, training_view
    from sightline.training.distributed import make_accelerator
    from sightline.training.run_folder import begin_run
    from sightline.training.trainable import StepInfo, TrainBatch, TrainContext

    rows, accelerator = read_rows(erm.data), make_accelerator(erm.device, erm.precision)
    vit, expects = open_backbone(erm, len(rows.classes))
    model = Classifier(vit).to(accelerator.device).train()
    context = TrainContext(rows, begin_run(erm, rows), accelerator, expects)
    batches = training_batches(context, replace(erm, workers=0), model)
    optimizer = make_optimizer(model, erm, batches, accelerator.device)
    if erm.compile:
        compile_blocks(model)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    batch = next(iter(batches.epoch(0))).to(accelerator.device)
    when = StepInfo(0, 0, 0, 1, len(batches), torch.arange(len(batch)))
    train_batch: TrainBatch = model.make_train_batch(batch, training_view(erm.augment, expects)[1], when)
    began = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            began = now(accelerator.device)
        train_step(wrapped, train_batch, optimizer, accelerator, erm, batches.batch)
    return STEPS * batches.batch / (now(accelerator.device) - began)
