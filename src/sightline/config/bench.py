"""Settings of the benchmark: many methods with several seeds on one dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from .flags import SOFTWARE, CacheFolder, Dataset, Writes
from .limits import Checked, Count, Processes, Seed
from .machine import default_workers


@dataclass(frozen=True)
class Bench(Checked):
    """Train several methods with several seeds on a dataset, and compare them in one table.

    Finished runs with the same settings are used again, and interrupted ones resumed: run the same command again."""

    data: Dataset
    """Folder of class folders (optionally under train, val and test), or a CSV file with columns image and label."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD …")] = ("erm", "probe", "ifam")
    """Methods as `sightline train` takes them, with flags in quotes: "ifam --sight patches". `--init-from @erm` in such
    flags is the run of the method erm (or of another text given here) with the same seed."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Random seeds; each method is trained once with each."""
    flags: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE …")] = ()
    """Flags of `sightline train` for every method that has them, without dashes: epochs=10 size=224. A method's own
    take precedence."""
    backbone: str = "dinov2-s14-reg"
    """Backbone of every method whose own flags name no other: a name, a weights file, or random:NAME."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (waterbirds, cub, imagenet9:mixed_rand, ...)."""
    grid: Literal["balanced", "worst-group", "worst-class", "accuracy"] | None = None
    """Select hyperparameters of rivals by this metric on the validation data, with the first seed: small grids, listed
    on the page of the benchmark. worst-group uses group labels. Default: no grid, each method's own defaults."""
    split: Literal["val", "test"] = "test"
    """Split of the table."""
    out: Annotated[Path | None, Writes({"bench.json": ("methods", "worst_of"), "index.html": (SOFTWARE,)})] = None
    """Folder for runs and tables. Default: runs/DATA-bench."""
    jobs: Count = 1
    """Runs at the same time on this machine, each in a process of its own."""
    shard: str | None = None
    """I/N: train only every N-th run, from number I on (0/8 … 7/8), for several machines or a SLURM array with a common
    --out; the table has all that are finished."""
    collect: bool = False
    """Train nothing: only the table of the finished runs."""
    figures: bool = True
    """Draw the figures of index.html."""
    split_seed: Seed = 0
    """Seed of the random train/val/test split, if the data define none."""
    workers: Processes = field(default_factory=default_workers)
    """Data-loading processes of each run. Default: one per core, from 2 to 8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Floating-point precision; bf16 is mixed precision; `auto` takes it on a GPU that computes in it."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images and features. Default: cache, in --out."""

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-bench"
