"""Looking data sets over, building them, drawing them, making them readable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Check:
    """Look a data set over before training on it."""

    data: Positional[Path]
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, imagenet9:mixed_rand, ..."""
    no_images: bool = False
    """Do not open the pictures: quick, but finds less."""
    workers: int = 2
    out: Path | None = None
    """Write the findings there, as JSON."""


@dataclass(frozen=True)
class Build:
    """What to build from, where, and how."""

    cub: Path
    """The birds: cub224.zip, it unpacked, CUB_200_2011 with its segmentations, or the folder of one of these."""
    out: Path
    """The folder to make."""
    scenes: Path | None = None
    """The backgrounds: scenes.zip, it unpacked, or any folder of folders of photographs."""
    seed: int = 0
    limit: int | None = None
    """Take only this many birds: always the same, and their pictures are those of the whole set."""
    workers: int | None = None
    """Processes that make pictures. Default: one per core."""
    quality: int = 92
    """Of JPEG, colours not subsampled. 100: no loss at all (WebP, three times the size)."""
    land: tuple[str, ...] = ("forest",)
    """Folders of scenes for landbirds."""
    water: tuple[str, ...] = ("sea",)
    """Folders of scenes for waterbirds."""
    types: tuple[str, ...] = ("sea", "forest", "mountain", "street", "glacier", "buildings")
    """Six folders of scenes: of blackbirds, gulls, sparrows and warblers, one that they share, and one more."""
    correlation: float | None = None
    """How often a class goes with its place or object in training. Default: as the birds are labelled, else 0.95."""
    distance: float = 0.3
    """How far from the picture's centre birds are moved, in shares of its width and height."""
    moved: Literal["test", "all"] = "test"
    """Move the birds of the test split only, or of all."""
    objects: tuple[str, str] = ("none", "tag")
    """What goes with landbirds and with waterbirds: tag, buoy, post or none."""


BUILDS = Literal[
    "waterbirds", "cub-swapped", "scenes-o2o", "scenes-m2m", "scenes-disjoint",
    "mixed", "displaced", "spurious-object", "si-score",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data(Build):
    """Build a data set with a known shortcut, from bird cut-outs and scenes."""

    name: Positional[BUILDS]


@dataclass(frozen=True)
class Toy:
    """Write the embedded data set: storks and ducks, where the place gives the class away."""

    out: Positional[Path]
    """The folder to make."""
    train: int = 1200
    val: int = 400
    test: int = 800
    size: int = 64
    """Side of the pictures in pixels."""
    correlation: float = 0.9
    """How often the place goes with the class in training; in val and test all groups are equally large."""
    displacement: float = 0.15
    """How far from the centre birds may stand, in shares of the side."""
    seed: int = 0
    workers: int = 1
    """Processes that draw; the pictures are the same however many there are."""


CONVERTIBLE = Literal["imagenet-s", "imagenet-segmentation", "metashift-animals", "metashift-indoor-outdoor", "siim"]


@dataclass(frozen=True)
class Convert:
    """Make a published data set readable that comes as pickles, runs of pixels, class numbers or MATLAB's file."""

    layout: Positional[CONVERTIBLE]
    data: Positional[Path]
    """Its folder (or gtsegs_ijcv.mat), beside which the readable files are written."""
