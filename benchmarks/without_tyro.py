"""The marks of `tyro.conf` on machines without tyro, which need no command line of its kind; import this first."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Annotated, Any


class Mark:
    """`Positional[int]` and the like: an annotation without a meaning."""

    def __class_getitem__(cls, hint: Any) -> Any:
        return Annotated[hint, cls]


def stand_in() -> None:
    conf = ModuleType("tyro.conf")
    for name in ("Positional", "Suppress", "UseAppendAction"):
        setattr(conf, name, type(name, (Mark,), {}))
    conf.arg = lambda **settings: tuple(settings)  # ty: ignore[unresolved-attribute]
    tyro = ModuleType("tyro")
    tyro.conf = conf  # ty: ignore[unresolved-attribute]
    sys.modules |= {"tyro": tyro, "tyro.conf": conf}


if importlib.util.find_spec("tyro") is None:
    stand_in()
