"""Writing files: atomically, and never over what the running command reads, nor over what is not ours.

Every file of every command goes through `replace_durably`: written under another name in the same folder, synced,
renamed. At any moment, also after a full disk or a kill, either the old file or the new one exists, whole.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import platform
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.flags import SOFTWARE, Writes, written_paths
from ..errors import UserError
from .printable import to_cell

if TYPE_CHECKING:
    from PIL.Image import Image

FREE_SPACE = "free space or choose another folder; what was there before is as it was"
LOOK_AT = 1 << 18  # bytes at either end of a file in which its origin is looked for
NUMBERS = itertools.count()


# ---- the guard -------------------------------------------------------------------------------------------------------


class Guard:
    """What the running command reads. Nothing that it writes may replace any of it."""

    def __init__(self) -> None:
        self.inputs: dict[Path, str] = {}  # and what each is
        self.listed: list[tuple[Callable[[], Iterable[Path]], str]] = []  # read from the disk only when needed

    def protect(self, paths: Iterable[Path] | Callable[[], Iterable[Path]], what: str) -> None:
        if isinstance(paths, Callable):
            self.listed.append((paths, what))
        else:
            self.inputs |= dict.fromkeys(paths, what)

    def check(self, target: Path) -> Path:
        """The file that a write to `target` would replace, with all links followed; an error if it is an input."""
        resolved = resolve(target)
        try:
            status = resolved.stat()
        except OSError:
            return resolved  # nothing is there to be lost
        if not resolved.is_file():
            kind = "a folder" if resolved.is_dir() else "not a regular file"
            raise UserError(f"{target}: cannot be written (it is {kind}); name a file")
        for path, what in self.with_suffix(resolved.suffix.lower()):
            with contextlib.suppress(OSError):
                if os.path.samestat(status, path.stat()):
                    raise UserError(f"{target}: is {what}, which this command reads; choose another file to write to")
        return resolved

    def with_suffix(self, suffix: str) -> Generator[tuple[Path, str]]:
        """The inputs that may be the file. Those listed in tables, which may be millions, only if named alike."""
        yield from self.inputs.items()
        for paths, what in self.listed:
            yield from ((path, what) for path in paths() if str(path).lower().endswith(suffix))


UNGUARDED = Guard()  # no command is running
GUARD = UNGUARDED


@contextlib.contextmanager
def guarding(command: Any) -> Generator[None]:
    """Guard what this command reads for as long as it runs, and refuse at once what it must not write."""
    global GUARD
    outer, GUARD = GUARD, Guard()
    try:
        inputs, outputs = written_paths(command)
        GUARD.protect(inputs, "an input")
        for path, writes in outputs:
            refuse_foreign(path, writes)
        yield
    finally:
        GUARD = outer


def protect(paths: Iterable[Path] | Callable[[], Iterable[Path]], what: str) -> None:
    """Files that the running command reads; as a function, if they are many and rarely needed."""
    if GUARD is not UNGUARDED:
        GUARD.protect(paths, what)


def refuse_foreign(path: Path, writes: Writes) -> None:
    """An existing file is replaced only if an earlier run of the same command wrote it."""
    for name, marks in writes.files.items():
        for file in sorted(path.glob(name)) if name else [path]:
            if not name and file.is_dir():
                if writes.folder:
                    continue
                raise UserError(f"{file}: cannot be written (it is a folder); name a file")
            if not os.path.lexists(file):
                continue
            if not has_marks(GUARD.check(file), marks):
                raise UserError(f"{file}: exists, and is not of this command; remove it or choose another name")
    if writes.files and "" not in writes.files and path.exists() and not path.is_dir():
        raise UserError(f"{path}: cannot be written into (it is a file); name a folder")


def has_marks(path: Path, marks: Sequence[str]) -> bool:
    """Whether a file is of the kind with these JSON keys, CSV columns or, in other formats, words; or is empty."""
    try:
        if not path.stat().st_size:
            return True
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            first = next(iter(content), {}) if isinstance(content, list) else content
            return content == [] or (isinstance(first, dict) and set(marks) <= set(first))
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
                return set(marks) <= set(next(csv.reader(file), []))
        with path.open("rb") as file:
            ends = file.read(LOOK_AT)
            file.seek(max(0, path.stat().st_size - LOOK_AT))
            ends += file.read()
        return all(mark.encode() in ends for mark in marks)
    except (OSError, ValueError, RecursionError, csv.Error):
        return False


def inside(folder: Path, name: str | Path) -> Path:
    """The file of this name in a folder, with all links followed; an error if it would be elsewhere."""
    file = folder / name
    if not resolve(file).is_relative_to(resolve(folder)):
        raise UserError(f"{name}: is outside {folder}, where it was to be written; rename it")
    return file


def claim(folder: Path, names: Iterable[str | Path]) -> None:
    """Before the work: refuse if one of these files would not be in the folder, or is there already and not ours."""
    for name in names:
        file = inside(folder, name)
        if os.path.lexists(file) and not has_marks(GUARD.check(file), (SOFTWARE,)):
            raise UserError(f"{file}: exists, and was not written by this command; choose another folder")


def resolve(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a name that no file can have
        raise UserError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def replace_durably(
    path: Path,
    write: Callable[[Path], object],
    *,
    remedy: str = FREE_SPACE,
    sync: bool = True,
    announce: Callable[[Path], object] | None = None,
) -> None:
    """Write under a name of this process's own, in the folder of the file, which is made if necessary; then rename.

    `announce` is called with the complete file before it takes the place of the old one. Without `sync`, which takes
    milliseconds per file, a file written just before a power cut may be empty after it.
    """
    target = GUARD.check(path)
    partial = target.with_name(f"{target.name[:100]}.{mark_of_process()}-{next(NUMBERS)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.open("xb").close()
        mode = partial.stat().st_mode  # as the umask has it; safetensors, for one, has a mode of its own
        write(partial)
        partial.chmod(mode & 0o7777)
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        if announce is not None:
            announce(partial)
        partial.replace(target)
        if sync:
            sync_folder(target.parent)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise cannot_write(path, error, remedy) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """So that a rename outlives a power cut, too; not every system can do so."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def mark_of_process() -> str:
    return f"{re.sub('[^A-Za-z0-9]', '', platform.node())[:20]}-{os.getpid()}"


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove half-written files of killed processes of this machine: of one file, or of all in the folder."""
    ours = mark_of_process().rpartition("-")[0]
    for leftover in folder.glob("*.partial"):
        host, _, pid = leftover.name.removesuffix(".partial").rpartition(".")[2].rpartition("-")[0].partition("-")
        if leftover.name.startswith(name[:100]) and host == ours and pid.isdigit() and not is_alive(int(pid)):
            with contextlib.suppress(OSError):
                leftover.unlink()


def remove_all_leftovers(folder: Path) -> None:
    """Of other machines, too. Only where no other process can be writing, as in a locked run folder."""
    for leftover in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def cannot_write(path: Path, error: Exception, remedy: str = FREE_SPACE) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"{path}: cannot be written ({reason}); {remedy}")


def prepare_output(path: Path | None) -> None:
    """Make the folder of an output file before the work starts, so that the work is not lost."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another path") from error
    target = GUARD.check(path)
    remove_leftovers(target.parent, target.name)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error.strerror}); choose another folder") from error
    remove_leftovers(folder)


