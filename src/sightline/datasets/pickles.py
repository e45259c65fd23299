"""Published pickles to JSON, without running anything that is in them.

Opening a pickle normally can run any program. Here only plain values are let through: None, bool, int, float, str, and
list, tuple, dict, set, frozenset of them (a defaultdict becomes a dict). Whatever else it names is refused, unopened.
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

from ..errors import UserError

CONTAINERS = {"set": set, "frozenset": frozenset}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in CONTAINERS:
            return CONTAINERS[name]
        if (module, name) == ("collections", "defaultdict"):
            return lambda *_: {}  # a new function each time: a pickle could leave attributes on a lasting one
        raise UserError(f"it asks for {module}.{name}, and only plain values are let through; do not open it")


def read_pickle(path: Path | str) -> Any:
    """A pickle of plain values; anything else in it is refused by name."""
    try:
        return _PlainUnpickler(io.BytesIO(Path(path).read_bytes())).load()
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle may fail in any way whatever
        raise UserError(
            f"{path}: not a pickle of plain values, or a damaged one ({error}); download it again"
        ) from None


def pickle_to_json(path: Path | str, out: Path | str) -> None:
    """Write what a pickle holds as JSON, in the forms the module's first lines tell."""
    try:
        text = json.dumps(_plain(read_pickle(path)), indent=0, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise UserError(f"{path}: holds something that contains itself; it has no form in JSON") from None
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{path}: no form in JSON ({error})") from None
    try:
        Path(out).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None


def command_for(layout: str, path: Path) -> str:
    """What to type, for data that must be converted before they can be read."""
    return f"`sightline convert {layout} {shlex.quote(str(path))}`"


def read_converted(root: Path, stem: str, layout: str) -> dict[str, Any]:
    """`stem.json` in `root`; where only the pickle is there, an error that says how to convert it."""
    file, original = root / f"{stem}.json", root / f"{stem}.pkl"
    if not file.exists() and original.exists():
        raise UserError(f"{original}: convert it first: {command_for(layout, root)}")
    found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected an object ({{...}}) made from {stem}.pkl, found {type(found).__name__}")
    return found


def read_json(file: Path) -> Any:
    """What a JSON file holds, with errors that name the file and line."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


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
