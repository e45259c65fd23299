"""Filling the grid, cell by cell; what is finished already is not done again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from ..config.matrix import Matrix
from ..console.files import make_folder, write
from ..console.terminal import print_notes
from ..data.rows import Rows, fingerprint, read_rows
from ..errors import UserError
from ..metrics.groups import evaluate
from ..training.context import check_splits
from ..training.distributed import make_accelerator
from ..training.run_folder import about, versions
from .bench import Bench, short_print
from .cells import Cell, add_cell, read_cells
from .grid import Grid, grid_of
from .ways import crop_ways, mass_ways
from .whats import ANSWERS, Outcome, What, open_what
from .wheres import KINDS, Where
from .words import PUBLISHED, WHATS, Word, read_words

Opened = TypeVar("Opened", Where, What)


def fill(config: Matrix, told: Callable[[Cell], None] = lambda _: None) -> Grid:
    """Every cell that was asked for; each is `told` as soon as it is there. The files are in `config.folder`."""
    wheres = read_words(config.where, KINDS, "where")
    whats = read_words(config.what, WHATS, "what")
    rows = read_rows(config.data, layout=config.layout, seed=config.split_seed)
    validate_config(config, rows)
    accelerator = make_accelerator(config.device)
    if accelerator.num_processes > 1:
        raise UserError("the matrix is filled by one process: start it without accelerate")
    if config.pictures:
        from ..explain.plots import figure_class

        figure_class()  # or it says what is missing
    folder = config.folder
    make_folder(folder)
    if config.collect:
        there = cells_of(rows, folder / "cells.jsonl")
        wheres = and_others(wheres, [cell.where for cell in there])
        whats = and_others(whats, [cell.what for cell in there])
        cells = collected(there, wheres, whats)
    else:
        cells = fill_all(wheres, whats, Bench(config, rows, accelerator.device), told)
    grid = grid_of(cells, wheres, whats, rows, config)
    write(folder / "matrix.json", json.dumps(grid.to_dict(), indent=1, ensure_ascii=False) + "\n")
    if config.pictures:
        grid.draw(folder)
    return grid


def fill_all(wheres: list[Word], whats: list[Word], bench: Bench, told: Callable[[Cell], None]) -> list[Cell]:
    opened_whats = {word: attempt(open_what, word, bench) for word in whats}
    before, cells = read_cells(bench.config.folder / "cells.jsonl"), []
    for word in wheres:
        where = attempt(KINDS[word.kind], word, bench)
        for other in whats:
            cells.append(filled(where, opened_whats[other], Cell(word, other), before, bench))
            told(cells[-1])
    return cells


def cells_of(rows: Rows, path: Path) -> list[Cell]:
    """What is there of these data; of cells that are called the same, the last."""
    data, pictures = fingerprint(rows), len(rows.where("test"))
    filled = list(read_cells(path).values())
    if not filled:
        raise UserError(f"{path}: no filled cells to collect; leave --collect out to fill them")

    def of_these_data(cell: Cell) -> bool:
        return cell.data == data if cell.data else cell.metrics is not None and cell.metrics.n == pictures

    there = {cell.name: cell for cell in filled if of_these_data(cell)}
    if not there:
        raise UserError(
            f"{path}: filled with other data than {rows.name} with its {pictures:,} test pictures (fingerprint "
            f"{data[:12]}); name the data that it was filled with"
        )
    return list(there.values())


def and_others(said: list[Word], there: Iterable[Word]) -> list[Word]:
    """The words that were said, and after them all others: a table is never put together of less than there is."""
    names = {word.short for word in said}
    return said + list({word.short: word for word in there if word.short not in names}.values())


def collected(there: list[Cell], wheres: list[Word], whats: list[Word]) -> list[Cell]:
    """Paths may be others than where it was filled, so that the short names decide."""
    named = {cell.name: cell for cell in there}
    pairs = [Cell(where, what, empty="not filled yet") for where in wheres for what in whats]
    return [replace(named.get(pair.name, pair), where=pair.where, what=pair.what) for pair in pairs]


def validate_config(config: Matrix, rows: Rows) -> None:
    check_splits(config.data, rows, ("train", "val", "test"))
    for wrong, complaint in (
        (config.batch < 1, f"--batch {config.batch}: must be at least 1"),
        (config.workers < 0, f"--workers {config.workers}: must not be negative"),
        (config.epochs < 1, f"--epochs {config.epochs}: must be at least 1"),
    ):
        if wrong:
            raise UserError(complaint)
    crop_ways(config)
    mass_ways(config)


def attempt(make: Callable[[Word, Bench], Opened], word: Word, bench: Bench) -> Opened | UserError:
    """What cannot be opened leaves its row or column empty, and the others alone."""
    try:
        return make(word, bench)
    except UserError as error:
        return error


def filled(where: Where | UserError, what: What | UserError, cell: Cell, before: dict[str, Cell], bench: Bench) -> Cell:
    cell = replace(cell, published=PUBLISHED.get((cell.where.kind, cell.what.kind)))
    for opened in (where, what):
        if isinstance(opened, UserError):
            return replace(cell, empty=str(opened))
    assert isinstance(where, Where)
    assert isinstance(what, What)
    facts = bench.data, where.identity, what.word.kind, what.identity, str(what.expects), what.settings()
    cell = replace(cell, key=short_print(json.dumps(facts)), data=bench.data, truth=where.truth, note=where.note)
    home = bench.config.folder / "cells" / cell.folder
    if cell.key in before and (home / "predictions" / "test.csv").is_file():
        known = before[cell.key]
        return replace(known, where=cell.where, what=cell.what, data=cell.data, truth=cell.truth, note=cell.note)
    began = time.perf_counter()
    try:
        outcome = ANSWERS[what.answers](where, what, bench.config.folder / "runs" / cell.folder)
    except UserError as error:
        return replace(cell, empty=str(error))
    counts = None if bench.rows.groups is None else about(bench.rows)["counts"]["train"]
    cell = replace(
        cell,
        metrics=evaluate(outcome.answers["test"], train_group_counts=counts, seed=bench.config.seed),
        validation=outcome.validation, way=outcome.way.words, tried=outcome.tried, rule=outcome.rule,
        facts=outcome.facts, parameters={"where": where.parameters, "what": what.parameters},
        seconds=round(time.perf_counter() - began, 2),
    )  # fmt: skip
    keep(cell, outcome, home, bench)
    add_cell(bench.config.folder / "cells.jsonl", cell)
    return cell


def keep(cell: Cell, outcome: Outcome, home: Path, bench: Bench) -> None:
    """As a run has them, so that `sightline compare` takes cells, too."""
    make_folder(home / "predictions")
    for split, answers in outcome.answers.items():
        answers.save_csv(home / "predictions" / f"{split}.csv")
    data = about(bench.rows) | {"path": str(bench.config.data.expanduser().resolve()), "fingerprint": bench.data}
    facts = {
        "method": "matrix",
        "config": asdict(bench.config) | {"where": str(cell.where), "what": str(cell.what), "way": cell.way},
        "data": data | {"layout": bench.config.layout},
        "versions": versions(),
        "seed": bench.config.seed,
        "selection": {"metric": cell.rule, "on": "val"},
        "state": "finished",
    }
    write(home / "run.json", json.dumps(facts, indent=1, ensure_ascii=False, default=str) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Matrix) -> int:
    from rich.console import Console

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