# ---- what is written -------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write a result file atomically, making its folder if necessary."""
    prepare_output(path)
    save_text(path, text)


def save_text(path: Path, text: str, *, remedy: str = FREE_SPACE) -> None:
    replace_durably(path, lambda partial: partial.write_text(text, encoding="utf-8"), remedy=remedy)


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def append_line(path: Path, line: str, *, remedy: str = FREE_SPACE) -> None:
    """Add a line to a log; half a line, of a process that was killed while writing it, is ended first."""
    GUARD.check(path)
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())
    except OSError as error:
        raise cannot_write(path, error, remedy) from error


def save_image(path: Path, image: Image, *, sync: bool = True, marked: bool = True, **options: Any) -> None:
    """In the format of the file's suffix; a marked PNG says that it is ours, so that it may be replaced later."""
    from PIL import Image as Images
    from PIL.PngImagePlugin import PngInfo

    kind = Images.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{path}: no image format has this suffix; use .png")
    if kind == "PNG" and marked:
        options.setdefault("pnginfo", PngInfo())
        options["pnginfo"].add_text("Software", SOFTWARE)
    replace_durably(path, lambda partial: image.save(partial, kind, **options), sync=sync)


def save_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """A Matplotlib figure, in the format of the file's suffix."""
    kind = path.suffix.lower().removeprefix(".")
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise UserError(f"{path}: no format for figures has this suffix; use .png, .pdf or .svg")
    prepare_output(path)
    facts = {"png": {"Software": SOFTWARE}, "pdf": {"Creator": SOFTWARE}, "svg": {"Creator": SOFTWARE}}.get(kind)
    more = {"metadata": facts} if facts else {}
    replace_durably(path, lambda partial: figure.savefig(partial, dpi=dpi, format=kind, **more))


def as_csv(columns: Sequence[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_cells(line) for line in lines)
    return text.getvalue()


def as_cells(line: dict[str, Any]) -> dict[str, Any]:
    return {name: to_cell(value) if isinstance(value, str) else value for name, value in line.items()}
