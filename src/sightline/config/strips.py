"""What pictures of parts are drawn of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from ..errors import UserError

Kind = Literal["parts", "swapped", "occupancy", "left-out"]
KINDS: tuple[Kind, ...] = ("parts", "swapped", "occupancy", "left-out")


@dataclass(frozen=True)
class Strips:
    """Draw the parts of trained runs, on one page: the same pictures over several runs, the same things on other
    backgrounds and without doubtful patches, where each part usually is, and what leaving it out does."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN … [DATA]")]
    """Runs that discover parts, such as one for each number of parts; then, perhaps, other data than they were trained
    on."""
    kind: Annotated[tuple[Kind, ...], UseAppendAction] = ()
    """What to draw: --kind parts --kind swapped. Default: all; `left-out` is what `intervene --find` measured."""
    layout: str | None = None
    """Of published data, perhaps with an option."""
    split: Literal["train", "val", "test"] = "test"
    pictures: int = 8
    """How many are shown, drawn at random from all groups alike."""
    quantiles: tuple[float, ...] = (0.99, 0.97)
    """Leave out patches farther from their part than these shares of the training data's patches."""
    limit: int = 2000
    """At most so many training pictures for these distances, and of the split for where parts are."""
    intervention: bool = True
    """Apply the intervention that is kept with a run, if any."""
    seed: int = 0
    batch: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache: Path | None = None
    """Take decoded pictures from this folder, such as the one of training, and keep them there."""
    out: Path | None = None
    """Folder for index.html and the pictures. Default: `strips`, in the first run."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if not self.kind or kind in self.kind)

    @property
    def runs_and_data(self) -> tuple[tuple[Path, ...], Path | None]:
        *first, last = self.runs or (None,)
        if last is None:
            raise UserError("no runs: name the folders of some, as in `sightline strips runs/k1 runs/k4 runs/k8`")
        if first and not (last / "run.json").is_file():
            return tuple(first), last
        return self.runs, None

    @property
    def folder(self) -> Path:
        return self.out or self.runs_and_data[0][0] / "strips"
