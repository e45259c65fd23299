"""How fast A² finds its crops, and what looking first costs, against answering from the whole picture.

    python benchmarks/crop_search.py --count 300 --backbones random:nano --out crop_search_cpu.json
    python benchmarks/crop_search.py --device cuda --dtype bfloat16 --backbones dino_s16_reg4.safetensors \\
        vit_ti16_augreg_in1k.safetensors --out crop_search_h200.json

`search`: the best crops of many attention maps, all at once, against one map after the other, with the same integral
images on the same device, and in NumPy on the CPU, as one would write it down. Every round times all of them; ratios
are of times per map in the same round. `pipeline`: attention of one backbone, crops, embeddings of another, from
pictures that are there already, against embedding these pictures whole; and against its own limit, which is the
attention's ViT and the crops' ViT alone, without search, cutting and resizing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from ratios import ratios

from record import record
from sightline.vit.weights import load_backbone
from sightline.what.probe import BoxProbe
from sightline.where.crops import CropSight, greedy_crops

PLANS = {"1 crop": (64,), "2 crops": (64, 32), "4 crops": (64, 64, 64, 64)}


@dataclass(frozen=True)
class CropSearch:
    count: int = 10_000
    """Maps."""
    as_list: int = 500
    """Of them, so many one after the other: it takes long, and each takes as long as the next."""
    side: int = 224
    chunk: int = 512
    """Maps at once."""
    rounds: int = 5
    backbones: tuple[str, ...] = ("random:nano",)
    """Each looks for each."""
    batch: int = 256
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    out: Path | None = None


# ---- the search ------------------------------------------------------------------------------------------------------


def attention_like(count: int, side: int, device: str) -> torch.Tensor:
    """Maps as attention has them: a few bright patches, enlarged."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.rand(count, 1, 14, 14, generator=generator).pow(8)
    return torch.cat(
        [F.interpolate(some.to(device), (side, side), mode="bilinear")[:, 0] for some in patches.split(512)]
    )


def written_down(attention: np.ndarray, sides: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """One map, in NumPy: sums of all squares by an integral image, and the best that overlaps none before it."""
    integral = np.pad(attention.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    boxes: list[tuple[int, int, int, int]] = []
    for s in sides:
        sums = integral[s:, s:] - integral[:-s, s:] - integral[s:, :-s] + integral[:-s, :-s]
        for left, top, right, bottom in boxes:
            sums[max(0, top - s + 1) : bottom, max(0, left - s + 1) : right] = -np.inf
        y, x = np.unravel_index(sums.argmax(), sums.shape)
        boxes.append((int(x), int(y), int(x) + s, int(y) + s))
    return boxes


def seconds(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def search(config: CropSearch) -> list[dict[str, Any]]:
    maps = attention_like(config.count, config.side, config.device)
    few = maps[: min(config.as_list, config.count)]
    in_numpy, rows = few.cpu().numpy(), []
    for plan, sides in PLANS.items():
        chunks = maps.split(config.chunk)
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "batched": (len(maps), lambda s=sides, m=chunks: torch.cat([greedy_crops(some, s) for some in m])),
            "one by one": (len(few), lambda s=sides: torch.cat([greedy_crops(one[None], s) for one in few])),
            "one by one, NumPy": (len(few), lambda s=sides: torch.tensor([written_down(one, s) for one in in_numpy])),
        }  # fmt: skip
        found = {name: work() for name, (_, work) in ways.items()}
        alike = torch.equal(found["batched"][: len(few)], found["one by one"])
        same = (found["batched"][: len(few)].cpu() == found["one by one, NumPy"]).all(dim=2).float().mean().item()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(config.rounds):
            for name, (count, work) in ways.items():
                times[name].append(seconds(work, config.device) / count)
        for name, (count, _) in ways.items():
            relative = [slow / fast for slow, fast in zip(times[name], times["batched"], strict=True)]
            rows.append(
                {
                    "crops": plan, "way": name, "maps": count, "of_side": config.side, "rounds": config.rounds,
                    "maps_per_second": round(1 / statistics.median(times[name])),
                    "times_as_long_as_batched": round(statistics.median(relative), 2),
                    "lowest_highest": [round(min(relative), 2), round(max(relative), 2)],
                    "same_boxes_as_one_by_one": alike, "share_of_boxes_as_numpy": round(same, 4),
                }
            )  # fmt: skip
    return rows


# ---- the pipeline ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def pipeline(config: CropSearch) -> list[dict[str, Any]]:
    vits = {Path(name).stem: load_backbone(name, classes=0).eval().to(config.device) for name in config.backbones}
    rows = []
    for what_name, what in vits.items():
        size = what.config.input.size
        images = torch.rand(config.batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(config.device)
        runs: dict[str, Callable[[], object]] = {"full": under(config, lambda w=what, i=images: w(i).cls)}
        limits: dict[str, tuple[str, int]] = {}
        for name, vit in vits.items():
            looking = CropSight(vit, (2 / 7,))
            runs[f"attention of {name}"] = under(config, lambda v=looking, i=images: v.attention(i))
            for count in (1, 2):
                crops, embed = CropSight(vit, (2 / 7,) * count), BoxProbe(what, size, count)
                words = f"A2 {name}>{what_name}, {count} crop{'s' * (count > 1)}"
                runs[words] = under(config, lambda c=crops, e=embed, i=images: e.embed(i, c.look(i)))
                limits[words] = name, count
        timed = {row["variant"]: row for row in ratios(runs, "full", rounds=config.rounds, device=config.device)}
        rows += [as_rate(row, timed, limits, config.batch) | {"what": what_name} for row in timed.values()]
    return rows


def under(config: CropSearch, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            return work()

    return run


def as_rate(
    row: dict[str, Any], timed: dict[str, Any], limits: dict[str, tuple[str, int]], batch: int
) -> dict[str, Any]:
    found = row | {"images_per_second": round(1000 * batch / row["milliseconds"])}
    if row["variant"] in limits:
        name, count = limits[row["variant"]]
        least = timed[f"attention of {name}"]["milliseconds"] + count * timed["full"]["milliseconds"]
        found["share_of_its_limit"] = round(least / row["milliseconds"], 3)
    return found


def main() -> None:
    config = tyro.cli(CropSearch, description=__doc__)
    figures = {"search": search(config), "pipeline": pipeline(config)}
    for row in (*figures["search"], *figures["pipeline"]):
        print(row, flush=True)
    if config.out:
        about = {"batch": config.batch, "dtype": config.dtype}
        record(config.out, config.device, about | figures)


if __name__ == "__main__":
    main()
