"""What each command does: reads its question, has it answered, prints what a person wants to know.

Heavy imports wait until a command is chosen. 0: as it should be. 1: the answer is bad news. 2: the question was.
"""

from __future__ import annotations

import sys
from dataclasses import fields

from .config import (
    App,
    Audit,
    Backbones,
    Check,
    Compare,
    Convert,
    Data,
    Demo,
    Evaluate,
    Export,
    Import,
    Intervene,
    Localize,
    Matrix,
    Predict,
    Pretrain,
    Push,
    Shape,
    Stress,
    Suite,
    Toy,
    Train,
    Verify,
)  # fmt: skip
from .errors import UserError
from .screen import bar, counted, fail, is_main_process, make_way, print_notes, show, show_metrics, write


def train(command: Train) -> int:
    from .train import train as run_training

    folder = run_training(command)
    if is_main_process():
        show_metrics(folder, "test")
        print(f"The run is in {folder}.")
    return 0


def pretrain(command: Pretrain) -> int:
    import json

    from .pretrain import pretrain as run_pretraining
    from .progress import figures_of_pretraining
    from .runs import read_run

    folder = run_pretraining(command)
    if is_main_process():
        run = read_run(folder)
        last = json.loads(run.log_file.read_text(encoding="utf-8").splitlines()[-1])
        if found := figures_of_pretraining(last):
            print(", ".join(found))
        print(f"The backbone is {folder / 'backbone.safetensors'}: give that to --backbone.")
    return 0


def check(command: Check) -> int:
    import json

    from .data.check import check as look_over
    from .data.rows import read_rows

    make_way(command.out)
    rows = read_rows(command.data, layout=command.layout)
    with bar("opening pictures", len(rows)) as progress:
        report = look_over(rows, open_images=not command.no_images, workers=command.workers, progress=progress)
    print("\n".join(report.lines()))
    if command.out is not None:
        write(command.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return int(not report.ok)


def data(command: Data) -> int:
    from .data.build import Build, build

    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "name"}
    built = build(command.name, Build(**options))
    print(f"{built.folder}: {counted(built.images)}{' (already there)' if built.reused else ''}")
    for split, counts in built.counts.items():
        print(f"  {split}: " + ", ".join(f"{group} {count:,}" for group, count in counts.items()))
    return 0


def toy(command: Toy) -> int:
    from .data.toyset import write_toy

    if command.out.exists():
        raise UserError(f"{command.out}: is there already; choose another folder")
    settings = {f.name: getattr(command, f.name) for f in fields(command) if f.name != "out"}
    count = command.train + command.val + command.test
    print(f"{write_toy(command.out, **settings)}: {counted(count)} and rows.csv")
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
    if is_main_process():
        show_metrics(folder, command.split)
        print(f"Metrics and answers per picture are in {folder}.")
    return 0


def suite(command: Suite) -> int:
    from rich.console import Console

    from .suite import run_suite

    if command.suite is None:
        return evaluate(command)
    found, folder = run_suite(command)
    console = Console(highlight=False)
    console.print(found.table())
    print_notes(console, found.notes)
    print(f"The figures, and answers per picture, are in {folder}.")
    return 0


def localize(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    if command.of_backbones:
        return localize_backbones(command)

    from .localize import localize_run

    found, path = localize_run(command)
    if is_main_process():
        console = Console(highlight=False)
        console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(found.n)}", soft_wrap=True)
        console.print(found.table())
        print_notes(console, found.notes)
        print(f"The figures are in {path}.")
    return 0


def localize_backbones(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    from .localize_backbones import localize_command

    found = localize_command(command)
    if is_main_process():
        console = Console(highlight=False)
        about = f"{found.data}, split {found.split!r}: {counted(found.n)}, the truth being {found.truth}"
        console.print(escape(about), soft_wrap=True)
        console.print(found.table())
        console.print(found.table_of_shares())
        print_notes(console, found.notes)
        if command.out is not None:
            print(f"The figures{' and pictures' if command.pictures else ''} are in {command.out}.")
    return 0


def matrix(command: Matrix) -> int:
    from rich.console import Console

    from .matrix import fill

    console = Console(highlight=False)

    def tell(cell) -> None:
        found = f"{cell.figure} ({cell.way})" if cell.figure else f"empty: {cell.empty}"
        console.print(f"{cell.name}: {found}", soft_wrap=True, markup=False)

    grid = fill(command, tell)
    console.print(grid.table())
    print_notes(console, grid.notes)
    for sentence in grid.sentences:
        console.print(sentence, soft_wrap=True, markup=False)
    print(f"The figures, pictures and every cell's answers are in {command.folder}.")
    return int(not grid.filled)


def shape(command: Shape) -> int:
    from .shape import shape_run

    found, path = shape_run(command)
    if is_main_process():
        print(found.sentence)
        print(f"Every group and the probe's answers are in {path.parent}.")
    return 0


def stress(command: Stress) -> int:
    from rich.console import Console
    from rich.markup import escape

    from .audit.stress import stress as test_explanations

    found, path = test_explanations(command)
    console = Console(highlight=False)
    console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(found.n)}", soft_wrap=True)
    for table in found.tables():
        console.print(table)
    print_notes(console, found.notes)
    for one in found.sentences:
        console.print(one, soft_wrap=True, markup=False)
    print(f"The figures, and what there is per picture, are in {path.parent}.")
    return 0


