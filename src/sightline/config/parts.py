"""Settings of the methods that discover parts: PDiscoFormer and iFAM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .limits import Checked, Count, HalfOpen, InnerFraction, NotNegative, Parts, Side, Whole
from .training import Balance, Loop


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
    pixels or --selector clusters, if --size gives fewer than 28 patches per side, 1.5 times that (with --selector
    learned, twice that)."""
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
    def compares_images(self) -> bool:
        return not self.clusters and self.shaping.presence > 0

    @property
    def hides_pixels(self) -> bool:
        return False

    @property
    def clusters(self) -> bool:
        return False

    @property
    def masks_pixels(self) -> bool:
        """Whether stage 1 decides about pixels, not patches; hidden may then be these, or patches with few of them."""
        return self.hides_pixels or self.clusters


@dataclass(frozen=True)
class Ifam(Pdiscoformer):
    """Discover parts, then classify from their pixels or patches alone: blind to everything else (iFAM)."""

    parts: Parts = 4
    """K, the number of parts besides the background, which can be inspected, named and removed one by one. With
    --selector clusters the foreground does not depend on it."""
    where: str | None = None
    """With --sight pixels or --selector clusters: another backbone for the part selector. Default: that of
    --backbone."""
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
    """What is hidden: whole patches (with --selector clusters: those with less than half of their pixels in the mask),
    or also background pixels inside kept patches. Default: pixels; patches with --preset published or --soft-mask."""
    guide_radius: Whole | None = None
    """With --sight pixels or --selector clusters: radius in pixels of the guided filter that aligns the mask with image
    edges; 0: no filter. Default: 1/14 of the image side."""
    pixel_threshold: InnerFraction = 0.5
    """With --sight pixels or --selector clusters: foreground-probability threshold of the pixel mask."""
    zoom: bool | None = None
    """Classify the enlarged window around the sight. Default: with --sight pixels."""
    refine: bool | None = None
    """With --sight pixels: discover parts a second time in the enlarged window around the first sight. Default: with
    --selector learned."""
    mask_gradient: bool | None = None
    """Straight-through gradient from stage 2 to the part selector. Default: with --sight patches and --selector
    learned, as in the papers (the published code has none); not with pixels."""
    soft_mask: bool = False
    """Ablation: weight patches by foreground probability instead of hiding them. Not blind."""
    freeze_predictor: bool = False
    """Train only the head of the stage 2 ViT."""
    mask_dropout: HalfOpen | None = None
    """Probability of hiding a part from stage 2 in training (with one part: of an empty sight). Default:
    --part-dropout."""

    method: ClassVar[str] = "ifam"

    @property
    def backbones(self) -> tuple[str | None, ...]:
        return (self.where, self.backbone)

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
