"""Configuration: each dataclass is a command or a method, each field a flag and a Python argument."""

from .app import App
from .attentive import Aim, Ep
from .auditing import Audit
from .backbones import Backbones, Import, Pretrain
from .batch import Embed, Predict, ToParts
from .bench import Bench
from .data import BUILDS, CONVERTIBLE, Build, Check, Convert, Data, Toy
from .distilling import Distill
from .exporting import Export, Push
from .intervening import Intervene
from .matrix import Matrix
from .measuring import Compare, Demo, Evaluate, Localize, Shape, Verify
from .methods import A2, S2, A2Adapter, A2Dfr, CentreCrop, Dfr, EarlyMask, Erm, LateMask, Probe, RandomCrop
from .parts import Ifam, Pdiscoformer, Shaping
from .relevance import Gradmask, Masktune, Robustvit, Rrr
from .reweighing import Coral, Cvar, George, Groupdro, Irm, Jtt, Lff
from .stressing import Stress, Suite
from .strips import Strips
from .training import Loop, Train
from .zeroshot import A2Zs, Ttr, Zs

__all__ = [
    "A2", "BUILDS", "CONVERTIBLE", "S2", "A2Adapter", "A2Dfr", "A2Zs", "Aim", "App", "Audit", "Backbones", "Bench",
    "Build", "CentreCrop", "Check", "Compare", "Convert", "Coral", "Cvar", "Data", "Demo", "Dfr", "Distill",
    "EarlyMask", "Embed", "Ep", "Erm", "Evaluate", "Export", "George", "Gradmask", "Groupdro", "Ifam", "Import",
    "Intervene", "Irm", "Jtt", "LateMask", "Lff", "Localize", "Loop", "Masktune", "Matrix", "Pdiscoformer",
    "Predict", "Pretrain", "Probe", "Push", "RandomCrop", "Robustvit", "Rrr", "Shape", "Shaping", "Stress",
    "Strips", "Suite", "ToParts", "Toy", "Train", "Ttr", "Verify", "Zs",
]  # fmt: skip
