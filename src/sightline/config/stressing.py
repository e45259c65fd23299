"""What tests of explanations are told, and measuring on many published test sets at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .measuring import Evaluate


@dataclass(frozen=True)
class Stress(Evaluate):
    """Test a trained model's explanations: whether its maps are faithful, what 'sufficient' pixels are worth, what its
    features know, and how well relevance outlines the thing."""

    maps: tuple[str, ...] = ("gae", "rollout", "attention", "gradient", "sight")
    """Of relevance, gae, rollout, attention or gradient; the model's sight; or a map of its own. A random one is always
    beside them."""
    tests: tuple[Literal["curves", "subsets", "neighbours", "masks"], ...] = (
        "curves",
        "subsets",
        "neighbours",
        "masks",
    )
    masks: str | None = None
    """In place of the data's own masks: a folder of masks with the pictures' paths; or masks made here once:
    tokencut:BACKBONE, found:BACKBONE (no person drew any), u2net:FILE.onnx (supervised). What they are is said."""
    limit: int = 200
    """Pictures, drawn by --seed; 0 takes all."""
    subsets: int = 8
    """Pictures of these that sufficient pixels are sought in, which takes long."""
    labels: int = 3
    """Labels drawn for each of them, none being its own answer."""
    confidence: float = 0.9
    """How sure the model has to be of a label for pixels to be sufficient."""
    steps: int = 50
    """In how many steps a picture's pixels are taken away; more find smaller subsets."""
    seed: int = 0
    pictures: bool = True
    """Draw curves, and some subsets."""
    out: Path | None = None
    """Folder for stress/SPLIT.json, .csv and pictures. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Suite(Evaluate):
    """Measure a trained model: every group, with intervals. Or, with --suite, one of ImageNet's classes on published
    test sets under shift, in one table."""

    suite: Literal["imagenet-shift"] | None = None
    """ImageNet-V2, -A, -R, -Sketch, ObjectNet and SI-Score, as many of them as are there."""
    suite_folder: Path | None = None
    """The folder that holds them, each under the name that it was published with, or that of its layout."""
