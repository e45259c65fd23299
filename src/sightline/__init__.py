"""Sightline: image classifiers that can only see what they show you."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"
__all__ = [
    "Method", "Prediction", "Sight", "find_leak", "load", "load_backbone", "pretrain", "save_backbone", "train",
    "verify",
]  # fmt: skip

if TYPE_CHECKING:
    from .leaks import find_leak
    from .load import load
    from .pretrain import pretrain
    from .sight import Method, Prediction, Sight
    from .train import train
    from .verify import verify
    from .weights import load_backbone, save_backbone

_ROOMS = {
    "load": ".load",
    "train": ".train",
    "pretrain": ".pretrain",
    "Method": ".sight",
    "Prediction": ".sight",
    "Sight": ".sight",
    "find_leak": ".leaks",
    "load_backbone": ".weights",
    "save_backbone": ".weights",
    "verify": ".verify",
}


class _Words(types.ModuleType):
    """Public words are imported when first used, so that `sightline --help` need not wait for torch.

    `sightline.verify` is always the word, also once the file of that name has been imported.
    """

    def __getattribute__(self, name: str):
        if name in _ROOMS:
            return getattr(importlib.import_module(_ROOMS[name], __name__), name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Words
