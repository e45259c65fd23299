"""What a user can say: each dataclass is a command, each field a flag and a Python argument."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Verify:
    """Prove that a model is blind outside its sight, or find where it leaks.

    MODEL is a run folder, the name of a backbone (see `sightline backbones`), a weights file, or `file.py:function` for
    any nn.Module of your own: the function takes no argument and returns the module.
    """

    model: Positional[str]
    """A run folder, a backbone's name, a weights file, or file.py:function."""
    images: Positional[tuple[Path, ...]] = ()
    """Pictures, or folders of pictures; without any, toy pictures with known masks."""
    where: Literal["attention", "masks", "random"] | None = None
    """Where to look: the model's own attention, masks, or at random. Default: masks where there are any."""
    masks: Path | None = None
    """A folder with a mask for each picture, under the same name (bright = visible)."""
    pixels: bool = False
    """With masks: hide the pixels inside kept patches too, not only whole patches."""
    what: Literal["masked", "late"] = "masked"
    """How a backbone uses the sight: never sees the rest, or leaves it out at the end (which leaks)."""
    share: float = 0.25
    """The share of patches that attention or chance keeps."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what the model expects, or 224."""
    patch: int = 16
    """For your own module: the side of its patches."""
    mask_argument: str | None = None
    """For your own module: the keyword of its forward that takes the mask, bool [B, H, W] over patches."""
    like: str | None = None
    """For a weights file that cannot tell: the known backbone it is like."""
    limit: int = 16
    """Take at most this many pictures."""
    draws: int = 5
    """Redraws of each kind per picture."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    seed: int = 0
    out: Path | None = None
    """Write the certificate there, as JSON."""


@dataclass(frozen=True)
class Train:
    """What every method is told."""

    data: Positional[Path]
    """A folder of class folders (perhaps under train, val and test), or a CSV file with columns image and label."""
    backbone: str = "dinov2-s14-reg"
    """A backbone's name, a weights file, or random:NAME for untrained weights (random:nano is tiny)."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-METHOD-BACKBONE-SEED."""
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, celeba, ..."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what the backbone expects."""
    select: Literal["balanced", "accuracy", "worst-group", "worst-class", "auc"] = "balanced"
    """What the validation data choose by. `balanced` (accuracy averaged over classes) needs no group labels."""
    batch: int = 128
    """Pictures per step, over all processes."""
    seed: int = 0
    split_seed: int = 0
    """Of the division into splits, where the data have none; the same for every training seed."""
    workers: int = 2
    """Processes that decode pictures."""
    cache: Path | None = None
    """Keep decoded pictures and features in this folder, for this run and the next."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    """On a GPU: the same bits every time, a little slower. The CPU is so anyway."""
    resume: bool = False
    """Go on with the run in --out where it was interrupted."""

    method: ClassVar[str] = ""

    @property
    def selects(self) -> str | None:
        """What the validation data really choose by."""
        return self.select

    @property
    def folder(self) -> Path:
        backbone = Path(self.backbone).stem.replace(":", "-")
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{backbone}-{self.seed}"


@dataclass(frozen=True)
class Loop(Train):
    """What methods that learn step by step are told besides."""

    epochs: int = 20
    lr: float = 5e-5
    """Of the backbone, at a batch of 128; it grows with the square root of the batch and falls by a cosine."""
    head_lr: float = 10.0
    """Times that for new layers."""
    weight_decay: float = 0.05
    """Before it is divided by the square root of the number of steps."""
    clip: float = 2.0
    """Largest norm of the gradient."""
    accumulate: int = 1
    """Parts that a batch is computed in, to save memory."""
    average: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999, which then is what is kept."""
    augment: Literal["none", "light", "published", "imagenet"] = "light"
    balance: Literal["none", "classes", "groups"] = "none"
    """Draw every class, or every group, equally often."""
    patience: int | None = None
    """Stop after so many epochs without a better validation score."""
    save_minutes: float = 10.0
    """Besides after every epoch, save so often."""
    tensorboard: bool = False


@dataclass(frozen=True)
class Erm(Loop):
    """Fine-tune the backbone on whole pictures: the ordinary way, and the baseline."""

    frozen: bool = False
    """Train the head only."""

    method: ClassVar[str] = "erm"


@dataclass(frozen=True)
class Probe(Train):
    """Logistic regression on the backbone's frozen features."""

    plain: bool = False
    """C = 1 on raw features, as in papers; otherwise they are standardised, and C is chosen on validation data."""

    method: ClassVar[str] = "probe"

    @property
    def selects(self) -> str | None:
        return None if self.plain else self.select


@dataclass(frozen=True)
class Check:
    """Look a data set over before training on it."""

    data: Positional[Path]
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, celeba, ..."""
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


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained model: every group, with intervals."""

    run: Positional[Path]
    data: Positional[Path | None] = None
    """Other data than those it was trained on."""
    layout: str | None = None
    split: Literal["train", "val", "test"] = "test"
    batch: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    """Folder for metrics.json and the answers per picture. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Predict:
    """Answer for pictures that have no labels."""

    run: Positional[Path]
    images: Positional[tuple[Path, ...]]
    out: Path | None = None
    """A .csv or .json file. Default: CSV on the screen."""
    overlay: Path | None = None
    """Folder for pictures of what was seen, where the method does not see everything."""
    batch: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class Compare:
    """Put runs side by side, on the same pictures. Runs that differ only in their seed count as one."""

    runs: Positional[tuple[Path, ...]]
    split: Literal["val", "test"] = "test"
    out: Path | None = None
    """Write the table there, as JSON."""


@dataclass(frozen=True)
class Backbones:
    """List the backbones that are known by name."""


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded pictures: train, measure, prove."""

    out: Path = Path("runs/demo")
    """Folder for everything it makes; what was there before is removed."""
    seed: int = 0
