"""Settings that all methods share, and those of methods trained in the loop. Every field is a flag and a Python
argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from .flags import RUN, CacheFolder, Dataset, Writes
from .limits import Count, InnerFraction, NotNegative, Processes, Seed, Side
from .machine import default_workers
from .output import Output

Balance = Literal["none", "classes", "groups", "logit-adjustment"]


@dataclass(frozen=True)
class Train(Output):
    """Train a classifier; the run folder holds weights, predictions and metrics."""

    data: Dataset
    """Folder of class folders (optionally under train, val and test), or a CSV file with columns image and label."""
    backbone: str = "dinov2-s14-reg"
    """Name of a backbone (`sightline backbones`), a weights file, or random:NAME for random initialisation."""
    out: Annotated[Path | None, Writes(RUN)] = None
    """Run folder. Default: runs/DATA-METHOD-BACKBONE-SEED."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (waterbirds, cub, imagenet9:mixed_rand, ...)."""
    size: Side | None = None
    """Image side in pixels. Default: the backbone's own."""
    select: Literal["balanced", "accuracy", "worst-group", "worst-class", "auc"] = "balanced"
    """Validation metric for checkpoint and hyperparameter selection; `balanced` is class-balanced accuracy, which needs
    no group labels."""
    select_on: Literal["val", "train-split"] = "val"
    """Images for that selection: the validation split, or a twentieth of the training images, stratified by class and
    left out of training. The latter has the same shortcut as the training data; the former may not."""
    fit: Literal["crop", "squash"] | None = None
    """How images reach the model: the centre, cropped to a square, or the whole image, squashed into one. Recorded with
    the run, and kept by all commands that use it. Default: as the backbone expects, which is a crop."""
    recipe: str | None = None
    """Settings of a paper: ifam-waterbirds, ifam-cub, ifam-metashift, ifam-siim, ifam-imagenet, pdiscoformer-cub,
    a2-waterbirds, a2-spawrious, a2-metashift, robustvit-imagenet. Flags given beside it take precedence."""
    batch: Count = 128
    """Batch size, summed over all processes."""
    seed: Seed = 0
    """Random seed of initialisation, data order, augmentation and noise."""
    split_seed: Seed = 0
    """Seed of the random train/val/test split, if the data define none; independent of --seed."""
    workers: Processes = field(default_factory=default_workers)
    """Data-loading processes. Default: one per core, from 2 to 8."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images and features for this run and later ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Floating-point precision; bf16 is mixed precision; `auto` takes it on a GPU that computes in it."""
    deterministic: bool = False
    """Deterministic GPU kernels: bitwise reproducible, slightly slower. On the CPU training always is."""
    allow_copies: bool = False
    """Train although test images are also in train or val, as exact copies; the results then say so."""
    resume: bool = False
    """Continue the interrupted run in --out."""
    details: bool = False
    """Print every metric, and how its interval was computed; metrics.json always has them."""

    method: ClassVar[str] = ""
    needs_groups: ClassVar[bool] = False
    weighs_batches: ClassVar[bool] = False  # the loss weights of an image depend on the rest of its batch
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values among which `sightline bench --grid` selects
    finds_groups: ClassVar[bool] = False  # the groups of training are found by the method, not given

    @property
    def selects(self) -> str | None:
        """The selection rule that is recorded with the results; None: nothing is selected."""
        return self.select

    @property
    def backbones(self) -> tuple[str | None, ...]:
        """Every backbone that the method looks or predicts with; None: the default."""
        return (self.backbone,)

    @property
    def folder(self) -> Path:
        backbones = "-".join(Path(name).stem.replace(":", "-") for name in self.backbones if name)
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{backbones}-{self.seed}"


@dataclass(frozen=True)
class Loop(Train):
    """Settings of methods trained by gradient descent in the training loop."""

    epochs: Count = 20
    """Number of passes over the training data."""
    lr: NotNegative = 5e-5
    """Backbone learning rate at batch size 128; scaled by √(batch/128), with cosine decay over the epochs."""
    head_lr_factor: NotNegative = 10.0
    """Learning rate of new layers, as a multiple of --lr."""
    warmup: NotNegative = 0.0
    """Epochs of linear learning-rate warmup."""
    weight_decay: NotNegative = 0.05
    """AdamW weight decay; the effective value is this divided by √(total steps)."""
    clip_grad: NotNegative = 2.0
    """Maximum gradient norm; 0 disables clipping."""
    grad_accum: Count | None = None
    """Gradient accumulation: number of micro-batches that a batch is split into, to save memory. Default: as many as
    the free memory asks for, usually 1."""
    ema: InnerFraction | None = None
    """Decay of the exponential moving average (EMA) of the weights, such as 0.999; None: no EMA."""
    augment: Literal["none", "flip", "light", "published", "imagenet"] = "light"
    """Augmentation preset: flips, crops and flips (light), that of the published iFAM code, or ImageNet's."""
    balance: Balance = "none"
    """Draw classes or groups equally often, or logit adjustment with the training class priors."""
    patience: Count | None = None
    """Early stopping: epochs without a better validation score. Default: train to the end."""
    save_minutes: NotNegative = 10.0
    """Minutes between checkpoints within an epoch; epochs that end within 20 seconds share a checkpoint."""
    tracker: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Also log losses and metrics to an experiment tracker; TensorBoard's files are in the run folder."""
    fsdp: bool = False
    """With several processes, divide parameters, gradients and optimiser state among them (FSDP), for models that do
    not fit into one GPU. With erm; not with --ema or --compile."""
    compile: bool = False
    """Compile the ViT blocks (torch.compile): about a minute at the start, then faster on a GPU."""

    @property
    def compares_images(self) -> bool:
        """Whether a loss depends on several images of a batch together, so that micro-batches change it."""
        return self.weighs_batches
