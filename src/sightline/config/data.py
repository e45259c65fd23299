"""Settings for checking, building, generating and converting datasets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .flags import Dataset, Writes
from .limits import Checked, Count, Fraction, NotNegative, Processes, Seed, Side, Within


@dataclass(frozen=True)
class Check(Checked):
    """Check a dataset before training: files, splits, groups, duplicates, masks."""

    data: Dataset
    """Folder of class folders (optionally under train, val and test), or a CSV file with columns image and label."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT (waterbirds, cub, imagenet9:mixed_rand, ...)."""
    images: bool = True
    """Decode the images; --no-images is fast but finds less."""
    workers: Processes = 2
    """Data-loading processes."""
    out: Annotated[Path | None, Writes({"": ("findings", "counts")})] = None
    """JSON file for the findings."""


@dataclass(frozen=True)
class Build(Checked):
    """Sources and options of the datasets that are built from bird cut-outs and scenes."""

    cub: Path
    """Birds: cub224.zip (packed or unpacked), CUB_200_2011 with its segmentations, or the folder of one of these."""
    out: Annotated[Path, Writes()]
    """Output folder."""
    scenes: Path | None = None
    """Backgrounds: scenes.zip (packed or unpacked), or any folder of folders of images."""
    seed: Seed = 0
    """Random seed."""
    limit: Count | None = None
    """Maximum number of birds; the same birds and images as in the full dataset."""
    workers: Processes | None = None
    """Processes that compose images. Default: one per core."""
    quality: Annotated[int, Within(1, 100)] = 92
    """JPEG quality, without chroma subsampling; 100: lossless (WebP, three times the size)."""
    land: tuple[str, ...] = ("forest",)
    """Scene folders for landbirds."""
    water: tuple[str, ...] = ("sea",)
    """Scene folders for waterbirds."""
    types: tuple[str, ...] = ("sea", "forest", "mountain", "street", "glacier", "buildings")
    """Six scene folders: for blackbirds, gulls, sparrows and warblers, one shared by all, and one more."""
    correlation: Fraction | None = None
    """Probability that background or object matches the class in training. Default: as the birds are labelled, else
    0.95."""
    distance: NotNegative = 0.3
    """Displacement of birds from the image centre, as a fraction of its width and height."""
    moved: Literal["test", "all"] = "test"
    """Splits in which birds are displaced."""
    objects: tuple[str, str] = ("none", "tag")
    """Spurious objects of landbirds and of waterbirds: tag, buoy, post or none."""


BUILDS = Literal[
    "waterbirds", "cub-swapped", "scenes-o2o", "scenes-m2m", "scenes-disjoint",
    "mixed", "displaced", "spurious-object", "si-score",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data(Build):
    """Build a dataset with a known shortcut from bird cut-outs and scenes."""

    name: Positional[BUILDS]
    """Dataset to build."""


@dataclass(frozen=True)
class Toy(Checked):
    """Generate the toy dataset: storks and ducks whose background is correlated with the class."""

    out: Annotated[Positional[Path], arg(metavar="OUT"), Writes()]
    """Output folder."""
    train: Count = 1200
    """Number of training images."""
    val: Count = 400
    """Number of validation images."""
    test: Count = 800
    """Number of test images."""
    size: Side = 64
    """Image side in pixels."""
    correlation: Fraction = 0.9
    """Probability that the background matches the class in training; in val and test all groups have the same size."""
    displacement: Annotated[float, Within(0, 0.4)] = 0.15
    """Maximum displacement of birds from the centre, as a fraction of the side."""
    seed: Seed = 0
    """Random seed."""
    workers: Processes = 1
    """Processes that draw; the images do not depend on their number."""


CONVERTIBLE = Literal["imagenet-s", "imagenet-segmentation", "metashift-animals", "metashift-indoor-outdoor", "siim"]


@dataclass(frozen=True)
class Convert(Checked):
    """Convert a published dataset that comes as pickle, run-length codes, class indices or MATLAB files."""

    layout: Positional[CONVERTIBLE]
    """Layout of the published dataset."""
    data: Dataset
    """Its folder (or gtsegs_ijcv.mat); the converted files are written beside it."""
