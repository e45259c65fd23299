"""What the grid of every where with every what is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Matrix:
    """Put every where to look together with every what to make of it, and measure them all on the same pictures.

    Whatever is to be chosen, validation data choose, by accuracy averaged over classes and without group labels; what
    is finished, or kept from another cell, is not done again."""

    data: Positional[Path]
    """A folder of class folders (perhaps under train, val and test), or a CSV file with columns image and label."""
    where: Annotated[tuple[str, ...], arg(metavar="WHERE …")]
    """attention:BACKBONE[:LAYER[:HEADS]], relevance:RUN (what erm or robustvit relies on), parts:RUN (that ifam or
    pdiscoformer discovered), masks:data, masks:FOLDER, found:BACKBONE, tokencut:BACKBONE, u2net:FILE.onnx, centre,
    random, everything."""
    what: Annotated[tuple[str, ...], arg(metavar="WHAT …")]
    """mask-probe:BACKBONE (frozen, all else hidden), crop-probe:BACKBONE (frozen, on crops), mask-dfr:BACKBONE and
    crop-dfr:BACKBONE (the same features, fitted with group labels), mask-zero-shot:CLIP, crop-zero-shot:CLIP,
    fine-tune:BACKBONE (all of it, all else hidden)."""
    collect: bool = False
    """Compute nothing: put together all cells that are in --out, also where neither weights nor runs are. What --where
    and --what name comes first."""
    out: Path | None = None
    """Folder for the table, the picture, and the answers of every cell. Default: runs/DATA-matrix."""
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, imagenet9:mixed_rand, ..."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what each backbone that answers expects."""
    crop: tuple[str, ...] = ("2/7", "2/7+1/7", "3/7", "4/7")
    """Sides of crops to choose among: shares of the picture's (2/7), pixels (64), or several crops (64+32)."""
    mass: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    """Where attention is to hide patches: how much of it the patches that are kept hold, to choose among."""
    epochs: int = 20
    """Of fine-tuning."""
    lr: float = 5e-5
    """Of fine-tuning, for the backbone, at a batch of 128."""
    prompts: tuple[str, ...] = ("a photo of a {}",)
    """What is said of a picture to CLIP, with {} for the class; of several, the embeddings are averaged."""
    names: Path | None = None
    """A JSON file that says what classes are called, where the data do not: {"CLASS": "what it is called"}."""
    pictures: bool = True
    """Draw matrix.png, and scaling.png where a backbone is there in several sizes."""
    batch: int = 128
    seed: int = 0
    split_seed: int = 0
    """Of the division into splits, where the data have none."""
    workers: int = 2
    """Processes that decode pictures."""
    cache: Path | None = None
    """Keep decoded pictures, sights and features in this folder. Default: cache, in --out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of what answers; auto: bf16 on a GPU. Where to look is always found in full precision."""

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-matrix"
