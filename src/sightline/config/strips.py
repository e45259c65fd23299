"""Settings of strips: images of discovered parts on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from ..errors import UserError
from .flags import SOFTWARE, CacheFolder, Writes
from .limits import Checked, Count, InnerFraction, Processes, Seed, Whole

Kind = Literal["parts", "swapped", "occupancy", "left-out"]
PAGE = dict.fromkeys(("index.html", "parts.png", "occupancy.png", "swapped-*.png", "left-out-*.png"), (SOFTWARE,))
KINDS: tuple[Kind, ...] = ("parts", "swapped", "occupancy", "left-out")


@dataclass(frozen=True)
class Strips(Checked):
    """Draw the parts of runs on one page: side by side, on swapped backgrounds, where they lie, and when removed."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN … [DATA]")]
    """Runs with discovered parts, such as one per number of parts; optionally followed by other data."""
    kind: Annotated[tuple[Kind, ...], UseAppendAction] = ()
    """What to draw; repeat for several (--kind parts --kind swapped). Default: all; `left-out` shows what
    `intervene --find` measured."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT."""
    split: Literal["train", "val", "test"] = "test"
    """Split the images are drawn from."""
    examples: Whole = 8
    """Number of images shown, drawn at random, equally from all groups."""
    quantiles: tuple[InnerFraction, ...] = (0.99, 0.97)
    """Token removal shown: patches farther from their part than these quantiles of the training patches."""
    limit: Count = 2000
    """Maximum number of training images for these quantiles, and of images of the split for part locations."""
    intervention: bool = True
    """Apply the intervention saved with a run, if any."""
    seed: Seed = 0
    """Random seed of the images drawn."""
    batch: Count = 64
    """Images per batch."""
    workers: Processes = 2
    """Data-loading processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, such as the one used in training."""
    out: Annotated[Path | None, Writes(PAGE)] = None
    """Folder for index.html and the images. Default: `strips`, in the first run."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if not self.kind or kind in self.kind)

    @property
    def runs_and_data(self) -> tuple[tuple[Path, ...], Path | None]:
        *first, last = self.runs or (None,)
        if last is None:
            raise UserError("no runs given: name run folders, as in `sightline strips runs/k1 runs/k4 runs/k8`")
        if first and not (last / "run.json").is_file():
            return tuple(first), last
        return self.runs, None

    @property
    def folder(self) -> Path:
        return self.out or self.runs_and_data[0][0] / "strips"
