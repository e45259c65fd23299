"""Settings of interventions on a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import UseAppendAction

from .flags import CacheFolder, OtherData, RunFolder
from .limits import Checked, Count, InnerFraction, Processes, Seed, Whole


@dataclass(frozen=True)
class Intervene(Checked):
    """Correct a model with discovered parts: remove parts, or patches unlike those of training.

    Without flags: show the saved intervention, and the effect of removing each part if that was measured."""

    run: RunFolder
    """Run folder."""
    data: OtherData = None
    """New location of the run's data, or other data to search on."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT."""
    find: bool = False
    """Search on validation data: remove each part, and the most distant patches; save what improves the objective
    significantly, replacing any saved intervention."""
    drop: Annotated[tuple[Whole, ...], UseAppendAction] = ()
    """Part removal: a part, from 0 on, whose patches become background; repeat for several (--drop 3 --drop 5). Like
    --force and --quantile, replaces the saved value."""
    force: Annotated[tuple[Whole, ...], UseAppendAction] = ()
    """A part to keep wherever it is more likely than the other parts, whatever the background probability."""
    quantile: InnerFraction | None = None
    """Token removal: remove patches farther from their part than this quantile of the training patches, such as
    0.99."""
    name: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Name for a part, such as 2=head."""
    clear: bool = False
    """Remove the saved intervention first; part names stay."""
    objective: Literal["worst-group", "worst-class", "auc"] | None = None
    """Metric that --find improves. Default: worst-group accuracy; without groups, AUC if the checkpoint was selected by
    it, else worst-class accuracy."""
    seed: Seed = 0
    """Random seed of the bootstrap in --find."""
    batch: Count = 64
    """Images per batch."""
    workers: Processes = 2
    """Data-loading processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, such as the one used in training."""

    @property
    def changes(self) -> bool:
        """Whether anything is to be changed by hand, not only shown or searched."""
        return bool(self.drop or self.force or self.quantile is not None or self.name or self.clear)
