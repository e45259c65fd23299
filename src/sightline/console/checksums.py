"""Checksums of result files: a flipped bit is found when a file is read, not believed.

Beside FILE is FILE.sha256, in the format of `sha256sum --check`. Weights and caches carry their own, inside the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .files import FREE_SPACE, prepare_output, replace_durably, save_text

SUFFIX = ".sha256"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_with_checksum(path: Path, write: Callable[[Path], object], *, remedy: str = FREE_SPACE) -> None:
    """As `replace_durably`. While the file is replaced, its checksum file names both contents: a kill between the two
    leaves a file that matches."""
    mark = path.with_name(f"{path.name}{SUFFIX}")

    def announce(partial: Path) -> None:
        sums.append(file_sha256(partial))
        save_text(mark, listed(path.name, [*sums, *before]), remedy=remedy)

    sums: list[str] = []
    before = [file_sha256(path)] if path.is_file() else []
    replace_durably(path, write, remedy=remedy, announce=announce)
    if before and before != sums:
        save_text(mark, listed(path.name, sums), remedy=remedy)


def listed(name: str, sums: list[str]) -> str:
    return "".join(f"{one}  {name}\n" for one in dict.fromkeys(sums))


def write_json_with_checksum(path: Path, content: Any, *, remedy: str = FREE_SPACE, nan: bool = True) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=nan) + "\n"
    prepare_output(path)
    replace_with_checksum(path, lambda partial: partial.write_text(text, encoding="utf-8"), remedy=remedy)


def check_checksum(path: Path, remedy: str) -> None:
    """An error if the file is not what was written. Files of earlier versions have no checksum."""
    mark = path.with_name(f"{path.name}{SUFFIX}")
    try:
        sums = [line.split()[0] for line in mark.read_text(encoding="utf-8", errors="replace").splitlines() if line]
        if file_sha256(path) in sums:
            return
    except FileNotFoundError:
        return  # of the one or of the other: who reads the file will say so
    except (OSError, IndexError) as error:
        raise UserError(f"{mark}: cannot be read ({error}); restore it") from error
    raise UserError(
        f"{path}: damaged, or changed by hand (then remove {mark.name}): not the content that was written; {remedy}"
    )


def remove_with_checksum(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}{SUFFIX}").unlink(missing_ok=True)
