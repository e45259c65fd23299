"""Sightline: image classifiers that can only see what they show you."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"
__all__ = [
    "Method", "Prediction", "Sight", "SightlineClassifier", "evaluate", "export", "find_leak", "intervene", "load",
    "load_backbone", "predict", "pretrain", "push", "report", "save_backbone", "train", "verify",
]  # fmt: skip

if TYPE_CHECKING:
    from .evaluate import evaluate
    from .export.export import export
    from .export.push import push
    from .intervene import intervene
    from .load import load
    from .predict import predict
    from .pretrain import pretrain
    from .report.audit import audit as report
    from .sight import Method, Prediction, Sight
    from .sklearn import SightlineClassifier
    from .train import train
    from .verify.leaks import find_leak
    from .verify.verify import verify
    from .vit.weights import load_backbone, save_backbone

_MODULES = {  # of each public word, with its name there if that differs
    "load": ".load",
    "train": ".train",
    "evaluate": ".evaluate",
    "predict": ".predict",
    "intervene": ".intervene",
    "report": ".report.audit:audit",
    "verify": ".verify.verify",
    "find_leak": ".verify.leaks",
    "export": ".export.export",
    "push": ".export.push",
    "pretrain": ".pretrain",
    "load_backbone": ".vit.weights",
    "save_backbone": ".vit.weights",
    "SightlineClassifier": ".sklearn",
    "Method": ".sight",
    "Prediction": ".sight",
    "Sight": ".sight",
}


class _Package(types.ModuleType):
    """Imports public words on first use, so that `sightline --help` does not import torch.

    `sightline.verify` is always the function, also after the module of that name has been imported.
    """

    def __getattribute__(self, name: str):
        if name in _MODULES:
            module, _, other_name = _MODULES[name].partition(":")
            return getattr(importlib.import_module(module, __name__), other_name or name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Package
