"""Settings of the methods that train a classifier, with their defaults; those that discover parts are in parts.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .limits import Count, Index, NotNegative, Positive, PositiveFraction, Several, Side, Whole, Within
from .training import Loop, Train

Fill = Literal["mean", "black", "white", "grey", "noise"]  # what replaces hidden pixels


@dataclass(frozen=True)
class Erm(Loop):
    """Fine-tune the backbone on whole images: empirical risk minimisation, the baseline."""

    freeze_backbone: bool = False
    """Train only the classification head."""

    method: ClassVar[str] = "erm"


@dataclass(frozen=True)
class Probe(Train):
    """Logistic regression on frozen features of the backbone."""

    untuned: bool = False
    """C = 1 on raw features, as in papers. Default: standardised features, C tuned on validation data."""

    method: ClassVar[str] = "probe"

    @property
    def selects(self) -> str | None:
        return None if self.untuned else self.select

    @property
    def uses(self) -> tuple[str, ...]:
        """The splits whose features are needed."""
        return "train", "val"

    @property
    def chooses_on(self) -> str:
        """The images on which hyperparameters are tuned."""
        return self.select_on


@dataclass(frozen=True)
class S2(Probe):
    """Logistic regression on frozen features of the image at several scales, the larger ones in tiles (S²)."""

    scales: tuple[Count, ...] = (1, 2)
    """Tiles per side at each scale; images are enlarged accordingly, as in the paper."""
    size: Side | None = None
    """Image side in pixels from which all scales are made; above the backbone's own side the larger scales gain detail.
    Tiles have the backbone's own side, or --size if that is smaller."""

    method: ClassVar[str] = "s2"


@dataclass(frozen=True)
class Dfr(Probe):
    """Logistic regression on frozen features, fitted to group-balanced subsets (DFR). Uses group labels."""

    fit_on: Literal["val", "train"] = "val"
    """Split that is fitted: val (half of it tunes first, then all is fitted) or train (four fifths are fitted, the last
    fifth tunes). The other split is not used."""
    select: Literal["worst-group", "worst-class", "balanced", "accuracy", "auc"] = "worst-group"
    """Metric for tuning C and the class weights."""
    refits: Count = 20
    """Number of group-balanced subsets whose fits are averaged."""
    tune_class_weights: bool = True
    """With two classes, also tune the class weights, up to a ratio of 1,000."""
    min_group_size: Count = 1
    """Leave out groups with fewer images; all other groups are subsampled to the size of the smallest."""

    untuned: ClassVar[bool] = False  # no flag: always standardised and tuned  # ty: ignore[incompatible-attribute-override]
    method: ClassVar[str] = "dfr"
    needs_groups: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (DFR-{self.fit_on.capitalize()}: fitted and chosen with group labels)"

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.fit_on,)

    @property
    def one_in(self) -> int:
        """One image in this many tunes; the others are fitted."""
        return {"val": 2, "train": 5}[self.fit_on]

    @property
    def chooses_on(self) -> str:
        return {"val": "half of val", "train": "a fifth of train"}[self.fit_on]


@dataclass(frozen=True)
class CentreCrop(Probe):
    """Logistic regression on the centre crop of every image: a baseline of A²."""

    crop_size: tuple[str, ...] = ("4/7",)
    """Crop side, as a fraction of the image's (0.5, 2/7) or in pixels (64). Of several, validation data select."""
    size: Side | None = None
    """Image side in pixels from which crops are cut; above the backbone's own side they gain detail. Crops are resized
    to the backbone's own side, or to --size if that is smaller."""

    method: ClassVar[str] = "centre-crop"

    @property
    def selects(self) -> str | None:
        return None if self.untuned and self.choices == 1 else self.select

    @property
    def choices(self) -> int:
        """The number of alternatives among which validation data select."""
        return len(self.crop_size)


@dataclass(frozen=True)
class RandomCrop(CentreCrop):
    """Logistic regression on random crops, fixed for each image: a baseline of A²."""

    crop_size: tuple[str, ...] = ("2/7",)
    """Crop sides, as fractions of the image's (0.5, 2/7), in pixels (64), or one per crop (64+32). Of several such
    plans, validation data select."""
    crop_count: tuple[Count, ...] = ()
    """Number of crops, without overlap; further crops take the last side given. Of several numbers, validation data
    select. Default: one crop per side."""

    method: ClassVar[str] = "random-crop"

    @property
    def choices(self) -> int:
        return len(self.crop_size) * max(1, len(self.crop_count))


