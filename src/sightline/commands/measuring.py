"""What commands do that measure, prove and compare."""

from __future__ import annotations

import sys

from ..config import Compare, Evaluate, Localize, Matrix, Predict, Shape, Stress, Suite, Verify
from ..console import counted, fail, is_main_process, make_way, print_notes, show, show_metrics, write
from ..errors import UserError


def evaluate(command: Evaluate) -> int:
    from ..evaluate import assess

    folder = assess(command)
    if is_main_process():
        show_metrics(folder, command.split)
        print(f"Metrics and answers per picture are in {folder}.")
    return 0


def suite(command: Suite) -> int:
    from rich.console import Console

    from ..explain.suite import run_suite

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

    from ..explain.localize import localize_run

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

    from ..explain.localize_backbones import localize_command

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

    from ..matrix import matrix as fill

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
    from ..explain.shape import shape_run

    found, path = shape_run(command)
    if is_main_process():
        print(found.sentence)
        print(f"Every group and the probe's answers are in {path.parent}.")
    return 0


def stress(command: Stress) -> int:
    from rich.console import Console
    from rich.markup import escape

    from ..explain.stress import stress as test_explanations

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


def predict(command: Predict) -> int:
    from ..predict import predict_pictures, refuse_to_replace

    make_way(command.out)
    refuse_to_replace(command.out)
    guesses = predict_pictures(command)
    if command.out is None:
        sys.stdout.write(guesses.text)
    else:
        write(command.out, guesses.text)
        print(f"The answers are in {command.out}.")
    if guesses.unseen:
        few = f"{counted(len(guesses.unseen))} of which nothing was seen, such as {guesses.unseen[0]}"
        print(f"note: {few}: the answer is a guess", file=sys.stderr)
    if guesses.unreadable:
        return fail(f"{guesses.unreadable:,} of {guesses.pictures:,} pictures could not be read", 1)
    return 0


def compare(command: Compare) -> int:
    import json

    from rich.console import Console

    from ..evaluate import compare_runs

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
        from ..explain.class_changes import both

        files = [folder / "predictions" / f"{command.split}.csv" for folder in two_of(command)]
        draw_class_changes({command.split: both(*files)}, command)
    return 0


def compare_on_suite(command: Compare, console) -> int:
    import json

    from ..explain.suite import compare_suites

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
    from ..explain.class_changes import class_changes, draw_changes, in_words

    assert command.classes is not None
    before, after = two_of(command)
    changes = {name: class_changes(*pair) for name, pair in pairs.items()}
    for name, some in changes.items():
        print(f"{name}: {in_words(some)}")
    draw_changes(changes, command.classes, f"from {before.name} to {after.name}")
    print(f"Every class is in {command.classes}.")


def verify(command: Verify) -> int:
    from ..sight import Judge
    from ..verify.leaks import find_leak
    from ..verify.target import subject_of
    from ..verify.verify import verify as prove

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
        if command.out is None and certificate.verdict != "refused":
            print("This certificate is not kept; --out certificate.json keeps it.")
        return int(certificate.verdict != "blind")
    assert subject.sight is not None, "only methods look for themselves"
    leak = find_leak(
        subject.module, subject.images, subject.sight, call=subject.call, draws=command.draws, seed=command.seed
    )
    if command.out is not None:
        write(command.out, leak.to_json() + "\n")
    print(leak.sentence)
    return int(leak.leaks)
