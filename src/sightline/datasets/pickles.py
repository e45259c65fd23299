"""Published pickles to JSON, without executing any code in them.

Loading a pickle normally can run arbitrary code. This unpickler builds only plain values: None, bool, int, float, str,
and list, tuple, dict, set, frozenset of them (a defaultdict becomes a dict). Any other class or function is refused.
In the JSON a tuple is a list, a set is a sorted list, and a key that is not a string is written as one:
1 as "1", True as "True", ("cat", 3) as "cat,3".
"""

from __future__ import annotations

import io
import json
import pickle
import shlex
from pathlib import Path
from typing import Any

from ..console.files import write
from ..errors import UserError
from .reading import read_json

CONTAINERS = {"set": set, "frozenset": frozenset}
MOST_VALUES = 10_000_000


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in CONTAINERS:
            return CONTAINERS[name]
        if (module, name) == ("collections", "defaultdict"):
            return lambda *_: {}  # a new function each time: a pickle could leave attributes on a lasting one
        raise UserError(f"it refers to {module}.{name}, and only plain values are allowed; do not open it")


def read_pickle(path: Path) -> Any:
    """A pickle of plain values; anything else in it is refused by name."""
    try:
        return _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path}: not a pickle of plain values, or damaged ({error}); download it again") from None


def pickle_to_json(path: Path, out: Path) -> None:
    """Write the content of a pickle as JSON, in the form that the module's docstring describes."""
    try:
        content = read_pickle(path)
        if count_values(content, MOST_VALUES) > MOST_VALUES:
            what = f"more than {MOST_VALUES:,} values, or one that contains itself"
            raise UserError(f"{path}: has {what}; do not open it")
        text = json.dumps(_plain(content), indent=0, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise UserError(f"{path}: has a value that contains itself, which JSON cannot represent") from None
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{path}: no JSON form ({error})") from None
    write(out, text + "\n")


def command_for(layout: str, path: Path) -> str:
    """The command that converts a dataset into what its reader needs."""
    return f"`sightline convert {layout} {shlex.quote(str(path))}`"


def read_converted(root: Path, stem: str, layout: str) -> dict[str, Any]:
    """`stem.json` in `root`; if only the pickle is there, an error that says how to convert it."""
    file, original = root / f"{stem}.json", root / f"{stem}.pkl"
    if not file.exists() and original.exists():
        raise UserError(f"{original}: convert it first: {command_for(layout, root)}")
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected an object ({{...}}) made from {stem}.pkl, found {type(content).__name__}")
    return content


def count_values(value: Any, most: int) -> int:
    """The values that JSON would hold, up to `most`: a pickle may name one list a billion times."""
    count, left = 0, [value]
    while left and count <= most:
        one = left.pop()
        count += 1
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
    return count


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {_key(key): _plain(item) for key, item in value.items()}
        if len(plain) < len(value):
            raise ValueError("two of its keys are the same when written as strings")
        return plain
    if isinstance(value, (set, frozenset)):
        items = [_plain(item) for item in value]
        alike = len({type(item) for item in items}) <= 1 and not any(isinstance(item, list) for item in items)
        return sorted(items) if alike else sorted(items, key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a value of type {type(value).__name__}")


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        return ",".join(map(_key, key))
    if key is None or isinstance(key, (bool, int, float, str)):
        return str(key)
    raise TypeError(f"a key of type {type(key).__name__}")
