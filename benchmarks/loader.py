"""How fast pictures come, against a plain loop over Pillow (open, convert, resize, crop, to NumPy) in the same run.

    python benchmarks/loader.py                                  # 512 photographs onto 224×224, 0, 1 and 2 workers
    python benchmarks/loader.py --count 4096 --workers 0 4 8 16

The photographs are those of the CUB pack (`cub224.zip` in --data), or toy pictures where there is none. Every round
times every variant once, in a new random order; a ratio is the median over rounds of images per second to those of the
plain loop in the same round, with the interval that covers the middle 80 % of rounds. Files are warm: what is measured
is decoding, not the disk. Absolute figures are of this machine alone.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL
import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table

from record import record
from sightline.data.batches import Batches
from sightline.data.cache import Cache
from sightline.data.images import Canvas
from sightline.data.rows import Rows
from sightline.datasets.toy_images import make_toy

SHARED = Path(os.environ.get("SIGHTLINE_SHARED", Path(__file__).parents[2] / "shared"))
PACK = "cub224.zip"
PLAIN = "plain Pillow loop"


@dataclass(frozen=True)
class Loader:
    data: Path = SHARED / "data"
    """The folder that holds cub224.zip."""
    count: int = 512
    """Pictures per pass."""
    size: int = 224
    crop: float = 0.875
    batch: int = 64
    workers: tuple[int, ...] = (0, 1, 2)
    rounds: int = 7
    out: Path | None = None
    """Write the figures there, as JSON."""


def pictures(config: Loader, folder: Path) -> tuple[Rows, Rows | None, str]:
    """Rows over plain files in the folder, the same rows straight from the pack, and what they show."""
    pack, packed = config.data / PACK, None
    if pack.is_file():
        with zipfile.ZipFile(pack) as archive:
            members = [name for name in archive.namelist() if name.startswith("images/")]
            members = members[:: max(1, len(members) // config.count)][: config.count]
            archive.extractall(folder, members)
        names, what = members, "CUB photographs, WebP, short side 224"
        packed = [f"{PACK}/{name}" for name in members]
    else:
        names, what = [f"{i}.jpg" for i in range(config.count)], "toy pictures, JPEG, 256×256"
        for name, image in zip(names, make_toy(config.count, size=256).images.permute(0, 2, 3, 1), strict=True):
            Image.fromarray(image.numpy()).save(folder / name, quality=90)
    n = len(names)
    rows = Rows("pictures", folder, names, np.zeros(n, dtype=np.int64), ("any",), np.zeros(n, dtype=np.int8))
    return rows, replace(rows, root=config.data, images=packed) if packed else None, what


def plain_loop(rows: Rows, config: Loader) -> list[np.ndarray]:
    side = int(config.size / config.crop)
    decoded = []
    for path in rows.images:
        image = Image.open(rows.root / path).convert("RGB")
        scale = side / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = round((image.width - config.size) / 2), round((image.height - config.size) / 2)
        decoded.append(np.asarray(image.crop((left, top, left + config.size, top + config.size))))
        if len(decoded) > config.batch:
            decoded.pop(0)
    return decoded


def variants(config: Loader, rows: Rows, packed: Rows | None, folder: Path) -> dict[str, Callable[[], object]]:
    canvas = Canvas((config.size, config.size), crop=config.crop)
    everything = np.arange(len(rows))

    def batches(rows: Rows, workers: int = 0, cache: Cache | None = None) -> Batches:
        return Batches(
            rows, everything, canvas, config.batch, shuffle=True, seed=0, workers=workers, cache=cache, masks=False
        )

    def passing(loaded: Batches) -> Callable[[], object]:
        return lambda: sum(len(batch) for batch in loaded.epoch(0))

    def building() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as new:
            passing(batches(rows, cache=Cache.open(rows, canvas, Path(new), everything)))()

    kept = Cache.open(rows, canvas, folder / "cache", everything)
    first = next(Batches(rows, everything, canvas, config.batch, shuffle=False, seed=0, cache=kept).epoch(0))
    last_of_plain = plain_loop(rows.take(everything[: config.batch]), config)
    assert np.array_equal(first.images.permute(0, 2, 3, 1).numpy(), np.stack(last_of_plain)), "not the same pictures"

    runs: dict[str, Callable[[], object]] = {PLAIN: lambda: plain_loop(rows, config)}
    for workers in config.workers:
        runs[f"batches, {workers} worker{'s' * (workers != 1)}"] = passing(batches(rows, workers))
    if packed is not None:
        runs["batches, 0 workers, straight from the zip"] = passing(batches(packed))
    runs["cache, first pass (built and read)"] = building
    runs["cache, second pass (recognised and read)"] = lambda: passing(
        batches(rows, cache=Cache.open(rows, canvas, folder / "cache", everything))
    )()
    runs["cache, later passes"] = passing(batches(rows, cache=kept))
    return runs


def measure(config: Loader, runs: dict[str, Callable[[], object]]) -> list[dict[str, object]]:
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(config.rounds):
        for name in order.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        ratios = sorted(plain / value for value, plain in zip(values, times[PLAIN], strict=True))
        tenth = len(ratios) // 10
        rows.append(
            {
                "variant": name,
                "images_per_second": round(config.count / statistics.median(values)),
                "ratio_to_plain": round(statistics.median(ratios), 2),
                "middle_80_percent": [round(ratios[tenth], 2), round(ratios[-1 - tenth], 2)],
                "rounds": config.rounds,
            }
        )
    return rows


def main() -> None:
    config = tyro.cli(Loader, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        rows, packed, what = pictures(config, Path(name))
        config = replace(config, count=len(rows))
        figures = measure(config, variants(config, rows, packed, Path(name)))
    table = Table("variant", "images/s", "ratio to plain", "middle 80 %", box=None, pad_edge=False)
    for row in figures:
        table.add_row(*(str(value) for key, value in row.items() if key != "rounds"))
    console = Console(highlight=False)
    console.print(f"{config.count} {what}, onto {config.size}×{config.size}")
    console.print(table)
    if config.out:
        facts = {"pillow": PIL.__version__, "pictures": what, "count": config.count, "crop": config.crop}
        facts |= {"canvas": [config.size, config.size], "batch": config.batch, "rows": figures}
        record(config.out, "cpu", facts)


if __name__ == "__main__":
    main()
