"""What a user can say: each dataclass is a command, each field a flag and a Python argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional, Suppress


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
    """Read a published data set as it was published: waterbirds, cub, imagenet9:mixed_rand, ..."""
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
    warmup: float = 0.0
    """Epochs in which the learning rate rises from 0, step by step."""
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
    compile: bool = False
    """Compile the ViT's blocks: a minute's wait at the start, then faster on a GPU."""


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

    @property
    def folder(self) -> Path:
        if self.out or self.where is None:
            return super().folder
        where, what = (Path(name).stem.replace(":", "-") for name in (self.where, self.backbone))
        return Path("runs") / f"{self.data.stem}-{self.method}-{where}-{what}-{self.seed}"


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
    tune_selector: bool = False
    """Train all of the ViT that discovers parts, not only its tokens and positions."""
    registers: bool = True
    """Use the backbone's register tokens."""
    preset: Literal["papers", "published"] = "papers"
    """Where papers and published code contradict each other: as the papers say, or exactly as the code does."""
    share_noise: bool | None = None
    """One draw of noise for maps and mask. Default: the preset's (published code draws twice)."""
    eval_noise: bool | None = None
    """Noise also in evaluation. Default: the preset's (published code leaves it on)."""

    method: ClassVar[str] = "pdiscoformer"


@dataclass(frozen=True)
class Ifam(Pdiscoformer):
    """Discover parts, then answer from their patches alone: blind to everything else (iFAM)."""

    mask_gradient: bool | None = None
    """The answer teaches where to look, straight through the mask. Default: the preset's (no in published code)."""
    soft: bool = False
    """Ablation: weigh patches instead of hiding them, which is not blind."""
    freeze_predictor: bool = False
    """Train only the head of the ViT that answers."""
    mask_dropout: float | None = None
    """How often a part is hidden from the ViT that answers, in training. Default: as --part-dropout."""

    method: ClassVar[str] = "ifam"


@dataclass(frozen=True)
class EarlyMask(Loop):
    """Answer from what given masks show, and nothing else."""

    masks: str = "data"
    """The data's own masks, a folder of masks with the pictures' paths, or masks made here once:
    found:BACKBONE, tokencut:BACKBONE (unsupervised), u2net:FILE.onnx (supervised)."""
    at_least: float = 0.5
    """A patch is kept when so much of it is inside the mask."""
    pixels: bool = False
    """Hide the pixels outside the mask in kept patches, too (then keep patches from a tenth on: --at-least 0.1)."""
    frozen: bool = False
    """Train the head only."""

    method: ClassVar[str] = "early-mask"


@dataclass(frozen=True)
class LateMask(EarlyMask):
    """See everything, and average only what given masks show: not blind, and the rival of early masking."""

    method: ClassVar[str] = "late-mask"


@dataclass(frozen=True)
class Pretrain(Loop):
    """Make a backbone from pictures alone, by self-distillation (DINO). Labels and masks, where there are any, are
    only used to see how far it has come."""

    data: Positional[Path]
    """A folder of pictures, nested as you like, or a CSV file with a column image; or a data set with classes."""
    size: Literal["nano", "ti", "s", "b"] = "nano"  # ty: ignore[incompatible-attribute-override]
    """Of the model: 1.2, 5.4, 21 or 86 million parameters."""
    patch: int | None = None
    """Side of a patch in pixels. Default: 8 for nano, 16 for the others."""
    pixels: int | None = None
    """Side of the pictures that it is made for. Default: 96 for nano, 224 for the others."""
    registers: int = 4
    large: int | None = None
    """Side of the two large crops. Default: 2/3 of --pixels for nano, 1/2 for the others."""
    small: int | None = None
    """Side of the small crops. Default: a little less than half of the large ones."""
    smalls: int = 6
    """How many small crops."""
    finish: float = 0.05
    """The last share of the steps, with large crops of the full size."""
    momentum: float = 0.994
    """Of the teacher, at the beginning; it rises to 1."""
    prototypes: int = 16384
    head_width: int = 2048
    centring: Literal["mean", "sinkhorn"] = "mean"
    """How the teacher is kept from answering the same to everything."""
    koleo: float = 0.1
    """Weight of the loss that keeps pictures apart."""
    masked: float = 0.0
    """Weight of the masked-patch loss (iBOT), which costs time; 0: off."""
    examine_every: int = 5
    """Measure neighbours and attention every so many epochs."""

    batch: int = 512
    epochs: int = 100
    warmup: float = 10.0
    """Epochs in which the learning rate rises from 0, step by step."""
    lr: float = 5e-4
    """At a batch of 128; it grows with the square root of the batch and falls by a cosine."""
    head_lr: Suppress[float] = 1.0
    weight_decay: float = 4.0
    """Before it is divided by the square root of the number of steps."""
    clip: float = 3.0
    """Largest norm of the gradient."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-pretrain-SIZE-SEED."""
    cache: Path | None = None
    """Keep decoded pictures in this folder. Default: in the run folder."""

    backbone: Suppress[str] = ""
    select: Suppress[Literal["last"]] = "last"  # ty: ignore[incompatible-attribute-override]
    augment: Suppress[Literal["light"]] = "light"
    balance: Suppress[Literal["none"]] = "none"
    average: Suppress[None] = None
    patience: Suppress[None] = None

    method: ClassVar[str] = "pretrain"

    @property
    def selects(self) -> str | None:
        return None

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{self.size}-{self.seed}"


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


@dataclass(frozen=True)
class Evaluate:
    """Measure a trained model: every group, with intervals."""

    run: Positional[Path]
    data: Positional[Path | None] = None
    """Other data than those it was trained on."""
    layout: str | None = None
    """Of published data, perhaps with an option: imagenet9:mixed_rand, metashift-animals:3."""
    split: Literal["train", "val", "test"] = "test"
    batch: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    """Folder for metrics.json and the answers per picture. Default: the run, if these are its own data."""


@dataclass(frozen=True)
class Localize(Evaluate):
    """Measure where a trained model looks: against true masks, and key points where there are any."""

    out: Path | None = None
    """Folder for localization.json. Default: the run, if these are its own data."""
    published: bool = False
    """Key points in the geometry of the published iFAM code, which is half a cell off."""


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
    """Run folders; or, to compare on other data, the folders that `evaluate` made for these in each run."""
    split: Literal["val", "test"] = "test"
    out: Path | None = None
    """Write the table there, as JSON."""


@dataclass(frozen=True)
class Import:
    """Make a run folder of a published iFAM or PDiscoFormer checkpoint: then everything here works with it."""

    file: Positional[Path]
    """The checkpoint: .pth, .pt or .safetensors."""
    data: Positional[Path]
    """The data it is for, whose classes name its answers."""
    out: Path | None = None
    """The run folder. Default: runs/DATA-METHOD-BACKBONE-0."""
    layout: str | None = None
    """Read a published data set as it was published: waterbirds, cub, celeba, ..."""
    like: str | None = None
    """The known backbone it was made from, where the file cannot tell, such as dinov2-b14-reg."""
    size: int | None = None
    """Side of the pictures in pixels. Default: what it was trained with, by the number of its positions."""


@dataclass(frozen=True)
class Backbones:
    """List the backbones that are known by name."""


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded pictures: train, measure, prove."""

    out: Path = Path("runs/demo")
    """Folder for everything it makes; what was there before is removed."""
    seed: int = 0
