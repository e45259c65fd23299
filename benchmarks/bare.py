"""Benchmarks on a machine that has PyTorch but neither Sightline nor its command line; import this before `sightline`.

Sightline is found beside this folder. Where tyro is not installed, its marks are replaced by marks that mean nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any


class _Mark:
    def __getitem__(self, kind: Any) -> Any:
        return Annotated[kind, self]


if importlib.util.find_spec("sightline") is None:
    sys.path.append(str(Path(__file__).parents[1] / "src"))
if importlib.util.find_spec("tyro") is None:
    tyro, conf = ModuleType("tyro"), ModuleType("tyro.conf")
    for name in ("Positional", "Suppress", "UseAppendAction"):
        setattr(conf, name, _Mark())
    setattr(conf, "arg", lambda **_: _Mark())  # noqa: B010
    setattr(tyro, "conf", conf)  # noqa: B010
    sys.modules |= {"tyro": tyro, "tyro.conf": conf}