@dataclass(frozen=True)
class A2(RandomCrop):
    """Logistic regression on the crops that a second, usually small, backbone attends to most (A²): blind to the rest.

    --backbone classifies the crops, --where selects them."""

    where: str | None = None
    """Backbone whose attention selects the crops. Default: that of --backbone."""
    layer: tuple[Index, ...] = (-1,)
    """Block whose attention is used: 0 is the first, -1 the last. Of several, validation data select."""
    heads: tuple[str, ...] = ("mean",)
    """Aggregation of the attention heads: mean, entropy (sharp heads weigh more), lowest (the sharpest quarter), max,
    or the number of a single head (from 0). Of several, validation data select."""

    method: ClassVar[str] = "a2"

    @property
    def backbones(self) -> tuple[str | None, ...]:
        return (self.where, self.backbone)

    @property
    def choices(self) -> int:
        return super().choices * len(self.layer) * len(self.heads)


@dataclass(frozen=True)
class A2Dfr(Dfr, A2):
    """A² with a head fitted to group-balanced subsets (DFR): blind outside its crops. Uses group labels."""

    method: ClassVar[str] = "a2-dfr"


@dataclass(frozen=True)
class EarlyMask(Loop):
    """Classify from what given masks show: blind to everything else."""

    masks: str = "data"
    """Masks: those of the data, a folder of masks under the images' paths, or found:BACKBONE, tokencut:BACKBONE
    (unsupervised), u2net:FILE.onnx (supervised), computed once."""
    sight: Literal["patches", "pixels"] = "patches"
    """What is hidden: whole patches, or also pixels outside the mask inside kept patches."""
    patch_threshold: PositiveFraction | None = None
    """Keep a patch if at least this fraction of it lies inside the mask. Default: 0.5; with --sight pixels 0.1."""
    zoom: bool = False
    """Classify the enlarged window around the mask."""
    fill: Fill = "mean"
    """With --sight pixels or --zoom, what replaces hidden pixels in kept patches: the backbone's mean colour, black,
    white, grey or fixed noise."""
    freeze_backbone: bool = False
    """Train only the classification head."""

    method: ClassVar[str] = "early-mask"


@dataclass(frozen=True)
class LateMask(EarlyMask):
    """See the whole image, then pool only the patches inside given masks: not blind, the rival of early masking."""

    method: ClassVar[str] = "late-mask"


@dataclass(frozen=True)
class A2Adapter(Probe):
    """A² with a small adapter (about 3,000 parameters) that learns which candidate crops a probe classifies best.

    --backbone classifies the crops, --where selects them; the candidates are the same in all images."""

    where: str | None = None
    """Backbone whose attention is adapted. Default: that of --backbone."""
    layer: Index = -1
    """Block whose attention is used: 0 is the first, -1 the last."""
    heads: str = "mean"
    """Aggregation of the attention heads: mean, entropy, lowest, max, or the number of a single head (from 0)."""
    adapter: Literal["tokens", "map"] = "tokens"
    """Input of the adapter: the token of each patch, or the whole attention map."""
    candidates: tuple[str, ...] = ("1/7", "2/7")
    """Sides of the candidate crops, as fractions of the image's or in pixels; as many as fit without overlap (49 + 9),
    or N side by side: 1/7x3 2/7x7 is the paper's."""
    crop_count: Count = 1
    """Number of crops selected."""
    size: Side | None = None
    """Image side in pixels from which crops are cut; above the backbone's own side they gain detail."""
    train_images: Annotated[int, Within(4, 10**9)] = 8192
    """Maximum number of training images for the adapter; logistic regression uses all of them."""
    steps: Whole = 1000
    """Adam steps; 0 leaves the attention as it is: the baseline with the same candidates."""
    lr: NotNegative = 1e-3
    """Adam learning rate."""
    support: Several = 256
    """Images per step on which logistic regression is fitted."""
    query: Count = 256
    """Further images per step on which its loss is measured."""
    noise: Positive = 0.05
    """Initial standard deviation of the noise in the perturbed top-k, relative to scores in [0, 1]; decays to 0."""
    noise_samples: Several = 500
    """Noise samples per image."""
    fit_steps: Count = 10
    """Gradient-descent steps of each logistic regression fit."""
    fit_lr: Positive = 1.0
    """Step size of these fits, as a multiple of the largest one that is guaranteed not to diverge."""

    method: ClassVar[str] = "a2-adapter"

    @property
    def backbones(self) -> tuple[str | None, ...]:
        return (self.where, self.backbone)
