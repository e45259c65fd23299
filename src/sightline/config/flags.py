"""The command-line flags of a configuration dataclass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from tyro.conf import Positional, Suppress

POSITIONAL = Positional[int].__metadata__[0]
SUPPRESSED = Suppress[int].__metadata__[0]


def flag_names(kind: Any, prefix: str = "--") -> Iterator[str]:
    """All flags, those of nested dataclasses included, and both forms (--x, --no-x) of a boolean one."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        marks = getattr(hint, "__metadata__", ())
        if POSITIONAL in marks or SUPPRESSED in marks:
            continue
        if is_dataclass(hint):
            yield from flag_names(hint, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}"
        if isinstance(field.default, bool):
            yield f"{prefix.replace('--', '--no-', 1)}{name}" if prefix == "--" else f"{prefix}no-{name}"
