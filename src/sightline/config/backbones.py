"""Making a backbone, listing those that are known, and taking in published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional, Suppress

from .training import Loop


@dataclass(frozen=True)
class Pretrain(Loop):
    """Make a backbone from pictures alone, by self-distillation (DINO). Labels and masks, where there are any, are
    only used to see how far it has come."""

    data: Positional[Path]
    """A folder of pictures, nested as you like, or a CSV file with a column image; or a data set with classes."""
    size: Literal["nano", "ti", "s", "b"] = "nano"  # ty: ignore[incompatible-attribute-override]
    """Of the model: 1.2, 5.5, 22 or 86 million parameters."""
    patch: int | None = None
    """Side of a patch in pixels. Default: 8 for nano, 16 for the others."""
    pixels: int | None = None
    """Side of the pictures that it is made for. Default: 96 for nano, 224 for the others."""
    registers: int = 4
    large: int | None = None
    """Side of the two large crops. Default: 2/3 of --pixels for nano, 1/2 for the others."""
    small: int | None = None
    """Side of the small crops. Default: a little less than half of the large ones."""
    smalls: int = 6
    """How many small crops."""
    finish: float = 0.05
    """The last share of the steps, with large crops of the full size."""
    momentum: float = 0.994
    """Of the teacher, at the beginning; it rises to 1."""
    prototypes: int = 16384
    head_width: int = 2048
    centring: Literal["mean", "sinkhorn"] = "mean"
    """How the teacher is kept from answering the same to everything."""
    koleo: float = 0.1
    """Weight of the loss that keeps pictures apart."""
    masked: float = 0.0
    """Weight of the masked-patch loss (iBOT), which costs time; 0: off."""
    examine_every: int = 5
    """Measure neighbours and attention every so many epochs."""
    keep_every: int | None = None
    """Also keep the backbone every so many epochs, as backbone-012.safetensors: attention may leave what matters
    before neighbours are at their best."""

    batch: int = 512
    epochs: int = 100
    warmup: float = 10.0
    """Epochs in which the learning rate rises from 0, step by step."""
    lr: float = 5e-4
    """At a batch of 128; it grows with the square root of the batch and falls by a cosine."""
    head_lr: Suppress[float] = 1.0
    weight_decay: float = 4.0
    """Before it is divided by the square root of the number of steps."""
    clip: float = 3.0
    """Largest norm of the gradient."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-pretrain-SIZE-SEED."""
    cache: Path | None = None
    """Keep decoded pictures in this folder. Default: in the run folder."""

    backbone: Suppress[str] = ""
    select: Suppress[Literal["last"]] = "last"  # ty: ignore[incompatible-attribute-override]
    augment: Suppress[Literal["light"]] = "light"
    balance: Suppress[Literal["none"]] = "none"
    average: Suppress[None] = None
    patience: Suppress[None] = None

    method: ClassVar[str] = "pretrain"

    @property
    def selects(self) -> str | None:
        return None

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{self.size}-{self.seed}"


@dataclass(frozen=True)
class Import:
    """Make a run folder of a published iFAM or PDiscoFormer checkpoint: then everything here works with it."""

    file: Positional[Path]
    """The checkpoint: .pth, .pt or .safetensors."""
    data: Positional[Path]
    """The data it is for, whose classes name its answers."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-METHOD-BACKBONE-0."""
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, celeba, ..."""
    like: str | None = None
    """The known backbone it was made from, where the file cannot tell, such as dinov2-b14-reg."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what it was trained with, by the number of its positions."""


@dataclass(frozen=True)
class Backbones:
    """List the backbones that are known by name."""
