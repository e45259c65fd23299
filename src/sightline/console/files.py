"""Writing files: in one step, so that at any moment either the old one or the new one is there."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError


def save_text(path: Path, text: str) -> None:
    replace_durably(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Under a name of this process's own, then in one step under the right one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:  # safetensors has errors of its own for a full disk
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Half-written files of processes that were killed. Only where no other process writes."""
    for left_behind in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            left_behind.unlink()


def cannot_write(path: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(
        f"{path}: cannot be written ({reason}). What was saved before is intact: free space or choose another "
        "folder, then go on with --resume"
    )


def make_way(path: Path | None) -> None:
    """Before the work, so that it is not done in vain."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    if path.is_dir():
        raise UserError(f"{path}: cannot be written (it is a folder); name a file")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error


def write(path: Path, text: str) -> None:
    """In one step: an interrupted write leaves the old file as it was."""
    make_way(path)
    try:
        save_text(path, text)
    except UserError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
        raise UserError(f"{path}: cannot be written ({reason})") from error


def as_csv(columns: Sequence[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
