"""`sightline bench`: train what is missing of many methods and seeds, and compare all that is finished in one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ..config.bench import Bench
from ..console.files import make_folder, write, write_json
from ..console.terminal import is_main_process, print_notes
from ..data.rows import read_rows
from ..errors import UserError
from ..metrics.groups import score
from .page import render_page
from .plan import BenchRun, Entry, parse_shard, read_entries, runs_of, with_starts
from .running import Outcome, train_missing
from .table import Table, make_table, predictions_of


def bench(command: Bench, report: Callable[[Outcome], None] = lambda _: None) -> tuple[Table | None, list[Outcome]]:
    """The table of all finished runs, and what was trained now. Every process of a launcher takes part in every run."""
    entries = read_entries(command)
    number, count = parse_shard(command.shard)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if command.jobs > 1 and processes > 1:
        raise UserError(f"--jobs {command.jobs}: a launcher with {processes} processes trains one run after the other")
    rows = read_rows(command.data, layout=command.layout, seed=command.split_seed)
    if command.grid == "worst-group" and rows.groups is None:
        raise UserError("--grid worst-group: the data have no group labels; use --grid balanced")
    make_folder(command.folder)
    outcomes, notes = [], []
    grids = grids_of(entries)
    if grids:
        every = with_starts([entry for some in grids.values() for entry in some], entries)
        tried = runs_of(every, command.seeds[:1], command)
        outcomes += [] if command.collect else train_missing(tried[number::count], command.jobs, report)
        entries, notes = with_selected(entries, grids, {run.entry.name: run for run in tried}, command)
    runs = runs_of(entries, command.seeds, command)
    failed = {outcome.run.config.folder for outcome in outcomes if outcome.error}
    if not command.collect:
        mine = [run for run in runs[number::count] if run.config.folder not in failed]
        outcomes += train_missing(mine, command.jobs, report)
    finished = [run for run in runs if run.finished]
    notes += [f"not finished: {run.name}" for run in runs if not run.finished]
    if not is_main_process():
        return None, outcomes
    table = make_table(finished, command.split, notes)
    if table is not None:
        save_table(table, command)
    return table, outcomes


def grids_of(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The settings of each method that has several, by the text of the user."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.origin or entry.name, []).append(entry)
    return {text: some for text, some in found.items() if len(some) > 1}


def with_selected(
    entries: Sequence[Entry], grids: dict[str, list[Entry]], runs: dict[str, BenchRun], command: Bench
) -> tuple[list[Entry], list[str]]:
    """Of each grid the setting with the highest validation score of the first seed, as one line of the table."""
    assert command.grid is not None
    selected, notes = {}, []
    for text, some in grids.items():
        scores = {
            entry.name: score(predictions_of(runs[entry.name], "val"), command.grid)
            for entry in some
            if runs[entry.name].finished
        }
        if len(scores) < len(some):
            notes.append(f"{text}: {len(some) - len(scores)} settings of its grid are not finished")
            continue
        best = max(some, key=lambda entry: scores[entry.name])
        selected[text] = best
        notes.append(
            f"{best.name}: selected among {len(some)} settings by {command.grid} on the validation data, "
            f"{100 * scores[best.name]:.1f} %"
        )
    kept = [entry for entry in entries if entry.origin not in grids or selected.get(entry.origin) is entry]
    return kept, notes


def save_table(table: Table, command: Bench) -> None:
    folder = command.folder
    write_json(folder / "bench.json", table.to_dict())
    for name, text in (("table.md", table.markdown()), ("table.tex", table.latex()), ("table.csv", table.csv())):
        write(folder / name, text)
    write(folder / "index.html", render_page(table, figures=command.figures))


SHOWN = ("method", "seeds", "accuracy")  # on the screen; all columns are in the files

# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Bench) -> int:
    from rich.console import Console

    from ..metrics.tables import named_table

    console = Console(highlight=False)

    def announce(outcome: Outcome) -> None:
        if is_main_process():
            result = f"failed: {outcome.error}" if outcome.error else "finished"
            console.print(f"{outcome.run.name}: {result}", soft_wrap=True, markup=False)

    table, outcomes = bench(command, announce)
    if is_main_process():
        if table is None:
            raise UserError(f"{command.folder}: no run is finished yet")
        at = [table.header.index(name) for name in (*SHOWN, f"worst {table.worst_of}", "− best", "verdict")]
        rows = [[line.cells[k] for k in at] for line in table.lines]
        console.print(named_table([table.header[k] for k in at], rows))
        console.print(table.caption, soft_wrap=True, markup=False)
        print_notes(console, table.warnings)
        print(f"Tables, figures and runs saved to {command.folder}; open index.html in a browser.")
    return int(any(outcome.error for outcome in outcomes))
