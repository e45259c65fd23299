"""Methods: a *where*, a *what*, and how they are put together and trained. One file each."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# Name: the file; in it, `train_NAME` makes a trained method and `build_NAME` an untrained one to load weights into.
FILES = {"erm": "erm", "probe": "probe"}


def trainer_of(name: str) -> Callable:
    return getattr(importlib.import_module(f".{FILES[name]}", __name__), f"train_{name}")


def builder_of(name: str) -> Callable:
    return getattr(importlib.import_module(f".{FILES[name]}", __name__), f"build_{name}")
