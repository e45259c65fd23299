"""Settings of the methods that train a classifier, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from .limits import (
    Checked,
    Count,
    HalfOpen,
    Index,
    InnerFraction,
    NotNegative,
    Parts,
    Positive,
    PositiveFraction,
    Several,
    Side,
    Whole,
    Within,
)
from .training import Balance, Loop, Train

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
    def choices(self) -> int:
        return super().choices * len(self.layer) * len(self.heads)


@dataclass(frozen=True)
class A2Dfr(Dfr, A2):
    """A² with a head fitted to group-balanced subsets (DFR): blind outside its crops. Uses group labels."""

    method: ClassVar[str] = "a2-dfr"


@dataclass(frozen=True)
class Shaping(Checked):
    """Weights of the losses that shape the part maps; 0 disables one. Defaults are the papers'."""

    flag_prefix: ClassVar[str] = "--shaping."

    total_variation: NotNegative = 1.0
    """Total variation: short boundaries between parts."""
    entropy: NotNegative = 1.0
    """Entropy: every patch belongs clearly to one part."""
    equivariance: NotNegative = 1.0
    """Equivariance: part maps move with the image."""
    orthogonality: NotNegative = 1.0
    """Orthogonality: part embeddings differ from each other."""
    presence: NotNegative = 1.0
    """Presence: every part occurs somewhere in the batch."""
    background: NotNegative = 2.0
    """Background presence: every image has background, towards its border."""
    concentration: NotNegative = 0.0
    """Concentration: compact parts (PDiscoNet)."""
    orthogonality_over: Literal["parts", "channels"] | None = None
    """Axis of the orthogonality loss. Default: parts; the published code uses channels, by mistake."""
    total_variation_grid: Whole | None = None
    """Patches per side at which total variation has its full weight; coarser grids get proportionally less. Default:
    37, the papers' grid; 0: the same weight on every grid, as in the published code."""

    @classmethod
    def none(cls) -> Shaping:
        return cls(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Pdiscoformer(Loop):
    """Discover parts and classify by pooling them (PDiscoFormer): not blind, it sees the whole image."""

    epochs: Count = 30
    """Number of passes over the training data."""
    lr: NotNegative = 3e-5
    """Backbone learning rate at batch size 128; scaled by √(batch/128), with cosine decay over the epochs."""
    head_lr_factor: NotNegative = 1000.0
    """Learning rate of the heads and the part modulation, as a multiple of --lr."""
    prototype_lr_factor: NotNegative = 100.0
    """Learning rate of the part prototypes, as a multiple of --lr."""
    parts: Parts = 4
    """K, the number of parts besides the background."""
    baseline: bool = True
    """Afterwards also train a linear probe on the same backbone, and compare: does the sight lose what matters?"""
    part_dropout: HalfOpen = 0.3
    """Probability of dropping a part in training."""
    shaping: Shaping = field(default_factory=Shaping)
    classify_parts: NotNegative = 1.0
    """Weight of the classification loss of the part embeddings (stage 1)."""
    tune_selector: Literal["none", "tokens", "all"] = "tokens"
    """Trained weights of the part selector's ViT: its tokens and positions (as in the papers), all, or none
    (fastest)."""
    selector_size: Side | None = None
    """Image side in pixels for the part selector; larger gives finer parts. Default: --size; for iFAM with --sight
    pixels, if --size gives fewer than 28 patches per side, 1.5 times that (with --selector learned, twice that)."""
    registers: bool = True
    """Use the backbone's register tokens."""
    preset: Literal["papers", "published"] = "papers"
    """Where the papers and the published code differ: follow the papers, or reproduce the code."""
    share_noise: bool | None = None
    """Share one Gumbel noise draw between part maps and mask. Default: the preset's (the published code draws
    twice)."""
    eval_noise: bool | None = None
    """Gumbel noise in evaluation, too. Default: the preset's (the published code leaves it on)."""

    method: ClassVar[str] = "pdiscoformer"

    @property
    def hides_pixels(self) -> bool:
        return False

    @property
    def clusters(self) -> bool:
        return False


@dataclass(frozen=True)
class Ifam(Pdiscoformer):
    """Discover parts, then classify from their pixels or patches alone: blind to everything else (iFAM)."""

    parts: Parts = 4
    """K, the number of parts besides the background, which can be inspected, named and removed one by one. With
    --selector clusters the foreground does not depend on it."""
    where: str | None = None
    """With --sight pixels: another backbone for the part selector. Default: that of --backbone."""
    batch: Count = 64
    """Batch size, summed over all processes."""
    ema: InnerFraction | None = 0.999
    """Decay of the exponential moving average (EMA) of the weights; None: no EMA."""
    balance: Balance = "logit-adjustment"
    """Draw classes or groups equally often, or logit adjustment with the training class priors."""
    selector: Literal["clusters", "learned"] | None = None
    """How stage 1 finds the object: by clustering patch tokens before training (frozen; needs objects that seldom touch
    the image border), or by learned prototypes and shaping losses as in the papers. Default: clusters with --sight
    pixels; learned with patches, --preset published or --mask-gradient."""
    selector_depth: Count | None = None
    """With --selector clusters: number of blocks of the selector's ViT that are used, counted from the input. Default:
    two thirds of them, which find the object as well as all of them."""
    sight: Literal["patches", "pixels"] | None = None
    """What is hidden: whole patches, or also background pixels inside kept patches. Default: pixels; patches with
    --preset published or --soft-mask."""
    guide_radius: Whole | None = None
    """With --sight pixels: radius in pixels of the guided filter that aligns the mask with image edges; 0: no filter.
    Default: 1/14 of the image side."""
    pixel_threshold: InnerFraction = 0.5
    """With --sight pixels: foreground-probability threshold of the pixel mask."""
    zoom: bool | None = None
    """Classify the enlarged window around the sight. Default: with --sight pixels."""
    refine: bool | None = None
    """With --sight pixels: discover parts a second time in the enlarged window around the first sight. Default: with
    --selector learned."""
    mask_gradient: bool | None = None
    """Straight-through gradient from stage 2 to the part selector. Default: with --sight patches, as in the papers (the
    published code has none); not with pixels."""
    soft_mask: bool = False
    """Ablation: weight patches by foreground probability instead of hiding them. Not blind."""
    freeze_predictor: bool = False
    """Train only the head of the stage 2 ViT."""
    mask_dropout: HalfOpen | None = None
    """Probability of hiding a part from stage 2 in training (with one part: of an empty sight). Default:
    --part-dropout."""

    method: ClassVar[str] = "ifam"

    @property
    def hides_pixels(self) -> bool:
        """Whether single pixels are hidden, not only whole patches."""
        default = "patches" if self.preset == "published" or self.soft_mask else "pixels"
        return (self.sight or default) == "pixels"

    @property
    def clusters(self) -> bool:
        """Whether stage 1 is found by clustering, not learned."""
        learned = not self.hides_pixels or self.preset == "published" or bool(self.mask_gradient)
        return (self.selector or ("learned" if learned else "clusters")) == "clusters"

    @property
    def refines(self) -> bool:
        """Whether stage 1 looks a second time."""
        return self.hides_pixels and (not self.clusters if self.refine is None else self.refine)

    @property
    def zooms(self) -> bool:
        return self.hides_pixels if self.zoom is None else self.zoom


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
