"""What hiding costs and what removal saves, against the dense ViT in the same run.

    python benchmarks/speed.py                        # ViT-S at 224, batch 1 and 16, on the CPU
    python benchmarks/speed.py --device cuda --dtype bfloat16 --batches 1 16 256

Every round times every variant once, in a new random order; a ratio is the median over rounds of variant / dense of the
same round, with the interval that covers the middle 80 % of rounds. Absolute times are of this machine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from ratios import ratios, verdicts
from rich.console import Console
from rich.table import Table

from record import record
from sightline.vit.backbones import KNOWN
from sightline.vit.model import ViT

SHARES = (1.0, 0.5, 0.25, 0.1)
ASKED = {"mask, 50% visible": 1.1, "removal, 25% visible": 0.5}


@dataclass(frozen=True)
class Speed:
    backbone: str = "dino-s16"
    """A known backbone; its weights do not matter here and are random."""
    batches: tuple[int, ...] = (1, 16)
    rounds: int = 25
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    out: Path | None = None
    """Write the figures there, as JSON."""


def variants(vit: ViT, images: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The dense ViT, removal at several visible shares, and the mask path (with half of the patches hidden)."""
    grid = vit.grid(images)
    patches = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(0)

    def visible(share: float) -> torch.Tensor:
        order = torch.rand(len(images), patches, generator=generator).argsort(dim=1)
        return (order < round(share * patches)).view(-1, *grid).to(images.device)

    keeps = {share: visible(share) for share in SHARES}
    runs: dict[str, Callable[[], object]] = {"dense": lambda: vit(images)}
    for share, keep in keeps.items():
        runs[f"removal, {share:.0%} visible"] = lambda keep=keep: vit(images, keep)
    runs["mask, 50% visible"] = lambda: vit(images, keeps[0.5], hide="mask")
    pixels = torch.rand(len(images), *images.shape[-2:], generator=generator).to(images.device) < 0.5
    runs["removal, 25% visible, pixels blanked"] = lambda: vit(images, keeps[0.25], pixels)
    uneven = torch.rand(len(images), *grid, generator=generator).to(images.device) < 0.25
    runs["removal, about 25% visible, rows of unequal length"] = lambda: vit(images, uneven)
    runs["dense, CLS attention of the last block"] = lambda: vit(images, cls_attention=[-1])
    return runs


@torch.inference_mode()
def measure(config: Speed, batch: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    vit = ViT(KNOWN[config.backbone].config).eval().to(config.device, getattr(torch, config.dtype))
    images = torch.rand(batch, 3, *vit.config.input.size, device=config.device)
    runs = variants(vit, images)
    return [{"batch": batch} | row for row in ratios(runs, "dense", rounds=config.rounds, device=config.device)]


def main() -> None:
    config = tyro.cli(Speed, description=__doc__)
    rows = [row for batch in config.batches for row in measure(config, batch)]
    table = Table("batch", "variant", "ms", "ratio to dense", "middle 80 %", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            *map(str, (row["batch"], row["variant"], row["milliseconds"], row["ratio_to_dense"])),
            str(row["middle_80_percent"]),
        )
    Console(highlight=False).print(table)
    found = verdicts(rows, "dense", ASKED)
    for verdict in found:
        print(verdict)
    if config.out:
        facts = {"backbone": config.backbone, "dtype": config.dtype, "verdicts": found, "rows": rows}
        record(config.out, config.device, facts)


if __name__ == "__main__":
    main()