def intervene(command: Intervene) -> int:
    from rich.console import Console

    from .intervene import correct
    from .search import table

    outcome = correct(command)
    if is_main_process():
        console = Console(highlight=False)
        if outcome.measured is not None and (command.find or not command.changes):
            console.print(table(outcome.measured))
        for sentence in outcome.sentences:
            console.print(sentence, soft_wrap=True, markup=False)
    return 0


def audit(command: Audit) -> int:
    from .audit.report import audit as write_report

    path, headline = write_report(command)
    print(headline)
    print(f"The report is {path}: open it in a browser.")
    return 0


def app(command: App) -> int:
    from .audit.app import serve

    return serve(command)


def predict(command: Predict) -> int:
    from .assess import predict_pictures

    make_way(command.out)
    guesses = predict_pictures(command)
    if command.out is None:
        sys.stdout.write(guesses.text)
    else:
        write(command.out, guesses.text)
    if guesses.unreadable:
        return fail(f"{guesses.unreadable:,} of {guesses.pictures:,} pictures could not be read", 1)
    return 0


def compare(command: Compare) -> int:
    import json

    from rich.console import Console

    from .assess import compare_runs

    make_way(command.out)
    make_way(command.classes)
    console = Console(highlight=False)
    if command.suite is not None:
        return compare_on_suite(command, console)
    comparison = compare_runs(command)
    console.print(f"On the split {command.split!r}:")
    console.print(comparison.table())
    print_notes(console, comparison.warnings)
    if command.out is not None:
        write(command.out, json.dumps(comparison.to_dict(), indent=1, ensure_ascii=False) + "\n")
    if command.classes is not None:
        from .audit.changes import both

        files = [folder / "predictions" / f"{command.split}.csv" for folder in two_of(command)]
        draw_class_changes({command.split: both(*files)}, command)
    return 0


def compare_on_suite(command: Compare, console) -> int:
    import json

    from .suite import compare_suites

    assert command.suite is not None
    before, after = two_of(command)
    found, pairs = compare_suites(before, after, command.suite)
    console.print(found.table([one.name for one in (before, after)]))
    if command.out is not None:
        write(command.out, json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    if command.classes is not None:
        draw_class_changes(pairs, command)
    return 0


def two_of(command: Compare):
    if len(command.runs) != 2:
        raise UserError(f"classes and suites are compared of two runs, not of {len(command.runs)}")
    return command.runs


def draw_class_changes(pairs, command: Compare) -> None:
    from .audit.changes import class_changes, draw_changes, in_words

    assert command.classes is not None
    before, after = two_of(command)
    changes = {name: class_changes(*pair) for name, pair in pairs.items()}
    for name, some in changes.items():
        print(f"{name}: {in_words(some)}")
    draw_changes(changes, command.classes, f"from {before.name} to {after.name}")
    print(f"Every class is in {command.classes}.")


def demo(command: Demo) -> int:
    from .demo import demo as run_demo

    return run_demo(command)


def verify(command: Verify) -> int:
    from .leaks import find_leak
    from .sight import Judge
    from .subject import subject_of
    from .verify import verify as prove

    make_way(command.out)
    subject = subject_of(command)
    kind = "picture" if command.images else "toy picture"
    print(f"{subject.name} on {counted(len(subject.images), kind)}, looking by {subject.where}.")
    if subject.note:
        print(f"({subject.note})")
    if isinstance(subject.module, Judge):
        certificate = prove(subject.module, subject.images, subject.sight, draws=command.draws, seed=command.seed)
        if command.out is not None:
            write(command.out, certificate.to_json() + "\n")
        show(certificate)
        return int(certificate.verdict != "blind")
    assert subject.sight is not None, "only methods look for themselves"
    leak = find_leak(
        subject.module, subject.images, subject.sight, call=subject.call, draws=command.draws, seed=command.seed
    )
    if command.out is not None:
        write(command.out, leak.to_json() + "\n")
    print(leak.sentence)
    return int(leak.leaks)


def export(command: Export) -> int:
    from .export import export as write_out

    with bar("exporting", 4) as progress:
        made = write_out(command, progress)
    for sentence in filter(None, (made.agreement.sentence, made.agreement.proof)):
        print(sentence)
    print(f"Tried on {made.pictures}. {made.folder / 'model.onnx'}: {made.bytes / 1e6:.1f} MB; how to use it is in")
    print(f"{made.folder / 'model.json'} (`example`) and in the model card beside it, README.md.")
    return 0


def push(command: Push) -> int:
    from .push import push as publish

    with bar("publishing", 3) as progress:
        pushed = publish(command, progress)
    print(f"{counted(pushed.files, 'file')}, {pushed.bytes / 1e6:.1f} MB: {pushed.address} ({pushed.seen_by}).")
    print(f'Load it with sightline.load("hf:{command.repository}").')
    return 0


def backbones(_: Backbones) -> int:
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
