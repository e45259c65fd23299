"""How a trained model is corrected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction


@dataclass(frozen=True)
class Intervene:
    """Correct a model that discovers parts: leave parts out, or patches that are unlike those of training.

    Without a flag: what is kept, and what leaving out each part would do, if that was measured."""

    run: Positional[Path]
    data: Positional[Path | None] = None
    """Where the data are now, or other data to choose on."""
    layout: str | None = None
    """Of published data, perhaps with an option."""
    find: bool = False
    """Leave out every part, and the most distant patches, on validation data; keep what surely helps, in place of all
    that was kept."""
    drop: Annotated[tuple[int, ...], UseAppendAction] = ()
    """A part to leave out, from 0 on: its patches become background. Several: --drop 3 --drop 5. What is said takes the
    place of what was kept of its kind, here as with --force and --quantile."""
    force: Annotated[tuple[int, ...], UseAppendAction] = ()
    """A part to keep wherever it is more likely than the other parts, whatever the background says."""
    quantile: float | None = None
    """Leave out patches farther from their part than this share of the training data's patches, such as 0.99."""
    name: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A part's name, such as 2=head."""
    clear: bool = False
    """Undo what was kept, before anything else; names of parts stay."""
    objective: Literal["worst-group", "worst-class", "auc"] | None = None
    """What --find is to improve. Default: the worst group; where there are no groups, AUC if weights were selected by
    it, else the worst class."""
    seed: int = 0
    batch: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache: Path | None = None
    """Take decoded pictures from this folder, such as the one of training, and keep them there."""

    @property
    def changes(self) -> bool:
        """Whether it asks for anything but to be shown what is kept."""
        return bool(self.drop or self.force or self.quantile is not None or self.name or self.clear)
