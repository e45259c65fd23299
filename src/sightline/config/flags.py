"""The command-line flags of a configuration dataclass, and which of them name what a command writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from tyro.conf import Positional, Suppress, arg

from .limits import MayBeUrl

# Positional arguments that many commands have
RunFolder = Annotated[Positional[Path], arg(metavar="RUN")]
Dataset = Annotated[Positional[Path], arg(metavar="DATA")]
OtherData = Annotated[Positional[Path | None], arg(metavar="[DATA]")]

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


# ---- what a command reads, and what it writes ------------------------------------------------------------------------

SOFTWARE = "Sightline"  # in the files that have room for the name of their maker
RUN = {"run.json": ("method", "config")}  # the files of a folder, and what each is recognised by


@dataclass(frozen=True, eq=False)
class Writes:
    """Marks a flag for what the command writes; all other paths are inputs, which it never replaces.

    By file name in the folder that the flag names, or "" for a flag that names a file: the JSON keys, CSV columns or
    words by which a file of an earlier run of the command is recognised. No other file is replaced."""

    files: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    folder: bool = False  # a flag that names a file or a folder


CacheFolder = Annotated[Path | None, Writes(), MayBeUrl()]
PREDICTIONS = Writes({"": ("predicted",)}, folder=True)


def written_paths(command: Any) -> tuple[list[Path], list[tuple[Path, Writes]]]:
    """The files that a command's flags name as inputs, and what they name as outputs."""
    inputs, outputs = [], []
    for name, hint in get_type_hints(type(command), include_extras=True).items():
        value = getattr(command, name, None)
        values = value if isinstance(value, tuple) else (value,)
        paths = [
            Path(value) for value in values if isinstance(value, Path) or (isinstance(value, str) and is_file(value))
        ]
        writes = output_mark(hint)
        if writes is None:
            inputs += paths
        else:
            outputs += [(Path(one), writes) for one in values if one is not None and "://" not in str(one)]
    return inputs, outputs


def is_file(text: str) -> bool:
    """Whether a text, such as the name of a backbone, is that of a file."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def output_mark(hint: Any) -> Writes | None:
    """The mark of a field's type, also where it is within others, such as Positional."""
    marks = getattr(hint, "__metadata__", ())
    nested = (output_mark(argument) for argument in get_args(hint) if hasattr(argument, "__metadata__"))
    return next((mark for mark in (*marks, *nested) if isinstance(mark, Writes)), None)
