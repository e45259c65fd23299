"""What each way of training a classifier is told besides, and what its defaults are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .training import Loop, Train

Fill = Literal["mean", "black", "white", "grey", "noise"]  # what hidden pixels look like


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

    @property
    def uses(self) -> tuple[str, ...]:
        """The splits whose features it needs."""
        return "train", "val"

    @property
    def chooses_on(self) -> str:
        """Which pictures choose, where there is a choice."""
        return "val"


@dataclass(frozen=True)
class S2(Probe):
    """Logistic regression on frozen features of the picture at several scales, the larger ones in tiles (S²)."""

    scales: tuple[int, ...] = (1, 2)
    """How many tiles a side has at each scale. Pictures are enlarged to what that takes, as in the paper."""
    size: int | None = None
    """Side of the pictures that all scales are made from, in pixels; more than the backbone expects keeps more detail
    in the larger scales. Tiles are of what it expects, or of --size where that is less."""

    method: ClassVar[str] = "s2"


@dataclass(frozen=True)
class Dfr(Probe):
    """Logistic regression on frozen features, fitted to groups of equal size (DFR). It uses group labels."""

    kind: Literal["val", "train"] = "val"
    """What is fitted: the validation data, half of which choose before all are fitted; or four fifths of the training
    data, for which the last fifth choose. The other split is not used."""
    select: Literal["worst-group", "worst-class", "balanced", "accuracy", "auc"] = "worst-group"
    """What C and class weights are chosen by."""
    refits: int = 20
    """How many subsets with groups of equal size are drawn, and the fits to them averaged."""
    weigh_classes: bool = True
    """With two classes, also choose how much more one of them counts, up to 1,000 times."""
    floor: int = 1
    """Leave out groups of fewer pictures: all others are cut to the size of the smallest."""

    plain: ClassVar[bool] = False  # no flag: features are always standardised  # ty: ignore[incompatible-attribute-override]
    method: ClassVar[str] = "dfr"
    needs_groups: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (DFR-{self.kind.capitalize()}: fitted and chosen with group labels)"

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def one_in(self) -> int:
        """How many pictures come to one that chooses."""
        return {"val": 2, "train": 5}[self.kind]

    @property
    def chooses_on(self) -> str:
        return {"val": "half of val", "train": "a fifth of train"}[self.kind]


@dataclass(frozen=True)
class CentreCrop(Probe):
    """Logistic regression on the centre of every picture alone: what A² must beat."""

    crop: tuple[str, ...] = ("4/7",)
    """Side of the crop: a share of the picture's (0.5, 2/7) or pixels (64). Of several, validation data choose."""
    size: int | None = None
    """Side of the pictures that crops are cut from, in pixels; more than the backbone expects keeps more detail.
    Crops are brought to what it expects, or to --size where that is less."""

    method: ClassVar[str] = "centre-crop"

    @property
    def selects(self) -> str | None:
        return None if self.plain and self.choices == 1 else self.select

    @property
    def choices(self) -> int:
        """How many the validation data choose from."""
        return len(self.crop)


@dataclass(frozen=True)
class RandomCrop(CentreCrop):
    """Logistic regression on crops from anywhere, always the same of the same picture: what A² must beat."""

    crop: tuple[str, ...] = ("2/7",)
    """Sides of the crops: a share of the picture's (0.5, 2/7) or pixels (64), or several (64+32). Of several such
    plans, validation data choose."""
    crops: tuple[int, ...] = ()
    """How many crops, without overlap; the last side named goes for all further ones. Of several numbers, validation
    data choose. Default: as many as there are sides."""

    method: ClassVar[str] = "random-crop"

    @property
    def choices(self) -> int:
        return len(self.crop) * max(1, len(self.crops))


@dataclass(frozen=True)
class A2(RandomCrop):
    """Logistic regression on the crops that a second, usually small, backbone attends to most (A²): blind to the rest.

    --backbone says what it is, --where says where to look."""

    where: str | None = None
    """The backbone whose attention chooses the crops. Default: the same."""
    layer: tuple[int, ...] = (-1,)
    """The block to take it from: 0 is the first, -1 the last. Of several, validation data choose."""
    heads: tuple[str, ...] = ("mean",)
    """How its heads are joined: mean, entropy (sharp heads weigh more), lowest (the sharpest quarter), max, or the
    number of a single head (from 0). Of several, validation data choose."""

    method: ClassVar[str] = "a2"

    @property
    def choices(self) -> int:
        return super().choices * len(self.layer) * len(self.heads)


