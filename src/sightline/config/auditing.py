"""What the report is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .measuring import Evaluate


@dataclass(frozen=True)
class Audit(Evaluate):
    """Write a report of a trained model, one HTML file that opens offline: where it fails, what it looks at, what is
    proved, and what happens if it stops looking there."""

    split: Literal["val", "test"] = "test"
    masks: str | None = None
    """In place of the data's own masks: a folder of masks with the pictures' paths; or masks made here once:
    tokencut:BACKBONE, found:BACKBONE (no person drew any), u2net:FILE.onnx (supervised). What they are is said."""
    pictures: int = 200
    """Show at most this many pictures."""
    quick: bool = False
    """Swap backgrounds of fewer pictures, measure distances on fewer, leave out what the sight's shape gives away."""
    seed: int = 0
    """Of what is drawn: pictures to show, backgrounds to swap."""
    out: Path | None = None
    """The HTML file. Default: audit.html in the run (for --split val, audit-val.html), or in its folder for other data
    or for the intervention that is applied."""
    cache: Path | None = None
    """Take decoded pictures from this folder, such as the one of training, and keep them there."""
