"""`sightline matrix`: evaluate every pair of a selector and a predictor; finished cells are not computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from ..config.matrix import Matrix
from ..console.files import make_folder, write, write_json
from ..console.terminal import print_notes
from ..data.rows import Rows, fingerprint, read_rows
from ..errors import UserError
from ..metrics.groups import evaluate
from ..training.checks import check_splits
from ..training.distributed import make_accelerator
from ..training.run_folder import describe_rows, versions
from .bench import MatrixContext, short_hash
from .cells import Cell, add_cell, read_cells
from .grid import Grid, build_grid
from .ways import crop_ways, mass_ways
from .whats import PREDICTORS, Outcome, What, open_what
from .wheres import KINDS, Where
from .words import PUBLISHED, WHATS, Spec, parse_specs

Opened = TypeVar("Opened", Where, What)


def fill(config: Matrix, on_cell: Callable[[Cell], None] = lambda _: None) -> Grid:
    """Compute all cells and write them to `config.folder`; `on_cell` is called with each finished cell."""
    wheres = parse_specs(config.where, KINDS, "where")
    whats = parse_specs(config.what, WHATS, "what")
    rows = read_rows(config.data, layout=config.layout, seed=config.split_seed)
    validate_config(config, rows)
    accelerator = make_accelerator(config.device)
    if accelerator.num_processes > 1:
        raise UserError("`sightline matrix` runs in one process: start it without a launcher")
    if config.figures:
        from ..explain.plots import figure_class

        figure_class()  # raises if matplotlib is missing
    folder = config.folder
    make_folder(folder)
    if config.collect:
        stored = stored_cells(rows, folder / "cells.jsonl")
        wheres = add_missing(wheres, [cell.where for cell in stored])
        whats = add_missing(whats, [cell.what for cell in stored])
        cells = collect_cells(stored, wheres, whats)
    else:
        cells = fill_cells(wheres, whats, MatrixContext(config, rows, accelerator.device), on_cell)
    grid = build_grid(cells, wheres, whats, rows, config)
    write_json(folder / "matrix.json", grid.to_dict())
    if config.figures:
        grid.draw(folder)
    return grid


def fill_cells(
    wheres: list[Spec], whats: list[Spec], context: MatrixContext, on_cell: Callable[[Cell], None]
) -> list[Cell]:
    opened_whats = {spec: try_open(open_what, spec, context) for spec in whats}
    before, cells = read_cells(context.config.folder / "cells.jsonl"), []
    for spec in wheres:
        where = try_open(KINDS[spec.kind], spec, context)
        for other in whats:
            cells.append(fill_cell(where, opened_whats[other], Cell(spec, other), before, context))
            on_cell(cells[-1])
    return cells


def stored_cells(rows: Rows, path: Path) -> list[Cell]:
    """The stored cells of these data; of cells with the same name, the last."""
    data, n = fingerprint(rows), len(rows.split_indices("test"))
    filled = list(read_cells(path).values())
    if not filled:
        raise UserError(f"{path}: no finished cells to collect; omit --collect to compute them")

    def of_these_data(cell: Cell) -> bool:
        return cell.data == data if cell.data else cell.metrics is not None and cell.metrics.n == n

    stored = {cell.name: cell for cell in filled if of_these_data(cell)}
    if not stored:
        raise UserError(
            f"{path}: its cells are of other data than {rows.name} ({n:,} test images, fingerprint {data[:12]}); name "
            "the data they were computed on"
        )
    return list(stored.values())


def add_missing(given: list[Spec], stored: Iterable[Spec]) -> list[Spec]:
    """The given specs, then those of all other stored cells, so that the table leaves out none."""
    names = {spec.short for spec in given}
    return given + list({spec.short: spec for spec in stored if spec.short not in names}.values())


def collect_cells(stored: list[Cell], wheres: list[Spec], whats: list[Spec]) -> list[Cell]:
    """Matched by short names, because paths may differ from those at computation."""
    named = {cell.name: cell for cell in stored}
    pairs = [Cell(where, what, empty="not computed yet") for where in wheres for what in whats]
    return [replace(named.get(pair.name, pair), where=pair.where, what=pair.what) for pair in pairs]


def validate_config(config: Matrix, rows: Rows) -> None:
    check_splits(config.data, rows, ("train", "val", "test"))
    crop_ways(config)
    mass_ways(config)


def try_open(make: Callable[[Spec, MatrixContext], Opened], spec: Spec, context: MatrixContext) -> Opened | UserError:
    """A selector or predictor that cannot be opened leaves only its own row or column empty."""
    try:
        return make(spec, context)
    except UserError as error:
        return error


def fill_cell(
    where: Where | UserError, what: What | UserError, cell: Cell, before: dict[str, Cell], context: MatrixContext
) -> Cell:
    cell = replace(cell, published=PUBLISHED.get((cell.where.kind, cell.what.kind)))
    for opened in (where, what):
        if isinstance(opened, UserError):
            return replace(cell, empty=str(opened))
    assert isinstance(where, Where)
    assert isinstance(what, What)
    facts = context.data, where.identity, what.spec.kind, what.identity, str(what.expects), what.settings()
    cell = replace(cell, key=short_hash(json.dumps(facts)), data=context.data, truth=where.truth, note=where.note)
    home = context.config.folder / "cells" / cell.folder
    if cell.key in before and (home / "predictions" / "test.csv").is_file():
        known = before[cell.key]
        return replace(known, where=cell.where, what=cell.what, data=cell.data, truth=cell.truth, note=cell.note)
    began = time.perf_counter()
    try:
        outcome = PREDICTORS[what.predictor](where, what, context.config.folder / "runs" / cell.folder)
    except UserError as error:
        return replace(cell, empty=str(error))
    counts = None if context.rows.groups is None else describe_rows(context.rows)["counts"]["train"]
    cell = replace(
        cell,
        metrics=evaluate(outcome.predictions["test"], train_group_counts=counts, seed=context.config.seed),
        validation=outcome.validation, way=outcome.way.description, tried=outcome.tried, rule=outcome.rule,
        facts=outcome.facts, parameters={"where": where.parameters, "what": what.parameters},
        seconds=round(time.perf_counter() - began, 2),
    )  # fmt: skip
    save_cell(cell, outcome, home, context)
    add_cell(context.config.folder / "cells.jsonl", cell)
    return cell


def save_cell(cell: Cell, outcome: Outcome, home: Path, context: MatrixContext) -> None:
    """In the format of a run folder, so that `sightline compare` accepts cells."""
    make_folder(home / "predictions")
    for split, predictions in outcome.predictions.items():
        predictions.save_csv(home / "predictions" / f"{split}.csv")
    path = str(context.config.data.expanduser().resolve())
    data = describe_rows(context.rows) | {"path": path, "fingerprint": context.data}
    facts = {
        "method": "matrix",
        "config": asdict(context.config) | {"where": str(cell.where), "what": str(cell.what), "way": cell.way},
        "data": data | {"layout": context.config.layout},
        "versions": versions(),
        "seed": context.config.seed,
        "selection": {"metric": cell.rule, "on": "val"},
        "state": "finished",
    }
    write(home / "run.json", json.dumps(facts, indent=1, ensure_ascii=False, default=str) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Matrix) -> int:
    from rich.console import Console

    console = Console(highlight=False)

    def print_cell(cell: Cell) -> None:
        result = f"{cell.figure} ({cell.way})" if cell.figure else f"empty: {cell.empty}"
        console.print(f"{cell.name}: {result}", soft_wrap=True, markup=False)

    grid = fill(command, print_cell)
    console.print(grid.table())
    print_notes(console, grid.notes)
    for sentence in grid.sentences:
        console.print(sentence, soft_wrap=True, markup=False)
    print(f"Table, figures and the predictions of every cell saved to {command.folder}.")
    return int(not grid.filled)
