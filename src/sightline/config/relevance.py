"""What methods are told that go on with a trained classifier and correct what it relies on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from .training import Loop


@dataclass(frozen=True)
class Tuned(Loop):
    """What every one of them is told."""

    start: Annotated[str | None, arg(name="from")] = None
    """The run of the classifier to go on with (erm, probe, dfr, or one of these); {seed} in it stands for --seed.
    Default: the head that --backbone's own weights have."""
    backbone: str = ""
    """Instead of --from: weights that come with a head for the classes of these data, such as ImageNet's."""
    head_lr: float = 1.0
    """Times the learning rate, for the head, which is trained already."""

    @property
    def folder(self) -> Path:
        begun = Path(self.started_from).name if self.start else Path(self.backbone).stem.replace(":", "-")
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{begun}-{self.seed}"

    @property
    def started_from(self) -> str:
        return (self.start or "").replace("{seed}", str(self.seed))


@dataclass(frozen=True)
class Pointed(Tuned):
    """What those are told that learn from masks; their runs need none."""

    masks: str = "data"
    """The data's own masks, as many as there are; a folder of masks with the pictures' paths; or masks made here once:
    tokencut:BACKBONE, found:BACKBONE (no person drew any), u2net:FILE.onnx (supervised)."""
    bright: Literal["thing", "background"] = "thing"
    """What is bright in the masks."""
    per_class: int | None = None
    """Learn from so many pictures of each class, drawn by --seed. Default: all that have a mask."""
    classes: int | None = None
    """Learn from so many classes, drawn by --seed; the others are only kept. Default: all."""


@dataclass(frozen=True)
class Robustvit(Pointed):
    """Correct a trained classifier with a few masks: its relevance is to lie on the thing (RobustViT)."""

    relevance: Literal["gae", "rollout", "attention"] = "gae"
    """What is meant by relevance; the last two are the paper's ablations."""
    second_order: bool = False
    """Let the gradient also flow through the gradients in GAE; they are constants as published."""
    background: float = 2.0
    """How much relevance outside the mask counts; 0 leaves it out."""
    foreground: float = 0.3
    """How much missing relevance inside the mask counts; 0 leaves it out."""
    explaining: float = 0.8
    """How much both together count."""
    answering: float = 0.2
    """How much the answer counts; 0 leaves it out."""
    answer: Literal["confidence", "label"] = "confidence"
    """What the answer is held to: the model's own at the moment, as published, or the true label."""
    temperature: float | None = None
    """Logits are divided by it for the confidence. Default: the published one (DeiT-B 0.65, DeiT-S 0.55, others 1)."""
    select: Literal["relevance", "balanced", "accuracy", "worst-group", "worst-class", "auc"] = "relevance"  # ty: ignore[incompatible-attribute-override]
    """What the validation data choose by. `relevance` is 1 minus the loss on those that have masks, as published."""
    epochs: int = 50
    batch: int = 8
    lr: float = 1.2e-5
    """At a batch of 128, so 3e-6 at 8, as published for ViT-B; it falls by a cosine."""
    weight_decay: float = 0.01
    """Before it is divided by the square root of the number of steps."""

    method: ClassVar[str] = "robustvit"


@dataclass(frozen=True)
class Rrr(Pointed):
    """Go on training on labels, with small input gradients of all classes outside masks (RRR)."""

    background: float = 1.0
    """How much squared gradients of the summed log probabilities count, at background pixels: so many times what they
    are in the beginning, which differs by many orders between models."""
    relative: bool = True
    """Or, with --no-relative, as they are."""
    double_backward: bool = True
    """Let the penalty teach: without it, as in the published code, it has no gradient at all."""
    epochs: int = 10
    batch: int = 32
    lr: float = 1e-5

    method: ClassVar[str] = "rrr"


@dataclass(frozen=True)
class Gradmask(Rrr):
    """Go on training on labels, with small input gradients of the true class outside masks (GradMask)."""

    background: float = 1.0
    """How much the gradient of the class score counts, at background pixels: so many times what it is in the
    beginning."""
    penalty: Literal["norm", "squares"] = "norm"
    """Its length, as in the paper, or the mean of its squares, as in RobustViT's code."""

    method: ClassVar[str] = "gradmask"


@dataclass(frozen=True)
class Masktune(Tuned):
    """Hide what a trained classifier finds most relevant, and train it a little further (MaskTune). Needs no masks."""

    relevance: Literal["gae", "rollout", "attention", "gradient"] = "gae"
    """How the relevant pixels are found."""
    deviations: float = 2.0
    """Hide pixels whose relevance is so many standard deviations above the mean."""
    epochs: int = 1
    lr: float = 1e-5

    method: ClassVar[str] = "masktune"
