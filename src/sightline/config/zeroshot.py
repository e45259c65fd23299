"""What methods that ask CLIP are told, and what their defaults are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .methods import A2
from .training import Train


@dataclass(frozen=True)
class Prompted:
    """What CLIP is asked, in words."""

    clip: str = "openclip-l14"
    """A CLIP that transformers can read: a folder, a repository on the Hugging Face hub, or one of Sightline's names
    for those."""
    prompts: tuple[str, ...] = ("a photo of a {}",)
    """What is said of a picture, with {} for the class; of several, the embeddings are averaged."""
    names: Path | None = None
    """A JSON file that says what classes are called, where the data do not: {"CLASS": "what it is called"}."""

    backbone: ClassVar[str]  # no flag: CLIP's own

    @property
    def backbone(self) -> str:
        return self.clip


@dataclass(frozen=True)
class Zs(Prompted, Train):
    """Ask CLIP about whole pictures, without any training: what A² with CLIP must beat."""

    method: ClassVar[str] = "zs"

    @property
    def selects(self) -> str | None:
        return None


@dataclass(frozen=True)
class A2Zs(Prompted, A2):
    """Ask CLIP about the crop that another, usually small, backbone attends to most (A²), without any training: blind
    to the rest."""

    crop: tuple[str, ...] = ("4/7",)
    """Side of the crop: a share of the picture's (0.5, 2/7) or pixels (64). Of several, validation data choose."""
    where: str | None = None
    """The backbone whose attention chooses the crop. Default: CLIP's own."""

    crops: ClassVar[tuple[int, ...]] = ()  # no flag: CLIP has one picture  # ty: ignore[incompatible-attribute-override]
    plain: ClassVar[bool] = True  # no flag: nothing is fitted  # ty: ignore[incompatible-attribute-override]
    method: ClassVar[str] = "a2-zs"

    @property
    def uses(self) -> tuple[str, ...]:
        return ("val",)


@dataclass(frozen=True)
class Ttr(Prompted, Train):
    """Cluster the patches of recent pictures, and ask CLIP about the cluster that holds the subject (TTR), without any
    training. Pictures are answered in order, in one process: what one shows depends on those before it."""

    prompts: tuple[str, ...] = ("a photo of a {}.",)
    """What is said of a picture, with {} for the class; of several, the embeddings are averaged."""
    general: str | None = None
    """What may be said of all pictures: "a photo of a bird." It finds the subject, and must be given."""
    queue: int = 28
    """How many pictures are clustered together, the one that is asked about last."""
    clusters: int = 3
    components: int = 3
    """Of the patches' tokens that are clustered."""
    rank: int = 16
    """Of the randomised singular value decomposition that finds them."""
    sigma: float = 0.72
    """Of the Gaussian that smooths them along the row of all patches, across pictures."""

    method: ClassVar[str] = "ttr"

    @property
    def selects(self) -> str | None:
        return None
