"""The command line. Every command is a dataclass of `config.py`; heavy imports wait until one is chosen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from .config import Backbones, Demo, Verify
from .errors import UserError

if TYPE_CHECKING:
    from .leaks import Leak
    from .verify import Certificate

Command = (
    Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Backbones, tyro.conf.subcommand("backbones")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


def main() -> None:
    command = tyro.cli(Command, prog="sightline", description="Image classifiers that can only see what they show you.")
    try:
        sys.exit(run(command))
    except UserError as error:
        sys.exit(_fail(str(error), 2))
    except KeyboardInterrupt:
        sys.exit(_fail("stopped", 130))


def run(command: Verify | Backbones | Demo) -> int:
    """0: as it should be. 1: the answer is bad news. 2: the question was."""
    if isinstance(command, Verify):
        return verify(command)
    if isinstance(command, Demo):
        from .demo import demo

        return demo(command)
    return backbones()


def verify(command: Verify) -> int:
    from .leaks import find_leak
    from .sight import Judge
    from .subject import subject_of
    from .verify import verify as prove

    subject = subject_of(command)
    kind = "pictures" if command.images else "toy pictures"
    print(f"{subject.name} on {len(subject.images)} {kind}, looking by {subject.where}.")
    if subject.note:
        print(f"({subject.note})")
    if isinstance(subject.module, Judge):
        certificate = prove(subject.module, subject.images, subject.sight, draws=command.draws, seed=command.seed)
        _save(command, certificate)
        show(certificate)
        return int(certificate.verdict != "blind")
    assert subject.sight is not None, "only methods look for themselves"
    leak = find_leak(
        subject.module, subject.images, subject.sight, call=subject.call, draws=command.draws, seed=command.seed
    )
    _save(command, leak)
    print(leak.sentence)
    return int(leak.leaks)


def show(certificate: Certificate) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("hidden", "redrawn with", "trials", "changed", "largest change", box=None, pad_edge=False)
    for row in certificate.tried:
        largest = "–" if row.largest_change is None else f"{row.largest_change:.3g}"
        table.add_row(row.level, row.kind, f"{row.trials:,}", f"{row.changed:,}", largest)
    console.print(table)
    colour = "green" if certificate.verdict == "blind" else "red"
    console.print(f"[bold {colour}]{certificate.verdict}[/]  {certificate.sentence}", soft_wrap=True)
    if certificate.end_to_end:
        console.print(
            "End to end (a figure, not a proof: the selector sees the whole image), with hidden pixels redrawn:"
        )
        table = Table(
            "redrawn with", "n", "answer changed", "sight changed", "overlap of sights", box=None, pad_edge=False
        )
        for kind, row in certificate.end_to_end["redrawn_with"].items():
            shares = [
                f"{row[figure] / row['n']:.0%} [{low:.0%}, {high:.0%}]"
                for figure in ("answer_changed", "sight_changed")
                for low, high in [row[f"{figure}_interval"]]
            ]
            table.add_row(kind, str(row["n"]), *shares, f"{row['sight_iou']:.2f}")
        console.print(table)


def backbones() -> int:
    from rich.console import Console
    from rich.table import Table

    from .backbones import KNOWN

    table = Table("name", "width", "blocks", "patch", "registers", "picture", "weights", box=None, pad_edge=False)
    for known in KNOWN.values():
        c = known.config
        picture = f"{c.input.size[0]} px"
        table.add_row(
            known.name, *map(str, (c.width, c.depth, c.patch, c.registers)), picture, known.repository or known.note
        )
    Console(highlight=False).print(table)
    return 0


def _save(command: Verify, result: Certificate | Leak) -> None:
    if command.out is not None:
        try:
            result.save(command.out)
        except OSError as error:
            raise UserError(f"{command.out}: cannot be written ({error.strerror})") from error


def _fail(message: str, code: int) -> int:
    print(f"sightline: {message}", file=sys.stderr)
    return code
