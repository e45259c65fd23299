"""The grid of all cells: as a table, as a picture, and what is best in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.matrix import Matrix
from ..data.rows import Rows, fingerprint
from ..metrics.comparison import compare, verdict
from ..metrics.estimates import Estimate
from ..metrics.predictions import Predictions
from .cells import Cell
from .scaling import WHICHEVER, Curve, curves
from .words import Word

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Duel:
    """The best new pairing against the best published one: both chosen on validation data, measured on test data."""

    among: str
    new: Cell
    published: Cell
    gain: Estimate

    @property
    def sentence(self) -> str:
        wins = best_of((self.published, self.new))
        kind = "a new" if wins is self.new else "a published"
        return (
            f"Of {self.among}, {kind} one is best on validation data. The best new one, {_said(self.new)}, against "
            f"the best published one, {_said(self.published)}, on test data: {self.gain.figure} {self.gain.interval} "
            f"(n {self.gain.n:,}), {verdict(self.gain)}."
        )

    def to_dict(self) -> dict[str, Any]:
        gain = asdict(self.gain) | {"verdict": verdict(self.gain)}
        rule = "highest class-balanced accuracy on validation data, the first of equals; the difference is on test data"
        return {
            "among": self.among,
            "new": _named(self.new),
            "published": _named(self.published),
            "gain": gain,
            "rule": rule,
        }


@dataclass(frozen=True)
class Grid:
    data: str
    fingerprint: str
    n: int
    worst_of: str  # what the figures are of
    wheres: tuple[Word, ...]
    whats: tuple[Word, ...]
    cells: tuple[Cell, ...]
    duels: tuple[Duel, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def at(self, where: Word, what: Word) -> Cell:
        return next(cell for cell in self.cells if (cell.where, cell.what) == (where, what))

    @property
    def filled(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.metrics is not None]

    @property
    def sentences(self) -> list[str]:
        return [duel.sentence for duel in self.duels]

    def table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        caption = (
            f"In %: {self.worst_of} of {self.n:,} test pictures, 95 % intervals, n behind each. * best on validation "
            "data, true masks out of the running; † a published pairing."
        )
        table = Table("", *(escape(word.short) for word in self.whats), box=None, pad_edge=False, caption=caption)
        table.caption_justify = "left"
        for column in table.columns:
            column.overflow = "fold"
        for where in self.wheres:
            table.add_row(escape(where.short), *(escape(self._text(self.at(where, what))) for what in self.whats))
        return table

    def _text(self, cell: Cell) -> str:
        figure = cell.figure
        if figure is None:
            return "–"
        signs = "*" * (cell is self.best) + "†" * (cell.published is not None)
        return f"{100 * figure.value:.1f}{signs} [{100 * figure.low:.1f}–{100 * figure.high:.1f}] n {figure.n:,}"

    @property
    def best(self) -> Cell | None:
        """On validation data; of those that are not told the truth, if there are any."""
        return best_of([cell for cell in self.filled if not cell.told_the_truth]) or best_of(self.filled)

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "fingerprint": self.fingerprint,
            "split": "test",
            "n": self.n,
            "figure": self.worst_of,
            "wheres": [str(word) for word in self.wheres],
            "whats": [str(word) for word in self.whats],
            "best": None if self.best is None else _named(self.best),
            "best_new_against_best_published": [duel.to_dict() for duel in self.duels],
            "scaling": [asdict(curve) for curve in self.curves],
            "notes": list(self.notes),
            "cells": [cell.to_dict() for cell in self.cells],
        }

    def draw(self, folder: Path) -> None:
        from .heatmap import Square, draw_heatmap, draw_scaling

        squares = [
            [
                Square(cell.figure, cell.published or "", best=cell is self.best, empty=cell.empty or "")
                for cell in (self.at(where, what) for what in self.whats)
            ]
            for where in self.wheres
        ]
        title = f"{self.data}, split test: {self.worst_of}, %, with 95 % intervals ({self.n:,} pictures)"
        draw_heatmap(
            squares, [word.short for word in self.wheres], [word.short for word in self.whats], title,
            folder / "matrix.png",
        )  # fmt: skip
        if self.curves:
            title = f"A² with {WHICHEVER}\n{self.data}: {self.worst_of} on test data"
            draw_scaling(self.curves, title, folder / "scaling.png")


def grid_of(cells: Sequence[Cell], wheres: Sequence[Word], whats: Sequence[Word], rows: Rows, config: Matrix) -> Grid:
    answered: dict[str, Predictions] = {}

    def gains(reference: Cell, others: Sequence[Cell]) -> list[Estimate]:
        """How far others are above, picture by picture, in what the figures are of."""
        for cell in (reference, *others):
            path = config.folder / "cells" / cell.folder / "predictions" / "test.csv"
            if cell.key not in answered:
                answered[cell.key] = Predictions.load_csv(path, split="test", group_names=tuple(rows.group_names))
        named = {cell.key: [answered[cell.key]] for cell in (reference, *others)}
        entries = compare(named, seed=config.seed).entries[1:]
        found = [entry.accuracy_gain if rows.groups is None else entry.worst_gain for entry in entries]
        return [gain for gain in found if gain is not None]

    filled = [cell for cell in cells if cell.metrics is not None]
    rivals = {
        "all pairings": filled,
        "pairings that are not told the truth": [c for c in filled if not c.told_the_truth],
    }
    if len(set(map(len, rivals.values()))) == 1:
        del rivals["pairings that are not told the truth"]
    duels = []
    for among, cells_among in rivals.items():
        new = best_of([cell for cell in cells_among if cell.published is None])
        published = best_of([cell for cell in cells_among if cell.published is not None])
        if new and published:
            duels.append(Duel(among, new, published, gains(published, [new])[0]))
    drawn, on_curves = curves(filled, gains)
    notes = [f"{cell.where.short}: {cell.note}" for cell in filled if cell.note]
    if len(filled) > 2:
        notes.append(f"the best are the best of {len(filled)} on validation data: what chance gave them, it gave there")
    if any(cell.what.kind.endswith("-dfr") for cell in filled):
        notes.append("DFR is fitted with group labels; its validation figure is of half of these data, fitted to half")
    return Grid(
        rows.name, fingerprint(rows), len(rows.where("test")),
        "accuracy" if rows.groups is None else "worst group",
        tuple(wheres), tuple(whats), tuple(cells), tuple(duels), tuple(drawn), (*dict.fromkeys(notes), *on_curves),
    )  # fmt: skip


def best_of(cells: Sequence[Cell]) -> Cell | None:
    """On validation data, the first of equals."""
    return max(cells, key=lambda cell: cell.validation or 0.0, default=None)


def _said(cell: Cell) -> str:
    assert cell.figure is not None
    name = f"{cell.name} ({cell.published})" if cell.published else cell.name
    return f"{name}, {cell.figure.figure}"


def _named(cell: Cell) -> dict[str, Any]:
    assert cell.figure is not None
    return {
        "where": str(cell.where), "what": str(cell.what), "published": cell.published, "way": cell.way,
        "validation": cell.validation, "test": asdict(cell.figure),
    }  # fmt: skip