@dataclass(frozen=True)
class A2Dfr(Dfr, A2):
    """A², fitted to groups of equal size (DFR): blind to everything but its crops. It uses group labels."""

    method: ClassVar[str] = "a2-dfr"


@dataclass(frozen=True)
class Shaping:
    """How much each of the losses that shape the parts counts; 0 leaves it out. The defaults are the papers'."""

    total_variation: float = 1.0
    """Few borders between parts."""
    entropy: float = 1.0
    """Every patch is surely of one part."""
    equivariance: float = 1.0
    """Parts move with the picture."""
    orthogonality: float = 1.0
    """The embeddings of parts are unlike each other."""
    presence: float = 1.0
    """Every part is somewhere in the batch."""
    background: float = 2.0
    """Every picture has background, towards its corners."""
    concentration: float = 0.0
    """Parts are compact (PDiscoNet)."""
    orthogonal: Literal["parts", "channels"] | None = None
    """What is made unlike each other. Default: parts; the published code takes channels, by mistake."""
    total_variation_at: int | None = None
    """Patches per side at which total variation has its weight; on a coarser grid the same parts have more border for
    their size, so it counts for less. Default: 37, the papers' grid; 0, the published code's: the same on all."""

    @classmethod
    def none(cls) -> Shaping:
        return cls(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Pdiscoformer(Loop):
    """Discover parts and answer from them; it sees everything (PDiscoFormer)."""

    epochs: int = 30
    lr: float = 3e-5
    """Of the backbone, at a batch of 128; it grows with the square root of the batch and falls by a cosine."""
    head_lr: float = 1000.0
    """Times that for heads and the modulation of parts."""
    prototype_lr: float = 100.0
    """Times that for the prototypes of the parts."""
    parts: int = 4
    """K, the number of parts besides the background."""
    part_dropout: float = 0.3
    """How often a part is left out in training."""
    shaping: Shaping = field(default_factory=Shaping)
    classify_parts: float = 1.0
    """How much the answer of the parts themselves counts in training."""
    tune_selector: Literal["nothing", "tokens", "all"] = "tokens"
    """What is trained of the ViT that discovers parts: its tokens and positions, as in the papers, all of it, or
    nothing, which is quickest."""
    look_size: int | None = None
    """Side of the pictures in which parts are discovered, in pixels: more makes finer parts. Default: as --size; iFAM
    with pixels takes twice that where it has fewer than 28 patches."""
    registers: bool = True
    """Use the backbone's register tokens."""
    preset: Literal["papers", "published"] = "papers"
    """Where papers and published code contradict each other: as the papers say, or exactly as the code does."""
    share_noise: bool | None = None
    """One draw of noise for maps and mask. Default: the preset's (published code draws twice)."""
    eval_noise: bool | None = None
    """Noise also in evaluation. Default: the preset's (published code leaves it on)."""

    method: ClassVar[str] = "pdiscoformer"

    @property
    def hides_pixels(self) -> bool:
        return False


@dataclass(frozen=True)
class Ifam(Pdiscoformer):
    """Discover parts, then answer from their pixels, or patches, alone: blind to everything else (iFAM)."""

    parts: int = 1
    """K, the number of parts besides the background. One finds things whole; several can be looked at, and left out,
    one by one."""
    where: str | None = None
    """Another backbone to discover the parts with, with pixels. Default: the same."""
    batch: int = 64
    average: float | None = 0.999
    """Decay of an exponential moving average of the weights, which is what is kept; None: the weights themselves."""
    balance: Literal["none", "classes", "groups", "loss"] = "loss"
    """Let the loss allow for how common each class is, so that the answer does not (logit adjustment); or draw every
    class, or every group, equally often."""
    sight: Literal["patches", "pixels"] | None = None
    """What is hidden: whole patches, or also the pixels around the parts in kept patches. Default: pixels; the
    published code, and --soft, hide patches."""
    guide: int = 16
    """With pixels: how far the picture's edges pull at the border of parts, in pixels; 0: not at all."""
    sure: float = 0.5
    """With pixels: keep those whose share of the parts is at least that; more keeps only what is surely inside."""
    zoom: bool | None = None
    """Answer from the window around the sight, enlarged. Default: with pixels."""
    look_again: bool | None = None
    """With pixels, the default: discover parts once more in the window around the first sight, enlarged."""
    mask_gradient: bool | None = None
    """The answer teaches where to look, straight through the mask. Default: with patches, as in the papers (the
    published code does not), and not with pixels."""
    soft: bool = False
    """Ablation: weigh patches instead of hiding them, which is not blind."""
    freeze_predictor: bool = False
    """Train only the head of the ViT that answers."""
    mask_dropout: float | None = None
    """How often a part is hidden from the ViT that answers, in training (with one part, so often it sees nothing).
    Default: as --part-dropout."""

    method: ClassVar[str] = "ifam"

    @property
    def hides_pixels(self) -> bool:
        """Whether single pixels are hidden, or only whole patches."""
        usual = "patches" if self.preset == "published" or self.soft else "pixels"
        return (self.sight or usual) == "pixels"

    @property
    def zooms(self) -> bool:
        return self.hides_pixels if self.zoom is None else self.zoom


@dataclass(frozen=True)
class EarlyMask(Loop):
    """Answer from what given masks show, and nothing else."""

    masks: str = "data"
    """The data's own masks, a folder of masks with the pictures' paths, or masks made here once:
    found:BACKBONE, tokencut:BACKBONE (unsupervised), u2net:FILE.onnx (supervised)."""
    sight: Literal["patches", "pixels"] = "patches"
    """What is hidden: whole patches, or also the pixels outside the mask within kept patches."""
    at_least: float | None = None
    """A patch is kept when so much of it is inside the mask. Default: 0.5; with --sight pixels 0.1."""
    zoom: bool = False
    """Look at the window around what the mask shows, brought to the full size."""
    fill: Fill = "mean"
    """What hidden pixels look like inside kept patches, with --sight pixels or --zoom: the backbone's mean colour, black,
    white, grey, or noise, always the same."""
    frozen: bool = False
    """Train the head only."""

    method: ClassVar[str] = "early-mask"


@dataclass(frozen=True)
class LateMask(EarlyMask):
    """See everything, and average only what given masks show: not blind, and the rival of early masking."""

    method: ClassVar[str] = "late-mask"


@dataclass(frozen=True)
class A2Adapter(Probe):
    """A² for what attention ignores: about 3,000 parameters learn to look where a logistic regression can answer from.

    --backbone says what it is, --where says where to look. Crops are chosen among candidates, the same in all pictures.
    """

    where: str | None = None
    """The backbone whose attention is adapted. Default: the same."""
    layer: int = -1
    """The block to take it from: 0 is the first, -1 the last."""
    heads: str = "mean"
    """How its heads are joined: mean, entropy, lowest, max, or the number of a single head (from 0)."""
    adapter: Literal["tokens", "map"] = "tokens"
    """What the adapter sees: the token of each patch, or the map as a whole."""
    candidates: tuple[str, ...] = ("1/7", "2/7")
    """Sides of the crops to choose among: shares of the picture's, or pixels; as many as fit without overlap (49 + 9),
    or so many side by side: 1/7x3 2/7x7 is what the paper prints."""
    crops: int = 1
    """How many of them to look at."""
    size: int | None = None
    """Side of the pictures that crops are cut from, in pixels; more than the backbone expects keeps more detail."""
    pictures: int = 8192
    """At most so many training pictures teach the adapter; logistic regression has all of them."""
    steps: int = 1000
    """Of Adam. 0 leaves the attention as it is: the baseline, with the same candidates."""
    lr: float = 1e-3
    support: int = 256
    """Pictures that logistic regression is fitted on in each step."""
    query: int = 256
    """Others, that it is then asked about."""
    noise: float = 0.05
    """Added to scores from 0 to 1 while choosing, at first; it falls to 0."""
    draws: int = 500
    """Of that noise, for each picture."""
    fit_steps: int = 10
    """Of gradient descent, from zero, in each fit."""
    fit_rate: float = 1.0
    """Their length, as a multiple of the longest that never overshoots."""

    method: ClassVar[str] = "a2-adapter"
