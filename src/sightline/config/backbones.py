"""Settings for pretraining a backbone, listing the known ones, and importing published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from .flags import RUN, CacheFolder, Dataset, Writes
from .limits import Checked, Count, Fraction, NotNegative, Several, Side, Whole
from .training import Loop


@dataclass(frozen=True)
class Pretrain(Loop):
    """Pretrain a backbone by self-distillation (DINO) on images; labels and masks only measure progress."""

    data: Dataset
    """Folder of images (at any depth), a CSV file with a column image, or a dataset with classes."""
    arch: Literal["nano", "ti", "s", "b"] = "nano"
    """ViT architecture: 1.2, 5.5, 22 or 86 million parameters."""
    patch: Count | None = None
    """Patch side in pixels. Default: 8 for nano, 16 for the others."""
    size: Side | None = None
    """Image side in pixels that the backbone is made for. Default: 96 for nano, 224 for the others."""
    registers: Whole = 4
    """Number of register tokens."""
    global_size: Side | None = None
    """Side of the two global crops in pixels. Default: 2/3 of --size for nano, 1/2 for the others."""
    local_size: Side | None = None
    """Side of the local crops in pixels. Default: 0.45 of --global-size."""
    local_crops: Whole = 6
    """Number of local crops."""
    full_size_fraction: Fraction = 0.05
    """Final fraction of the steps in which global crops have the full --size."""
    teacher_momentum: Fraction = 0.994
    """Initial EMA momentum of the teacher; rises to 1 with a cosine schedule."""
    prototypes: Several = 16384
    """Number of prototypes, the output dimension of the DINO head."""
    head_width: Count = 2048
    """Hidden width of the DINO head."""
    centring: Literal["mean", "sinkhorn"] = "mean"
    """Centring of the teacher's outputs, against collapse: subtract their mean (DINO), or Sinkhorn-Knopp."""
    koleo: NotNegative = 0.1
    """Weight of the KoLeo loss, which spreads image embeddings apart."""
    ibot: NotNegative = 0.0
    """Weight of the masked-patch loss (iBOT), which adds cost; 0 disables it."""
    validate_every: Count = 5
    """Epochs between measurements of k-NN accuracy and attention."""
    keep_every: Count | None = None
    """Epochs between extra copies of the backbone (backbone-012.safetensors): attention may be best before k-NN."""

    batch: Count = 512
    """Batch size, summed over all processes."""
    grad_accum: Count = 1
    """Gradient accumulation: number of micro-batches that a batch is split into, to save memory; they share no image
    statistics."""
    epochs: Count = 100
    """Number of passes over the training data."""
    warmup: NotNegative = 10.0
    """Epochs of linear learning-rate warmup."""
    lr: NotNegative = 5e-4
    """Learning rate at batch size 128; scaled by √(batch/128), with cosine decay over the epochs."""
    head_lr_factor: Suppress[NotNegative] = 1.0
    weight_decay: NotNegative = 4.0
    """AdamW weight decay; the effective value is this divided by √(total steps)."""
    clip_grad: NotNegative = 3.0
    """Maximum gradient norm; 0 disables clipping."""
    out: Annotated[Path | None, Writes(RUN)] = None
    """Run folder. Default: runs/DATA-pretrain-ARCH-SEED."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images. Default: in the run folder."""

    backbone: Suppress[str] = ""
    recipe: Suppress[None] = None
    select_on: Suppress[Literal["val"]] = "val"
    select: Suppress[Literal["last"]] = "last"  # ty: ignore[incompatible-attribute-override]
    augment: Suppress[Literal["light"]] = "light"
    balance: Suppress[Literal["none"]] = "none"
    ema: Suppress[None] = None
    allow_copies: Suppress[bool] = False
    patience: Suppress[None] = None
    fsdp: Suppress[bool] = False

    method: ClassVar[str] = "pretrain"

    @property
    def selects(self) -> str | None:
        return None

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{self.arch}-{self.seed}"


@dataclass(frozen=True)
class Import(Checked):
    """Turn a published iFAM or PDiscoFormer checkpoint into a run folder."""

    file: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Checkpoint: .pth, .pt or .safetensors."""
    data: Dataset
    """Dataset of the checkpoint, whose classes name its outputs."""
    out: Annotated[Path | None, Writes(RUN)] = None
    """Run folder. Default: runs/DATA-METHOD-BACKBONE-0."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (waterbirds, cub, celeba, ...)."""
    arch: str | None = None
    """Known backbone with the checkpoint's architecture, such as dinov2-b14-reg, if the file does not tell."""
    size: Side | None = None
    """Image side in pixels. Default: that of training, inferred from the position embeddings."""


@dataclass(frozen=True)
class Backbones(Checked):
    """List the backbones that are known by name."""
