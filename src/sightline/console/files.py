"""Writing files atomically: at any moment either the old file or the new one exists."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError


def save_text(path: Path, text: str) -> None:
    replace_durably(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a name of this process's own, then rename."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of killed processes. Only where no other process is writing."""
    for leftover in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def cannot_write(path: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(
        f"{path}: cannot be written ({reason}). Earlier checkpoints are intact: free space or choose another folder, "
        "then continue with --resume"
    )


def prepare_output(path: Path | None) -> None:
    """Make the folder of an output file before the work starts, so that the work is not lost."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another path") from error
    if path.is_dir():
        raise UserError(f"{path}: cannot be written (it is a folder); name a file")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error.strerror}); choose another folder") from error


def write(path: Path, text: str) -> None:
    """Write a result file atomically, making its folder if necessary."""
    prepare_output(path)
    try:
        save_text(path, text)
    except UserError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
        raise UserError(f"{path}: cannot be written ({reason})") from error


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def as_csv(columns: Sequence[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
