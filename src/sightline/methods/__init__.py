"""Methods: a *where*, a *what*, and how they are put together and trained. One file each."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# Name: the file; in it, `make_NAME` makes the method for some data, trained unless it learns
# step by step, in the loop; `build_NAME` makes one to load weights into, from the ViT's configuration and what
# run.json says.
FILES = {
    "erm": "erm",
    "probe": "probe",
    "s2": "probe",
    "aim": "attentive",
    "ep": "attentive",
    "dfr": "dfr",
    "a2": "a2",
    "a2-adapter": "a2_adapter",
    "a2-dfr": "dfr",
    "a2-zs": "zeroshot",
    "zs": "zeroshot",
    "ttr": "ttr",
    "centre-crop": "a2",
    "random-crop": "a2",
    "pdiscoformer": "pdiscoformer",
    "ifam": "ifam",
    "early-mask": "given_mask",
    "late-mask": "given_mask",
    "groupdro": "reweighed",
    "cvar": "reweighed",
    "lff": "reweighed",
    "jtt": "reweighed",
    "robustvit": "robustvit",
    "rrr": "input_gradients",
    "gradmask": "input_gradients",
    "masktune": "masktune",
    "pretrain": "dino",
}


def maker_of(name: str) -> Callable:
    return getattr(importlib.import_module(f".{FILES[name]}", __name__), f"make_{name.replace('-', '_')}")


def builder_of(name: str) -> Callable:
    return getattr(importlib.import_module(f".{FILES[name]}", __name__), f"build_{name.replace('-', '_')}")
