"""The lock of a run folder: one training at a time writes to it. It ends with its process, however that ends."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from pathlib import Path
from typing import IO

from ..errors import UserError

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None

FILE = "lock"
TAKEN = {errno.EACCES, errno.EAGAIN}
HELD: dict[Path, IO[str]] = {}  # by this process, which the operating system would give the same lock twice


def lock_run(folder: Path) -> None:
    """Lock an existing folder, or raise an error that names the process that has locked it.

    A record lock, which worker processes do not inherit: they would keep it when the main process is killed."""
    path = folder.resolve() / FILE
    if path in HELD:
        raise locked_by(folder, path)
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                file.close()
                raise locked_by(folder, path) from None
            print(f"sightline: {folder}: {error.strerror}: this file system has no locks, so make sure that no other "
                  "training writes to this folder", file=sys.stderr)  # fmt: skip
        if is_at(file, path):  # else its last owner has removed it in the meantime
            break
        file.close()
    file.truncate(0)
    file.write(json.dumps({"process": os.getpid(), "host": platform.node()}))
    file.flush()
    HELD[path] = file


def is_locked_here(folder: Path) -> bool:
    return folder.resolve() / FILE in HELD


def is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def unlock_run(folder: Path) -> bool:
    """Whether this process had locked it."""
    path = folder.resolve() / FILE
    file = HELD.pop(path, None)
    if file is not None:
        path.unlink(missing_ok=True)
        file.close()
    return file is not None


def locked_by(folder: Path, path: Path) -> UserError:
    try:
        owner = json.loads(path.read_text(encoding="utf-8")) if path not in HELD else {"process": os.getpid()}
        who = f"process {owner['process']}" + (f" on {owner['host']}" if "host" in owner else "")
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return UserError(f"{folder}: {who} is training in this folder; wait until it ends, or choose another --out")
