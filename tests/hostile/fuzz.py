"""Changes valid files, reads them, and reports what is neither read nor refused in one line."""

from __future__ import annotations

import copy
import json
import resource
import struct
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sightline.errors import UserError

from .readers import Kind

SECONDS = 20.0  # of processor time for one file
MEGABYTES = 2000  # more than before
NASTY = [
    b"\x00", b"\xff" * 8, b"-1", b"NaN", b"1e999", b"[" * 2000, b"{" * 2000, b'"', b"\n", b"\r", b",", b"../../", b"/",
    b"=1+1", b"\x1b[2J", b"[/bold]", b"9" * 30, b"null", b"true", b"{}", b"\xed\xa0\x80", "\u202e".encode(), b"%s%n",
]  # fmt: skip
EXTREME = [0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf")]
STRANGE: list[Any] = [None, True, "", "x", "\x1b]0;x\x07", [], {}, [[]], {"a": {}}, ["x"] * 50, *EXTREME]

edits = st.lists(
    st.tuples(st.sampled_from(("put", "cut", "repeat", "flip", "number")), st.floats(0, 1), st.integers(0, 2**16)),
    min_size=1, max_size=4,
)  # fmt: skip


def edited(content: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    """Bytes put in, cut out, repeated, flipped, or replaced by extreme integers, anywhere."""
    for how, where, what in changes:
        at = int(where * len(content))
        if how == "put":
            content = content[:at] + NASTY[what % len(NASTY)] + content[at:]
        elif how == "cut":
            content = content[:at] + content[at + 1 + what % 64 :]
        elif how == "repeat":
            content = content[:at] + content[at : at + 1 + what % 32] * (2 + what % 50) + content[at:]
        elif how == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << what % 8)]) + content[at + 1 :]
        elif how == "number":
            size = (1, 2, 4, 8)[what % 4]
            value = (0, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), what % 200)[what // 4 % 4]
            order = "<>"[what // 16 % 2]
            packed = struct.pack(f"{order}{'BHIQ'[what % 4]}", value % 2 ** (8 * size))
            content = content[:at] + packed + content[at + size :]
    return content


def edited_json(content: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    """Values replaced or removed, anywhere in the structure."""
    value = json.loads(content)
    for how, where, what in changes:
        places = list(places_in(value))
        if not places:
            break
        holder, key = places[int(where * len(places)) % len(places)]
        if how == "cut":
            del holder[key]
        elif how == "repeat":
            holder[key] = [holder[key]] * (what % 100)
        else:
            holder[key] = copy.deepcopy(STRANGE[what % len(STRANGE)])
    return json.dumps(value).encode()


def places_in(value: Any):
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places_in(value[key])


@dataclass
class Outcome:
    """Of the files of one kind."""

    tried: int = 0
    read: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


def attempt(kind: Kind, content: bytes, folder: Path, outcome: Outcome) -> None:
    """A file is read, or refused in one line, in bounded time and memory."""
    path = folder / kind.name
    path.write_bytes(content)
    outcome.tried += 1
    began, before = time.process_time(), peak()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.read(path)
        outcome.read += 1
    except UserError as error:
        outcome.refused += 1
        if len(str(error)) > 2000:
            outcome.failures.append(f"{kind.name}: a message of {len(str(error)):,} characters")
    except ValueError as error:
        if kind.name == "config.json" and type(error) in (ValueError, json.JSONDecodeError, UnicodeDecodeError):
            outcome.refused += 1  # by `read_json`, whose callers say which file it is
        else:
            outcome.failures.append(report(kind, error, content))
    except BaseException as error:
        outcome.failures.append(report(kind, error, content))
    if time.process_time() - began > SECONDS:
        outcome.failures.append(f"{kind.name}: {time.process_time() - began:.0f} s for {content[:200]!r}")
    if peak() - before > MEGABYTES << 20:
        outcome.failures.append(f"{kind.name}: {(peak() - before) >> 20:,} MB for {content[:200]!r}")


def report(kind: Kind, error: BaseException, content: bytes) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{kind.name}: {type(error).__name__} at {where}: {str(error)[:200]} for {content[:300]!r}"


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(kind: Kind, count: int, folder: Path, number: int = 0) -> Outcome:
    """This many changed files; the same ones for the same number."""
    outcome = Outcome()
    structured = kind.name.endswith(".json")

    @seed(number)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(kind.seeds), edits, st.booleans())
    def one(content: bytes, changes: list[tuple[str, float, int]], as_json: bool) -> None:
        change = edited_json if structured and as_json else edited
        attempt(kind, change(content, changes), folder, outcome)

    one()
    return outcome
