"""The architecture and the preprocessing of a Vision Transformer, with limits: a file may claim anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from ..config.limits import Checked, NotNegative, Positive, Within
from ..errors import UserError
from .positions import Positions

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Width = Annotated[int, Within(1, 2**16)]
ImageSide = Annotated[int, Within(1, 4096)]
Scale = Annotated[float, Within(1e-6, 1e6)]


@dataclass(frozen=True)
class Input(Checked):
    """The preprocessing that a set of weights expects: size, normalisation and crop."""

    flag_prefix: ClassVar[str] = ""

    size: tuple[ImageSide, ImageSide] = (224, 224)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[Scale, Scale, Scale] = IMAGENET_STD
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    # The short side is resized to size / crop, then `size` is cropped from the centre.
    crop: Annotated[float, Within(0.01, 1)] = 1.0
    fit: Literal["crop", "squash"] = "crop"  # squash: the whole image, with another aspect ratio


@dataclass(frozen=True)
class ViTConfig(Checked):
    flag_prefix: ClassVar[str] = ""

    width: Width = 384
    depth: Annotated[int, Within(1, 1000)] = 12
    heads: Width = 6
    patch: Annotated[int, Within(1, 512)] = 16
    grid: tuple[ImageSide, ImageSide] = (14, 14)  # the patch grid of the stored position embeddings
    registers: Annotated[int, Within(0, 1000)] = 0
    hidden: Annotated[int, Within(1, 2**18)] | None = None  # width of the MLP; None: 4 × width
    mlp: Literal["gelu", "quick_gelu", "swiglu"] = "gelu"
    positions: Positions = "bicubic_antialias"  # how learned position embeddings are resized, or rotary
    rotary_base: Positive = 100.0
    layer_scale: float | None = None  # its initial value; None: no LayerScale
    pre_norm: bool = False  # CLIP: a LayerNorm before the first block
    patch_bias: bool = True
    qkv_bias: Literal["all", "no_key", "none"] = "all"
    norm_eps: NotNegative = 1e-6
    classes: Annotated[int, Within(0, 10**6)] = 0  # width of the head (CLIP: of the projection); 0: no head
    head_bias: bool = True
    head_norm: bool = False  # iFAM's predictor: another LayerNorm before the head
    input: Input = field(default_factory=Input)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise UserError(f"heads {self.heads}: must divide the width, {self.width}")
