"""How cost grows: with tokens, parts, classes and images. Curves on a CPU, in small, with fitted exponents.

    python benchmarks/growth.py --out benchmarks/results/growth_cpu.json     # about a minute
    python benchmarks/growth.py --draw benchmarks/results/growth_cpu.json    # docs/pictures/growth.svg

An exponent is the slope of log time against log size, by least squares over the upper half of the sizes, where fixed
costs matter least. Each time is the fastest of several rounds, in which the sizes are measured in a new random order.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bare  # noqa: F401 (first, for machines without tyro)
from record import record, rounds_of
from sightline.config import Ifam
from sightline.data.rows import read_rows
from sightline.methods.base import PartSettings, make_selector
from sightline.methods.ifam import IFam, make_predictor, pixel_settings
from sightline.sight import Sight
from sightline.vit.weights import load_backbone

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "growth.svg"
BACKBONE, BATCH = "nano", 2
SIDES = (64, 96, 128, 192, 256, 384)  # of images; the ViT has 8-pixel patches
PARTS = (1, 4, 16, 64)
CLASS_COUNTS = (2, 100, 1_000, 10_000)
IMAGE_COUNTS = (1_000, 10_000, 100_000)
Curve = dict[int, Callable[[], object]]


def make(side: int, parts: int = 4, classes: int = 2) -> tuple[IFam, torch.Tensor, Sight]:
    """The default, with an image of this side and a sight of a quarter of it."""
    vit = load_backbone(f"random:{BACKBONE}")
    config = Ifam(Path("none"), parts=parts)
    halves = make_selector(vit, config, classes, side), make_predictor(vit, config, classes)
    model = IFam(*halves, PartSettings.of(config), pixel_settings(config)).eval()
    images = torch.rand(BATCH, 3, side, side, generator=torch.Generator().manual_seed(0))
    inside = torch.zeros(BATCH, side, side, dtype=torch.bool)
    inside[:, side // 4 : side * 3 // 4, side // 4 : side * 3 // 4] = True
    return model, images, Sight.of_pixels(inside, vit.grid(images))


def curves(folder: Path) -> dict[str, Curve]:
    tokens: dict[str, Curve] = {"look, tokens": {}, "judge, tokens": {}}
    for side in SIDES:
        model, images, sight = make(side)
        count = (side // model.what.vit.config.patch) ** 2
        tokens["look, tokens"][count] = lambda model=model, images=images: model.look(images)
        tokens["judge, tokens"][count] = lambda model=model, images=images, sight=sight: model.judge(images, sight)
    parts: Curve = {}
    for count in PARTS:
        model, images, _ = make(128, parts=count)
        parts[count] = lambda model=model, images=images: model.look(images)
    classes: Curve = {}
    for count in CLASS_COUNTS:
        model, images, sight = make(128, classes=count)
        classes[count] = lambda model=model, images=images, sight=sight: model.judge(images, sight)
    rows: Curve = {}
    for count in IMAGE_COUNTS:
        path = folder / f"{count}.csv"
        lines = (f"photos/{k:08d}.jpg,species{k % 100},{('train', 'val', 'test')[k % 3]}" for k in range(count))
        path.write_text("\n".join(["image,label,split", *lines]) + "\n", encoding="utf-8")
        rows[count] = lambda path=path: read_rows(path)
    return tokens | {"look, parts": parts, "judge, classes": classes, "read a CSV file, images": rows}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    half = len(sizes) // 2
    x, y = (np.log(values[half:]) if len(sizes) > 3 else np.log(values) for values in (sizes, seconds))
    return round(float(np.polyfit(x, y, 1)[0]), 2)


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        for what, curve in curves(Path(name)).items():
            for run in curve.values():
                run()
            times = rounds_of({str(size): run for size, run in curve.items()}, rounds, "cpu")
            seconds = [min(times[str(size)]) for size in curve]
            sizes = list(curve)
            row = {"what": what, "sizes": sizes, "milliseconds": [round(1000 * value, 3) for value in seconds]}
            found.append(row | {"exponent": exponent(sizes, seconds), "rounds": rounds})
            print(found[-1], flush=True)
    return found


def draw(path: Path, picture: Path = PICTURE) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    mpl.rcParams["svg.hashsalt"] = "growth"
    figure, axes = plt.subplots(1, len(rows), figsize=(2.6 * len(rows), 2.6), constrained_layout=True)
    for axis, row in zip(axes, rows, strict=True):
        what, _, of = row["what"].rpartition(", ")
        axis.loglog(row["sizes"], row["milliseconds"], marker="o", color="#31688e")
        axis.set(title=f"{what}: exponent {row['exponent']}", xlabel=of, ylabel="milliseconds")
        axis.title.set_fontsize(9)
        axis.set_ylim(min(row["milliseconds"]) / 3, max(row["milliseconds"]) * 3)
        axis.grid(which="major", alpha=0.3)
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--draw", type=Path, help="draw the figures of this file instead of measuring")
    settings = parser.parse_args()
    if settings.draw:
        draw(settings.draw)
        return
    began = time.perf_counter()
    rows = measure(settings.rounds)
    print(f"{math.ceil(time.perf_counter() - began)} s")
    if settings.out:
        record(settings.out, "cpu", {"backbone": f"random:{BACKBONE}", "batch": BATCH, "rows": rows})


if __name__ == "__main__":
    main()
