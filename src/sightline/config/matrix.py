"""Settings of the matrix: every selector (where) with every predictor (what)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from .flags import SOFTWARE, CacheFolder, Dataset, Writes
from .limits import Checked, Count, NotNegative, PositiveFraction, Processes, Seed, Side

TABLE = {"matrix.json": ("wheres", "whats"), "cells.jsonl": ('{"where":',)}
FIGURES = {"matrix.png": (SOFTWARE,), "scaling.png": (SOFTWARE,)}


@dataclass(frozen=True)
class Matrix(Checked):
    """Combine every selector (where) with every predictor (what), and evaluate all pairs on the same images.

    Hyperparameters are selected by class-balanced validation accuracy, without group labels. Finished cells are not
    computed again."""

    data: Dataset
    """Folder of class folders (optionally under train, val and test), or a CSV file with columns image and label."""
    where: Annotated[tuple[str, ...], arg(metavar="WHERE …")]
    """Selectors: attention:BACKBONE[:LAYER[:HEADS]], relevance:RUN (of erm or robustvit), parts:RUN (of ifam or
    pdiscoformer), masks:data, masks:FOLDER, found:BACKBONE, tokencut:BACKBONE, u2net:FILE.onnx, centre, random,
    everything."""
    what: Annotated[tuple[str, ...], arg(metavar="WHAT …")]
    """Predictors: mask-probe:BACKBONE (frozen, the rest hidden), crop-probe:BACKBONE (frozen, on crops),
    mask-dfr:BACKBONE and crop-dfr:BACKBONE (the same features, fitted with group labels), mask-zero-shot:CLIP,
    crop-zero-shot:CLIP, fine-tune:BACKBONE (all weights, the rest hidden)."""
    collect: bool = False
    """Compute nothing: tabulate the finished cells in --out, those of --where and --what first."""
    out: Annotated[Path | None, Writes(TABLE | FIGURES)] = None
    """Folder for the table, the figure, and the predictions of every cell. Default: runs/DATA-matrix."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (waterbirds, cub, imagenet9:mixed_rand, ...)."""
    size: Side | None = None
    """Image side in pixels. Default: each predictor's own."""
    crop_size: tuple[str, ...] = ("2/7", "2/7+1/7", "3/7", "4/7")
    """Crop sides to select among: fractions of the image's (2/7), pixels (64), or several crops (64+32)."""
    attention_mass: tuple[PositiveFraction, ...] = (0.3, 0.5, 0.7, 0.9)
    """For attention as a patch mask: fractions of the attention mass to keep, to select among."""
    epochs: Count = 20
    """Epochs of fine-tuning."""
    lr: NotNegative = 5e-5
    """Backbone learning rate of fine-tuning at batch size 128."""
    prompts: tuple[str, ...] = ("a photo of a {}",)
    """CLIP prompts with {} for the class name; the embeddings of several are averaged."""
    class_names: Path | None = None
    """JSON file with the class names to use in prompts: {"CLASS": "name"}. Default: the names in the data."""
    figures: bool = True
    """Draw matrix.png, and scaling.png if a backbone occurs in several sizes."""
    batch: Count = 128
    """Batch size."""
    seed: Seed = 0
    """Random seed."""
    split_seed: Seed = 0
    """Seed of the random train/val/test split, if the data define none."""
    workers: Processes = 2
    """Data-loading processes."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, sights and features. Default: cache, in --out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Floating-point precision of the predictors; auto: bf16 on a GPU. Selectors always run in fp32."""

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-matrix"
