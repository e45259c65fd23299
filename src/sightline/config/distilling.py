"""Settings for making a trained model cheaper."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from .flags import RUN, CacheFolder, RunFolder, Writes
from .limits import Checked, Count, NotNegative, Processes, Seed, Side
from .machine import default_workers


@dataclass(frozen=True)
class Distill(Checked):
    """Teach a small selector the part maps of an iFAM run; the result is a run that looks at a fraction of the cost.

    Stage 2 stays as it is. No labels are used in training; epochs are selected on the validation data, as in the run,
    and what the small selector costs in accuracy there is reported."""

    run: RunFolder
    """Run folder of the trained iFAM model."""
    out: Annotated[Path | None, Writes(RUN)] = None
    """Folder of the new run. Default: RUN-distilled."""
    data: Path | None = None
    """Images to learn from: a folder or CSV file with the same classes. Default: the data that the run was trained
    on."""
    blocks: Count = 3
    """Number of transformer blocks of the new selector: the first ones of the run's selector, with their weights."""
    where: str | None = None
    """Backbone of the new selector, in place of --blocks: a smaller one, by name or file, with all its blocks."""
    selector_size: Side | None = None
    """Image side in pixels at which the new selector looks, with --sight pixels; halving it cuts the cost to a quarter
    or less. Default: as in the run."""
    epochs: Count = 10
    """Number of passes over the training images."""
    lr: NotNegative = 3e-4
    """Learning rate of the selector's ViT at batch size 128; scaled by √(batch/128), with cosine decay."""
    head_lr_factor: NotNegative = 10.0
    """Learning rate of the part prototypes and of the foreground classifier, as a multiple of --lr."""
    batch: Count = 64
    """Batch size, summed over all processes."""
    seed: Seed = 0
    """Random seed of data order and augmentation."""
    workers: Processes = field(default_factory=default_workers)
    """Data-loading processes. Default: one per core, from 2 to 8."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images for this run and later ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    resume: bool = False
    """Continue the interrupted run in --out."""

    @property
    def folder(self) -> Path:
        return self.out or self.run.with_name(f"{self.run.resolve().name}-distilled")
