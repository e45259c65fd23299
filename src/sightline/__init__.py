"""Sightline: image classifiers that can only see what they show you."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"
__all__ = [
    "Method", "Prediction", "Sight", "SightlineClassifier", "evaluate", "export", "find_leak", "load",
    "load_backbone", "pretrain", "push", "report", "save_backbone", "train", "verify",
]  # fmt: skip

if TYPE_CHECKING:
    from .evaluate import evaluate
    from .export.export import export
    from .export.push import push
    from .load import load
    from .pretrain import pretrain
    from .report.audit import audit as report
    from .sight import Method, Prediction, Sight
    from .sklearn import SightlineClassifier
    from .train import train
    from .verify.leaks import find_leak
    from .verify.verify import verify
    from .vit.weights import load_backbone, save_backbone

_ROOMS = {  # where a word is, and by what name if that is another
    "load": ".load",
    "report": ".report.audit:audit",
    "evaluate": ".evaluate",
    "export": ".export.export",
    "push": ".export.push",
    "SightlineClassifier": ".sklearn",
    "train": ".train",
    "pretrain": ".pretrain",
    "Method": ".sight",
    "Prediction": ".sight",
    "Sight": ".sight",
    "find_leak": ".verify.leaks",
    "load_backbone": ".vit.weights",
    "save_backbone": ".vit.weights",
    "verify": ".verify.verify",
}


class _Words(types.ModuleType):
    """Public words are imported when first used, so that `sightline --help` need not wait for torch.

    `sightline.verify` is always the word, also once the file of that name has been imported.
    """

    def __getattribute__(self, name: str):
        if name in _ROOMS:
            room, _, there = _ROOMS[name].partition(":")
            return getattr(importlib.import_module(room, __name__), there or name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Words
