"""Methods: a selector (*where*), a predictor (*what*), and how they are trained. One file each, and one line in the
table.

docs/add-a-method.md shows how to add one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from .. import config
from ..config import Pretrain, Train


@dataclass(frozen=True)
class Entry:
    """A method's configuration, and the module with its `make_NAME` and `build_NAME`."""

    config: type[Train]
    module: str
    """A file in this folder, or the full name of a module elsewhere (`my_package.my_method`). Its `make_NAME(config,
    rows, run, accelerator)` returns the method for a dataset and its input format; the method is a `Trainable`, or
    trained already. Its `build_NAME(vit_config, config, facts)` returns a method to load weights into, from the ViT's
    configuration, the method's own, and the facts in run.json. Hyphens of NAME become underscores."""
    command: str = "train"

    @property
    def help(self) -> str:
        """The first line of the configuration's docstring."""
        return (self.config.__doc__ or "").strip().splitlines()[0]


# The command line, the table in the documentation and the tests of all methods are generated from this.
METHODS: dict[str, Entry] = {
    "ifam": Entry(config.Ifam, "ifam"),
    "pdiscoformer": Entry(config.Pdiscoformer, "pdiscoformer"),
    "early-mask": Entry(config.EarlyMask, "given_mask"),
    "late-mask": Entry(config.LateMask, "given_mask"),
    "a2": Entry(config.A2, "a2"),
    "a2-adapter": Entry(config.A2Adapter, "a2_adapter"),
    "a2-dfr": Entry(config.A2Dfr, "dfr"),
    "a2-zs": Entry(config.A2Zs, "zeroshot"),
    "centre-crop": Entry(config.CentreCrop, "a2"),
    "random-crop": Entry(config.RandomCrop, "a2"),
    "robustvit": Entry(config.Robustvit, "robustvit"),
    "rrr": Entry(config.Rrr, "input_gradients"),
    "gradmask": Entry(config.Gradmask, "input_gradients"),
    "masktune": Entry(config.Masktune, "masktune"),
    "erm": Entry(config.Erm, "erm"),
    "probe": Entry(config.Probe, "probe"),
    "s2": Entry(config.S2, "probe"),
    "aim": Entry(config.Aim, "attentive"),
    "ep": Entry(config.Ep, "attentive"),
    "dfr": Entry(config.Dfr, "dfr"),
    "groupdro": Entry(config.Groupdro, "reweighed"),
    "jtt": Entry(config.Jtt, "reweighed"),
    "cvar": Entry(config.Cvar, "reweighed"),
    "lff": Entry(config.Lff, "reweighed"),
    "irm": Entry(config.Irm, "irm"),
    "coral": Entry(config.Coral, "coral"),
    "george": Entry(config.George, "george"),
    "zs": Entry(config.Zs, "zeroshot"),
    "ttr": Entry(config.Ttr, "ttr"),
    "pretrain": Entry(Pretrain, "dino", command="pretrain"),
}


def trainable_methods() -> dict[str, Entry]:
    """The methods of `sightline train`."""
    return {name: entry for name, entry in METHODS.items() if entry.command == "train"}


def maker_of(name: str) -> Callable:
    """`make_NAME` of a method."""
    return _function("make", name)


def builder_of(name: str) -> Callable:
    """`build_NAME` of a method."""
    return _function("build", name)


def _function(verb: str, name: str) -> Callable:
    module = METHODS[name].module
    here = "." not in module and importlib.util.find_spec(f".{module}", __name__) is not None
    imported = importlib.import_module(f".{module}", __name__) if here else importlib.import_module(module)
    return getattr(imported, f"{verb}_{name.replace('-', '_')}")
