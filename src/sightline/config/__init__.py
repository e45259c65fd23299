"""What a user can say: each dataclass is a command, each field a flag and a Python argument."""

from .backbones import Backbones, Import, Pretrain
from .data import BUILDS, CONVERTIBLE, Build, Check, Convert, Data, Toy
from .intervening import Intervene
from .measuring import Compare, Demo, Evaluate, Localize, Predict, Shape, Verify
from .methods import (
    A2,
    S2,
    A2Adapter,
    A2Dfr,
    CentreCrop,
    Dfr,
    EarlyMask,
    Erm,
    Ifam,
    LateMask,
    Pdiscoformer,
    Probe,
    RandomCrop,
    Shaping,
)
from .training import Loop, Train
from .zeroshot import A2Zs, Ttr, Zs

__all__ = [
    "A2", "BUILDS", "CONVERTIBLE", "S2", "A2Adapter", "A2Dfr", "A2Zs", "Backbones", "Build", "CentreCrop", "Check",
    "Compare", "Convert", "Data", "Demo", "Dfr", "EarlyMask", "Erm", "Evaluate", "Ifam", "Import", "Intervene",
    "LateMask", "Localize", "Loop", "Pdiscoformer", "Predict", "Pretrain", "Probe", "RandomCrop", "Shape", "Shaping",
    "Toy", "Train", "Ttr", "Verify", "Zs",
]  # fmt: skip
