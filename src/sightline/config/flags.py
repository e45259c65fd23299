"""The flags that a configuration has on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from tyro.conf import Positional

POSITIONAL = Positional[int].__metadata__[0]  # ty: ignore[unresolved-attribute]


def flag_name(kind: type, field: str) -> str:
    """Some fields are called otherwise on the command line, such as `start`, which is `--from`."""
    marks = getattr(get_type_hints(kind, include_extras=True).get(field), "__metadata__", ())
    return next((mark.name for mark in marks if getattr(mark, "name", None)), field.replace("_", "-"))


def flag_names(kind: Any, prefix: str = "--") -> Iterator[str]:
    """All of them, those of nested dataclasses too, and both of a yes or no."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if POSITIONAL in getattr(hint, "__metadata__", ()):
            continue
        name = flag_name(kind, field.name)
        if is_dataclass(hint):
            yield from flag_names(hint, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}"
        if isinstance(field.default, bool):
            yield f"{prefix.replace('--', '--no-', 1)}{name}" if prefix == "--" else f"{prefix}no-{name}"
