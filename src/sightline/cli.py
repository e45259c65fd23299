"""The command line. Every command is a dataclass of `config.py`; heavy imports wait until one is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .config import (
    A2,
    Backbones,
    CentreCrop,
    Check,
    Compare,
    Convert,
    Data,
    Demo,
    EarlyMask,
    Erm,
    Evaluate,
    Ifam,
    Import,
    LateMask,
    Localize,
    Pdiscoformer,
    Predict,
    Pretrain,
    Probe,
    RandomCrop,
    Toy,
    Train,
    Verify,
)  # fmt: skip
from .errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from .verify import Certificate

sub = tyro.conf.subcommand
Command = (
    Annotated[Check, sub("check")]
    | Annotated[
        Annotated[Erm, sub("erm")]
        | Annotated[Probe, sub("probe")]
        | Annotated[A2, sub("a2")]
        | Annotated[CentreCrop, sub("centre-crop")]
        | Annotated[RandomCrop, sub("random-crop")]
        | Annotated[Ifam, sub("ifam")]
        | Annotated[Pdiscoformer, sub("pdiscoformer")]
        | Annotated[EarlyMask, sub("early-mask")]
        | Annotated[LateMask, sub("late-mask")],
        sub("train", description="Train a classifier."),
    ]
    | Annotated[Pretrain, sub("pretrain")]
    | Annotated[Data, sub("data")]
    | Annotated[Toy, sub("toy")]
    | Annotated[Convert, sub("convert")]
    | Annotated[Import, sub("import")]
    | Annotated[Evaluate, sub("evaluate")]
    | Annotated[Localize, sub("localize")]
    | Annotated[Predict, sub("predict")]
    | Annotated[Compare, sub("compare")]
    | Annotated[Verify, sub("verify")]
    | Annotated[Backbones, sub("backbones")]
    | Annotated[Demo, sub("demo")]
)


def main() -> None:
    command = tyro.cli(Command, prog="sightline", description="Image classifiers that can only see what they show you.")
    try:
        sys.exit(run(command))
    except UserError as error:
        sys.exit(_fail(str(error), 2))
    except KeyboardInterrupt:
        sys.exit(_fail("stopped; go on with --resume" if isinstance(command, Train) else "stopped", 130))


def run(command) -> int:
    """0: as it should be. 1: the answer is bad news. 2: the question was."""
    actions = {
        Check: check,
        Data: data,
        Toy: toy,
        Convert: convert,
        Import: import_,
        Evaluate: evaluate,
        Localize: localize,
        Predict: predict,
        Compare: compare,
        Verify: verify,
        Demo: demo,
    }
    if isinstance(command, Pretrain):
        return pretrain(command)
    if isinstance(command, Train):
        return train(command)
    if isinstance(command, Backbones):
        return backbones()
    return actions[type(command)](command)


def train(command: Train) -> int:
    from .train import train as run_training

    folder = run_training(command)
    if _is_main_process():
        _show_metrics(folder, "test")
        print(f"The run is in {folder}.")
    return 0


def pretrain(command: Pretrain) -> int:
    import json

    from rich.console import Console

    from .pretrain import pretrain as run_pretraining
    from .runs import read_run

    folder = run_pretraining(command)
    if _is_main_process():
        run = read_run(folder)
        last = json.loads(run.log_file.read_text(encoding="utf-8").splitlines()[-1])
        words = {"knn": "neighbours of the right class", "mass": "attention on the masks", "hit": "its peak on them"}
        if found := [f"{what} {last[name]:.1%}" for name, what in words.items() if name in last]:
            print(", ".join(found))
        _print_notes(Console(highlight=False), run.facts["data"]["notes"])
        print(f"The backbone is {folder / 'backbone.safetensors'}: give that to --backbone.")
    return 0


def check(command: Check) -> int:
    import json

    from .data.check import check as look_over
    from .data.rows import read_rows

    _make_way(command.out)
    rows = read_rows(command.data, layout=command.layout)
    with _bar("opening pictures", len(rows)) as progress:
        report = look_over(rows, open_images=not command.no_images, workers=command.workers, progress=progress)
    print("\n".join(report.lines()))
    if command.out is not None:
        _write(command.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return int(not report.ok)


def data(command: Data) -> int:
    from .data.build import Build, build

    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "name"}
    built = build(command.name, Build(**options))
    print(f"{built.folder}: {built.images:,} pictures{' (already there)' if built.reused else ''}")
    for split, counts in built.counts.items():
        print(f"  {split}: " + ", ".join(f"{group} {count:,}" for group, count in counts.items()))
    return 0


def toy(command: Toy) -> int:
    from .data.toyset import write_toy

    if command.out.exists():
        raise UserError(f"{command.out}: is there already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    print(f"{write_toy(command.out, **settings)}: {command.train + command.val + command.test:,} pictures and rows.csv")
    return 0


def convert(command: Convert) -> int:
    from .data.convert import convert as make

    print("\n".join(make(command.layout, command.data)))
    return 0


def import_(command: Import) -> int:
    from .official import import_published

    print(f"The run is in {import_published(command)}.")
    return 0


def evaluate(command: Evaluate) -> int:
    from .assess import assess

    folder = assess(command)
    if _is_main_process():
        _show_metrics(folder, command.split)
        print(f"Metrics and answers per picture are in {folder}.")
    return 0


def localize(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    from .localize import localize_run

    found, path = localize_run(command)
    if _is_main_process():
        console = Console(highlight=False)
        console.print(f"{escape(str(command.run))}, split {command.split!r}: {found.n:,} pictures", soft_wrap=True)
        console.print(found.table())
        _print_notes(console, found.notes)
        print(f"The figures are in {path}.")
    return 0


def predict(command: Predict) -> int:
    from .assess import predict_pictures

    _make_way(command.out)
    guesses = predict_pictures(command)
    if command.out is None:
        sys.stdout.write(guesses.text)
    else:
        _write(command.out, guesses.text)
    if guesses.unreadable:
        return _fail(f"{guesses.unreadable:,} of {guesses.pictures:,} pictures could not be read", 1)
    return 0


def compare(command: Compare) -> int:
    import json

    from rich.console import Console

    from .assess import compare_runs

    _make_way(command.out)
    comparison = compare_runs(command)
    console = Console(highlight=False)
    console.print(f"On the split {command.split!r}:")
    console.print(comparison.table())
    _print_notes(console, comparison.warnings)
    if command.out is not None:
        _write(command.out, json.dumps(comparison.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return 0


def demo(command: Demo) -> int:
    from .demo import demo as run_demo

    return run_demo(command)


def verify(command: Verify) -> int:
    from .leaks import find_leak
    from .sight import Judge
    from .subject import subject_of
    from .verify import verify as prove

    _make_way(command.out)
    subject = subject_of(command)
    kind = "pictures" if command.images else "toy pictures"
    print(f"{subject.name} on {len(subject.images)} {kind}, looking by {subject.where}.")
    if subject.note:
        print(f"({subject.note})")
    if isinstance(subject.module, Judge):
        certificate = prove(subject.module, subject.images, subject.sight, draws=command.draws, seed=command.seed)
        if command.out is not None:
            _write(command.out, certificate.to_json() + "\n")
        show(certificate)
        return int(certificate.verdict != "blind")
    assert subject.sight is not None, "only methods look for themselves"
    leak = find_leak(
        subject.module, subject.images, subject.sight, call=subject.call, draws=command.draws, seed=command.seed
    )
    if command.out is not None:
        _write(command.out, leak.to_json() + "\n")
    print(leak.sentence)
    return int(leak.leaks)


def show(certificate: Certificate, *, brief: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not brief:
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


def _show_metrics(folder: Path, split: str) -> None:
    """The table of one split, under what it is about, and what to know about it."""
    from rich.console import Console
    from rich.markup import escape

    from .cost import Cost
    from .metrics import Metrics, read_metrics
    from .runs import read_run

    content = read_metrics(folder / "metrics.json")
    about = content.get("data") or read_run(folder).facts["data"] | {"own": True}
    shown = split if split in content["splits"] else next(iter(content["splits"]))
    metrics = Metrics.from_dict(content["splits"][shown])
    selected = content.get("selected_by") is not None
    console = Console(highlight=False)
    console.print(f"{escape(about['name'])}, split {shown!r}: {metrics.n:,} pictures", soft_wrap=True)
    console.print(metrics.table())
    notes = [f"there is no split {split!r}, so this is {shown!r}"] if shown != split else []
    if about["own"] and shown == "train":
        notes.append("the model was trained on these pictures: expect less on others")
    if about["own"] and selected and shown == content["selected_on"]:
        notes.append("these pictures also chose the weights: expect less on others")
    _print_notes(console, (*notes, *about["notes"], *metrics.warnings))
    chosen = f"Weights selected by {content['selected_by']} on the {content['selected_on']} data."
    rule = chosen if selected else "Nothing was selected."
    console.print(f"[bold]{escape(metrics.headline())}[/]. {rule}", soft_wrap=True)
    if shown in content.get("cost", {}):
        console.print(Cost(**content["cost"][shown]).sentence, soft_wrap=True)


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    from rich.markup import escape

    for note in notes:
        console.print(f"[yellow]note[/]  {escape(note)}", soft_wrap=True)


@contextmanager
def _bar(what: str, total: int) -> Generator[Callable[[int], None] | None]:
    """A bar to be told how much is done; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _is_main_process() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


def _make_way(path: Path | None) -> None:
    """Before the work, so that it is not done in vain."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    if path.is_dir():
        raise UserError(f"{path}: cannot be written (it is a folder); name a file")


def _write(path: Path, text: str) -> None:
    _make_way(path)
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _fail(message: str, code: int) -> int:
    print(f"sightline: {message}", file=sys.stderr)
    return code
