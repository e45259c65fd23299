"""Settings of methods that fine-tune a trained classifier to correct what it relies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from .limits import Count, NotNegative, Positive
from .training import Loop


@dataclass(frozen=True)
class Tuned(Loop):
    """Settings that all of them share."""

    init_from: str | None = None
    """Run of the classifier to fine-tune (erm, probe, dfr or one of these methods); {seed} in it is replaced by --seed.
    Default: the classification head in the weights of --backbone."""
    backbone: str = ""
    """Instead of --init-from: weights with a classification head for the classes of these data, such as ImageNet's."""
    head_lr_factor: NotNegative = 1.0
    """Learning rate of the head, as a multiple of --lr."""

    @property
    def folder(self) -> Path:
        origin = Path(self.started_from).name if self.init_from else Path(self.backbone).stem.replace(":", "-")
        return self.out or Path("runs") / f"{self.data.stem}-{self.method}-{origin}-{self.seed}"

    @property
    def started_from(self) -> str:
        return (self.init_from or "").replace("{seed}", str(self.seed))


@dataclass(frozen=True)
class Pointed(Tuned):
    """Settings of those that use masks in training; at inference they need none."""

    masks: str = "data"
    """Object masks: those of the data (as many as there are), a folder of masks under the images' paths, or
    tokencut:BACKBONE, found:BACKBONE (unsupervised), u2net:FILE.onnx (supervised), computed once."""
    mask_marks: Literal["object", "background"] = "object"
    """What bright mask pixels mark."""
    masks_per_class: Count | None = None
    """Images with masks per class, drawn with --seed. Default: all that have a mask."""
    mask_classes: Count | None = None
    """Number of classes whose masks are used, drawn with --seed. Default: all."""


@dataclass(frozen=True)
class Robustvit(Pointed):
    """Fine-tune a classifier with a few masks so that its relevance maps lie on the object (RobustViT)."""

    relevance: Literal["gae", "rollout", "attention"] = "gae"
    """Relevance map; rollout and attention are the paper's ablations."""
    double_backward: bool = False
    """Also differentiate through the gradients inside GAE; the published code treats them as constants."""
    background_weight: NotNegative = 2.0
    """Weight of the relevance outside the mask."""
    foreground_weight: NotNegative = 0.3
    """Weight of the missing relevance inside the mask."""
    relevance_weight: NotNegative = 0.8
    """Weight of the two relevance losses together."""
    classification_weight: NotNegative = 0.2
    """Weight of the classification loss."""
    classification_target: Literal["prediction", "label"] = "prediction"
    """Target of the classification loss: the model's current prediction, as published, or the true label."""
    temperature: Positive | None = None
    """Temperature of the logits in the classification loss. Default: as published (DeiT-B 0.65, DeiT-S 0.55, else
    1)."""
    select: Literal["relevance", "balanced", "accuracy", "worst-group", "worst-class", "auc"] = "relevance"  # ty: ignore[incompatible-attribute-override]
    """Validation metric for checkpoint selection; `relevance` is 1 minus the loss on validation images with masks."""
    epochs: Count = 50
    """Number of passes over the training data."""
    batch: Count = 8
    """Batch size, summed over all processes."""
    lr: NotNegative = 1.2e-5
    """Learning rate at batch size 128, so 3e-6 at 8, as published for ViT-B; with cosine decay."""
    weight_decay: NotNegative = 0.01
    """AdamW weight decay; the effective value is this divided by √(total steps)."""

    method: ClassVar[str] = "robustvit"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lr": (1.2e-5, 5e-5, 2e-4)}


@dataclass(frozen=True)
class Rrr(Pointed):
    """Fine-tune a classifier with a penalty on the input gradients of all classes outside the masks (RRR)."""

    background_weight: NotNegative = 1.0
    """Weight of the penalty: squared gradients of the summed log probabilities at background pixels."""
    normalize_penalty: bool = True
    """Divide the penalty by its initial value, which differs between models by orders of magnitude."""
    double_backward: bool = True
    """Differentiate through the input gradients; without, as in the published code, the penalty has no gradient."""
    epochs: Count = 10
    """Number of passes over the training data."""
    batch: Count = 32
    """Batch size, summed over all processes."""
    lr: NotNegative = 1e-5
    """Learning rate at batch size 128, with cosine decay."""

    method: ClassVar[str] = "rrr"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"background_weight": (0.1, 1.0, 10.0)}


@dataclass(frozen=True)
class Gradmask(Rrr):
    """Fine-tune a classifier with a penalty on the input gradient of the true class outside the masks (GradMask)."""

    background_weight: NotNegative = 1.0
    """Weight of the penalty: the gradient of the class score at background pixels."""
    penalty: Literal["norm", "squares"] = "norm"
    """L2 norm of the gradient, as in the paper, or mean of its squares, as in RobustViT's code."""

    method: ClassVar[str] = "gradmask"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"background_weight": (0.1, 1.0, 10.0)}


@dataclass(frozen=True)
class Masktune(Tuned):
    """Fine-tune a classifier on images with its most relevant pixels hidden (MaskTune). Needs no masks."""

    relevance: Literal["gae", "rollout", "attention", "gradient"] = "gae"
    """Relevance map that decides what is hidden."""
    deviations: NotNegative = 2.0
    """Hide pixels whose relevance exceeds the mean by this many standard deviations."""
    epochs: Count = 1
    """Number of passes over the training data."""
    lr: NotNegative = 1e-5
    """Learning rate at batch size 128, with cosine decay."""

    method: ClassVar[str] = "masktune"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lr": (1e-5, 5e-5)}
