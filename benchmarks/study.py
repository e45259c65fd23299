"""What the rows of a study share: data, backbones and folders; and the command of a row."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rows import Row, folder_of
from sightline import config as commands
from sightline.errors import UserError

FILES = ("TI", "SELF", "U2NET")  # words of a line that stand for files of --backbones


@dataclass(frozen=True)
class Context:
    data: Mapping[str, Path]
    """By set."""
    files: Mapping[str, str]
    """Backbones and other networks by name; rows that name no backbone start from the first one."""
    runs: Path
    cache: Path
    flags: str = ""
    """Of `sightline train`, for every row of the study."""
    device: str = "auto"
    precision: str = "bf16"
    workers: int = 2
    compile: bool = False
    epochs: int | None = None
    splits: tuple[str, ...] = ("val", "test")
    packs: Path | None = None
    noise: int = 0
    limit: int = 600
    subsets: int = 32

    def folder(self, row: Row) -> Path:
        return folder_of(self.runs / row.set, row.name, row.seed)

    def data_of(self, row: Row) -> Path:
        return self.data[row.set] / row.file if row.file else self.data[row.set]

    def is_trained(self, row: Row) -> bool:
        return (self.folder(row) / "metrics.json").exists()

    def has_weights(self, row: Row) -> bool:
        return self.is_trained(row) and (self.folder(row) / "best.safetensors").exists()


def command_of(context: Context, row: Row) -> Any:
    """What a user would type, parsed as the command line does it."""
    method, *flags = shlex.split(f"{row.line} {context.flags}")
    flags = [resolved(context, row, flag) for flag in flags]
    if "--backbone" not in flags and "--init-from" not in flags:
        flags += ["--backbone", next(iter(context.files.values()), "")]
    if "--precision" not in flags:
        flags += ["--precision", context.precision]
    given = [
        str(context.data_of(row)), *flags, "--out", str(context.folder(row)), "--seed", str(row.seed), "--device",
        context.device, "--workers", str(context.workers), "--cache", str(context.cache), "--resume",
    ]  # fmt: skip
    return parsed(row.name, method, given, epochs=context.epochs, compile=context.compile and not row.timed)


def resolved(context: Context, row: Row, flag: str) -> str:
    """@NAME by a backbone's file or the run of that row with the same seed, and words such as SELF by their files."""
    if flag.startswith("@"):
        return context.files.get(flag[1:]) or str(folder_of(context.runs / row.set, flag[1:], row.seed))
    before, word = flag[: flag.rfind(":") + 1], flag[flag.rfind(":") + 1 :]
    if word not in FILES:
        return flag
    if word not in context.files:
        raise UserError(f"{row.name}: needs --backbones {word}=FILE")
    return before + context.files[word]


def parsed(
    row: str, method: str, given: Sequence[str], *, epochs: int | None = None, compile: bool = False
) -> commands.Train:
    """The arguments of `sightline train METHOD`; `epochs` and `compile` are for methods with a training loop."""
    kinds: dict[str, Any] = {
        kind.method: kind
        for kind in vars(commands).values()
        if isinstance(kind, type) and issubclass(kind, commands.Train) and kind.method
    }
    if method not in kinds:
        raise UserError(f"{row}: there is no method {method!r}")
    if issubclass(kinds[method], commands.Loop):
        given = [*given, *(["--epochs", str(epochs)] if epochs is not None else []), *["--compile"] * compile]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return tyro.cli(kinds[method], args=given)
        except SystemExit:
            typed = shlex.join(["sightline", "train", method, *given])
            raise UserError(f"{row}: `{typed}` is not understood: {said.getvalue()}") from None
