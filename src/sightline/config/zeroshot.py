"""Settings of zero-shot methods, which classify with CLIP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .limits import Checked, Count, NotNegative
from .methods import A2
from .training import Train


@dataclass(frozen=True)
class Prompted(Checked):
    """The CLIP model and its prompts."""

    clip: str = "openclip-l14"
    """CLIP model that transformers can load: a folder, a Hugging Face repository, or one of Sightline's names."""
    prompts: tuple[str, ...] = ("a photo of a {}",)
    """Prompts with {} for the class name; the embeddings of several are averaged."""
    class_names: Path | None = None
    """JSON file with the class names to use in prompts: {"CLASS": "name"}. Default: the names in the data."""

    backbone: ClassVar[str]  # no flag: CLIP's image tower

    @property
    def backbone(self) -> str:
        return self.clip


@dataclass(frozen=True)
class Zs(Prompted, Train):
    """Zero-shot CLIP on whole images, without training: the baseline of a2-zs and ttr."""

    method: ClassVar[str] = "zs"

    @property
    def selects(self) -> str | None:
        return None


@dataclass(frozen=True)
class A2Zs(Prompted, A2):
    """Zero-shot CLIP on the crop that another, usually small, backbone attends to most (A²): blind to the rest."""

    crop_size: tuple[str, ...] = ("4/7",)
    """Crop side, as a fraction of the image's (0.5, 2/7) or in pixels (64). Of several, validation data select."""
    where: str | None = None
    """Backbone whose attention selects the crop. Default: CLIP's image tower."""

    crop_count: ClassVar[tuple[int, ...]] = ()  # no flag: CLIP takes one image  # ty: ignore[incompatible-attribute-override]
    untuned: ClassVar[bool] = True  # no flag: nothing is fitted  # ty: ignore[incompatible-attribute-override]
    method: ClassVar[str] = "a2-zs"

    @property
    def uses(self) -> tuple[str, ...]:
        return ("val",)


@dataclass(frozen=True)
class Ttr(Prompted, Train):
    """Zero-shot CLIP on the cluster of patches that holds the subject (TTR), without training.

    Patches of recent images are clustered together, so images are processed in order, in one process."""

    prompts: tuple[str, ...] = ("a photo of a {}.",)
    """Prompts with {} for the class name; the embeddings of several are averaged."""
    general_prompt: str | None = None
    """Required: a prompt that fits all images, such as "a photo of a bird.", which finds the subject."""
    queue: Count = 28
    """Number of images whose patches are clustered together, the current one last."""
    clusters: Count = 3
    """Number of clusters (k-means)."""
    components: Count = 3
    """Principal components of the patch tokens that are clustered."""
    rank: Count = 16
    """Rank of the randomised SVD that computes them."""
    sigma: NotNegative = 0.72
    """Standard deviation, in patches, of the Gaussian that smooths the components."""

    method: ClassVar[str] = "ttr"

    @property
    def selects(self) -> str | None:
        return None
