"""What commands do that show a model to a person, correct it, or hand it on."""

from __future__ import annotations

from ..config import App, Audit, Export, Intervene, Push, Strips
from ..console import bar, counted, is_main_process, print_notes


def intervene(command: Intervene) -> int:
    from rich.console import Console

    from ..interventions.intervene import correct
    from ..interventions.search import table

    outcome = correct(command)
    if is_main_process():
        console = Console(highlight=False)
        if outcome.measured is not None and (command.find or not command.changes):
            console.print(table(outcome.measured, console))
        print_notes(console, outcome.notes)
        for sentence in outcome.sentences:
            console.print(sentence, soft_wrap=True, markup=False)
        if command.find and outcome.measured is not None:
            from ..report.strips import write_left_out

            print(f"The table with its pictures is {write_left_out(command.run, outcome.measured)}.")
    return 0


def strips(command: Strips) -> int:
    from ..report.strips import draw

    drawn = draw(command)
    print("\n".join([*drawn.notes, f"The pictures are in {drawn.page}: open it in a browser."]))
    return 0


def audit(command: Audit) -> int:
    from ..report.audit import audit as write_report

    path, headline = write_report(command)
    print(headline)
    print(f"The report is {path}: open it in a browser.")
    return 0


def app(command: App) -> int:
    from ..app.app import serve

    return serve(command)


def export(command: Export) -> int:
    from ..export.export import export as write_out

    with bar("exporting", 4) as progress:
        made = write_out(command, progress)
    for sentence in filter(None, (made.agreement.sentence, made.agreement.proof)):
        print(sentence)
    print(f"Tried on {made.pictures}. {made.folder / 'model.onnx'}: {made.bytes / 1e6:.1f} MB; how to use it is in")
    print(f"{made.folder / 'model.json'} (`example`) and in the model card beside it, README.md.")
    return 0


def push(command: Push) -> int:
    from ..export.push import push as publish

    with bar("publishing", 3) as progress:
        pushed = publish(command, progress)
    print(f"{counted(pushed.files, 'file')}, {pushed.bytes / 1e6:.1f} MB: {pushed.address} ({pushed.seen_by}).")
    print(f'Load it with sightline.load("hf:{command.repository}").')
    return 0
