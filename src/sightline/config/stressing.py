"""Settings of tests of explanations, and of evaluation on suites of published test sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from .flags import SOFTWARE, Writes
from .limits import Count, InnerFraction, Seed, Several, Whole
from .measuring import METRICS, Evaluate

STRESS = {"stress/*.json": ("fingerprint", "seed"), "stress/*.csv": ("image",), "stress/*.png": (SOFTWARE,)}
SUITE = {"suite.json": ("suite", "sets")}


@dataclass(frozen=True)
class Stress(Evaluate):
    """Test a model's explanations: faithfulness of its maps, sufficient subsets, k-NN of its features, and masks."""

    maps: tuple[str, ...] = ("gae", "rollout", "attention", "gradient", "sight")
    """Maps to test: relevance (gae, rollout, attention, gradient), the sight, or a map of the method itself. A random
    map is always added for comparison."""
    tests: tuple[Literal["curves", "subsets", "neighbours", "masks"], ...] = (
        "curves",
        "subsets",
        "neighbours",
        "masks",
    )
    """Tests: perturbation curves, sufficient subsets, k-NN accuracy of the features, overlap with object masks."""
    masks: str | None = None
    """Masks in place of those of the data: a folder of masks under the images' paths, or tokencut:BACKBONE,
    found:BACKBONE (unsupervised), u2net:FILE.onnx (supervised), computed once; the report names the source."""
    limit: Whole = 200
    """Maximum number of images, drawn with --seed; 0: all."""
    subset_images: Count = 8
    """Number of these images in which sufficient subsets are searched, which is slow."""
    labels_per_image: Count = 3
    """Random labels per image in the search for sufficient subsets, other than the predicted one."""
    confidence: InnerFraction = 0.9
    """Confidence at which a subset counts as sufficient for a label."""
    subset_steps: Several = 50
    """Steps in which pixels are removed in the search; more steps find smaller subsets."""
    seed: Seed = 0
    """Random seed."""
    figures: bool = True
    """Draw the curves and some subsets."""
    out: Annotated[Path | None, Writes(STRESS)] = None
    """Folder for stress/SPLIT.json, .csv and figures. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Suite(Evaluate):
    """Evaluate a trained model, overall and per group, with confidence intervals; or on a suite of test sets."""

    details: bool = False
    """Print every metric, class and confusion, and how each interval was computed; metrics.json always has them."""
    suite: Literal["imagenet-shift"] | None = None
    """Evaluate an ImageNet model on ImageNet-V2, -A, -R, -Sketch, ObjectNet and SI-Score, as far as they are
    present."""
    suite_folder: Path | None = None
    """Folder that holds these test sets, each under its published name or that of its layout."""
    out: Annotated[Path | None, Writes(METRICS | SUITE)] = None
    """Folder for metrics.json and the predictions per image. Default: the run, if these are its own data."""
