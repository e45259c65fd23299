"""What values a setting may have, declared with its type and checked for the command line and for Python alike.

    epochs: Count = 20                       # a whole number of at least 1
    seed: Seed = 0
    patience: Count | None = None

NaN and infinities are refused for every number, and so is a value of another type. A configuration is checked when it
is made, because its dataclass inherits from `Checked`; so a flag, an argument in Python and a stored run.json are
refused with the same words.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import UserError


@dataclass(frozen=True)
class Within:
    """A range of numbers; the ends belong to it, unless it is open."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def problem(self, value: float) -> str | None:
        below = self.low is not None and (value < self.low or (self.open_low and value == self.low))
        above = self.high is not None and (value > self.high or (self.open_high and value == self.high))
        return self.text_of(below) if below or above else None

    def text_of(self, below: bool) -> str:
        low = "" if self.low is None else f"{'above' if self.open_low else 'at least'} {self.low:,g}"
        high = "" if self.high is None else f"{'below' if self.open_high else 'at most'} {self.high:,g}"
        if (self.low, self.high) == (0, 1):
            ends_alike = self.open_low == self.open_high
            return "must lie between 0 and 1" if ends_alike else f"must be {low} and {high}"
        if below:
            return "must not be negative" if low == "at least 0" else f"must be {low}"
        return f"must be {high}"


# A bound says what makes sense, not what this machine can do: its upper end only stops what is certainly a mistake.
Count = Annotated[int, Within(1, 10**9)]
Whole = Annotated[int, Within(0, 10**9)]
Several = Annotated[int, Within(2, 10**9)]
Parts = Annotated[int, Within(1, 10**4)]  # of a part selector; each has a prototype
Index = Annotated[int, Within(-(10**4), 10**4)]  # of a block; negative from the end
Seed = Annotated[int, Within(0, 2**32 - 1)]  # what NumPy, scikit-learn and torch all accept
Side = Annotated[int, Within(1, 16384)]  # of an image, in pixels
Processes = Annotated[int, Within(0, 1024)]
Positive = Annotated[float, Within(0, open_low=True)]
NotNegative = Annotated[float, Within(0)]
Fraction = Annotated[float, Within(0, 1)]
InnerFraction = Annotated[float, Within(0, 1, open_low=True, open_high=True)]  # 0 and 1 would mean nothing
PositiveFraction = Annotated[float, Within(0, 1, open_low=True)]
HalfOpen = Annotated[float, Within(0, 1, open_high=True)]  # a probability or decay that must not reach 1


URL = re.compile(r"([a-zA-Z][\w+.-]+:)//?(?=[^/])")  # a Path drops one of the two slashes


@dataclass(frozen=True)
class MayBeUrl:
    """Marks a path that may be a URL, too."""


def as_url(path: str | PathLike) -> str:
    """A path as text, with both slashes if it is a URL."""
    return URL.sub(r"\1//", os.fspath(path), count=1) if URL.match(os.fspath(path)) else os.fspath(path)


class Checked:
    """A configuration whose values are checked when it is made."""

    flag_prefix: ClassVar[str] = "--"  # empty: no command-line flags

    def __post_init__(self) -> None:
        for name, value, problem in problems(self):
            label = f"{self.flag_prefix}{name.replace('_', '-')}" if self.flag_prefix else name
            error = UserError(f"{label} {shortened(value)}: {problem}")
            if (collected := _collected.get()) is None:
                raise error
            collected.append(error)


_collected: ContextVar[list[UserError] | None] = ContextVar("collected", default=None)


@contextmanager
def raising_afterwards() -> Generator[None]:
    """Raises the first refusal at the end, for a caller in between that would make another error of it."""
    errors: list[UserError] = []
    token = _collected.set(errors)
    try:
        yield
    finally:
        _collected.reset(token)
    if errors:
        raise errors[0]


def shortened(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    text = as_url(value) if isinstance(value, Path) else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def problems(config: Any) -> Iterator[tuple[str, Any, str]]:
    """(field, value, what is wrong with it) of every field that is out of its limits."""
    hints = hints_of(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if problem := misfit(value, hints[field.name]):
            yield field.name, value, problem


@cache
def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def misfit(value: Any, hint: Any) -> str | None:
    """Why a value does not fit a type with its limits; None if it does."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [limit for limit in hint.__metadata__ if isinstance(limit, Within)]
        if MayBeUrl() in hint.__metadata__ and isinstance(value, str | Path) and URL.match(str(value)):
            return None
        return misfit(value, inner[0]) or next((p for limit in limits if (p := limit.problem(value))), None)
    if origin in (Union, types.UnionType):
        found = [misfit(value, arm) for arm in inner]
        return None if None in found else closest(value, inner, found)
    if origin is Literal:
        return None if value in inner else f"must be one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return tuple_misfit(value, inner)
    if hint is Any or is_dataclass(hint):
        return None if hint is Any or isinstance(value, hint) else f"must be {an(hint.__name__)}"
    if hint is int:
        return None if isinstance(value, Integral) and not isinstance(value, bool) else "must be a whole number"
    if hint is float:
        return number_misfit(value)
    if hint is Path:
        return path_misfit(value)
    if hint is None or hint is type(None):
        return None if value is None else "must be None"
    return None if isinstance(value, hint) else f"must be {an(hint.__name__)}"


def closest(value: Any, arms: tuple[Any, ...], found: list[str | None]) -> str | None:
    """Of several types, the complaint of the one that is most likely meant."""
    complaints = [text for arm, text in zip(arms, found, strict=True) if arm is not type(None)]
    numbers = [text for text in complaints if text and not text.startswith("must be a whole number")]
    return (numbers if isinstance(value, Real) and numbers else complaints)[0]


def tuple_misfit(value: Any, inner: tuple[Any, ...]) -> str | None:
    if not isinstance(value, tuple | list):
        return "must be several values (a tuple)"
    if len(inner) == 2 and inner[1] is Ellipsis:
        return next((problem for one in value if (problem := misfit(one, inner[0]))), None)
    if len(value) != len(inner):
        return f"must be {len(inner)} values"
    return next((p for one, hint in zip(value, inner, strict=True) if (p := misfit(one, hint))), None)


def path_misfit(value: Any) -> str | None:
    if not isinstance(value, str | PathLike):
        return "must be a path"
    if URL.match(str(value)):
        return "a URL, but it must be on a disk; URLs are RUN, INPUT and --out of `predict` and `embed`, and --cache"
    return None


def number_misfit(value: Any) -> str | None:
    if not isinstance(value, Real) or isinstance(value, bool):
        return "must be a number"
    return None if math.isfinite(value) else "must be a finite number"


def an(noun: str) -> str:
    words = {"str": "text", "bool": "true or false"}
    return words.get(noun) or f"a{'n' * (noun[0].lower() in 'aeiou')} {noun}"
