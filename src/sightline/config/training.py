"""What every training is told: each field is a flag and a Python argument."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Train:
    """What every method is told."""

    data: Positional[Path]
    """A folder of class folders (perhaps under train, val and test), or a CSV file with columns image and label."""
    backbone: str = "dinov2-s14-reg"
    """A backbone's name, a weights file, or random:NAME for untrained weights (random:nano is tiny)."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-METHOD-BACKBONE-SEED."""
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, imagenet9:mixed_rand, ..."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what the backbone expects."""
    select: Literal["balanced", "accuracy", "worst-group", "worst-class", "auc"] = "balanced"
    """What the validation data choose by. `balanced` (accuracy averaged over classes) needs no group labels."""
    batch: int = 128
    """Pictures per step, over all processes."""
    seed: int = 0
    split_seed: int = 0
    """Of the division into splits, where the data have none; the same for every training seed."""
    workers: int = 2
    """Processes that decode pictures."""
    cache: Path | None = None
    """Keep decoded pictures and features in this folder, for this run and the next."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    """On a GPU: the same bits every time, a little slower. The CPU is so anyway."""
    resume: bool = False
    """Go on with the run in --out where it was interrupted."""

    method: ClassVar[str] = ""
    needs_groups: ClassVar[bool] = False
    weighs_batches: ClassVar[bool] = False  # the pictures of one against each other

    @property
    def selects(self) -> str | None:
        """What the validation data really choose by."""
        return self.select

    @property
    def folder(self) -> Path:
        where = getattr(self, "where", None)  # of a method that may look with another backbone
        backbones = "-".join(Path(name).stem.replace(":", "-") for name in (where, self.backbone) if name)
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{backbones}-{self.seed}"


@dataclass(frozen=True)
class Loop(Train):
    """What methods that learn step by step are told besides."""

    epochs: int = 20
    lr: float = 5e-5
    """Of the backbone, at a batch of 128; it grows with the square root of the batch and falls by a cosine."""
    head_lr: float = 10.0
    """Times that for new layers."""
    warmup: float = 0.0
    """Epochs in which the learning rate rises from 0, step by step."""
    weight_decay: float = 0.05
    """Before it is divided by the square root of the number of steps."""
    clip: float = 2.0
    """Largest norm of the gradient."""
    accumulate: int = 1
    """Parts that a batch is computed in, to save memory."""
    average: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999, which then is what is kept."""
    augment: Literal["none", "light", "published", "imagenet"] = "light"
    balance: Literal["none", "classes", "groups", "loss"] = "none"
    """Draw every class, or every group, equally often; or, `loss`: as they come, but let the loss allow for how common
    each class is, so that the answer does not (logit adjustment)."""
    patience: int | None = None
    """Stop after so many epochs without a better validation score."""
    save_minutes: float = 10.0
    """Save so often within an epoch, besides after it; short epochs that end within 20 seconds share a save."""
    tensorboard: bool = False
    compile: bool = False
    """Compile the ViT's blocks: a minute's wait at the start, then faster on a GPU."""
