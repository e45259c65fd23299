"""The grid of all cells: as a table, as a image, and what is best in it."""

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
from .scaling import CURVE_NOTE, Curve, curves
from .words import Spec

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class BestComparison:
    """The best new pair against the best published one: both selected on validation data, compared on test data."""

    among: str
    new: Cell
    published: Cell
    gain: Estimate

    @property
    def sentence(self) -> str:
        kind = "new" if best_cell((self.published, self.new)) is self.new else "published"
        return (
            f"Among {self.among}, a {kind} pair is best on validation data. On test data, best new pair "
            f"({_describe(self.new)}) minus best published pair ({_describe(self.published)}): {self.gain.value_text} "
            f"{self.gain.interval} (n = {self.gain.n:,}), {verdict(self.gain)}."
        )

    def to_dict(self) -> dict[str, Any]:
        gain = asdict(self.gain) | {"verdict": verdict(self.gain)}
        rule = "highest class-balanced accuracy on validation data, the first of equals; the difference is on test data"
        return {
            "among": self.among,
            "new": _cell_facts(self.new),
            "published": _cell_facts(self.published),
            "gain": gain,
            "rule": rule,
        }


@dataclass(frozen=True)
class Grid:
    data: str
    fingerprint: str
    n: int
    metric: str  # the metric of the table
    wheres: tuple[Spec, ...]
    whats: tuple[Spec, ...]
    cells: tuple[Cell, ...]
    comparisons: tuple[BestComparison, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def at(self, where: Spec, what: Spec) -> Cell:
        return next(cell for cell in self.cells if (cell.where, cell.what) == (where, what))

    @property
    def filled(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.metrics is not None]

    @property
    def sentences(self) -> list[str]:
        return [duel.sentence for duel in self.comparisons]

    def table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        caption = (
            f"{self.metric.capitalize()} in % on {self.n:,} test images, with 95 % intervals and n. * best on "
            "validation data, excluding true masks; † published pair."
        )
        table = Table("", *(escape(spec.short) for spec in self.whats), box=None, pad_edge=False, caption=caption)
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
        return f"{100 * figure.value:.1f}{signs} [{100 * figure.low:.1f}–{100 * figure.high:.1f}] n={figure.n:,}"

    @property
    def best(self) -> Cell | None:
        """The best cell on validation data, of those without true masks if there are any."""
        return best_cell([cell for cell in self.filled if not cell.uses_true_masks]) or best_cell(self.filled)

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "fingerprint": self.fingerprint,
            "split": "test",
            "n": self.n,
            "figure": self.metric,
            "wheres": [str(spec) for spec in self.wheres],
            "whats": [str(spec) for spec in self.whats],
            "best": None if self.best is None else _cell_facts(self.best),
            "best_new_against_best_published": [duel.to_dict() for duel in self.comparisons],
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
        title = f"{self.data}, split test: {self.metric} in %, with 95 % intervals ({self.n:,} images)"
        draw_heatmap(
            squares, [spec.short for spec in self.wheres], [spec.short for spec in self.whats], title,
            folder / "matrix.png",
        )  # fmt: skip
        if self.curves:
            title = f"A² with {CURVE_NOTE}\n{self.data}: {self.metric} on test data"
            draw_scaling(self.curves, title, folder / "scaling.png")


def build_grid(
    cells: Sequence[Cell], wheres: Sequence[Spec], whats: Sequence[Spec], rows: Rows, config: Matrix
) -> Grid:
    loaded: dict[str, Predictions] = {}

    def gains(reference: Cell, others: Sequence[Cell]) -> list[Estimate]:
        """Paired differences of other cells to the reference, in the metric of the table."""
        for cell in (reference, *others):
            path = config.folder / "cells" / cell.folder / "predictions" / "test.csv"
            if cell.key not in loaded:
                loaded[cell.key] = Predictions.load_csv(path, split="test", group_names=tuple(rows.group_names))
        named = {cell.key: [loaded[cell.key]] for cell in (reference, *others)}
        entries = compare(named, seed=config.seed).entries[1:]
        found = [entry.accuracy_gain if rows.groups is None else entry.worst_gain for entry in entries]
        return [gain for gain in found if gain is not None]

    filled = [cell for cell in cells if cell.metrics is not None]
    candidates = {"all pairs": filled}
    if any(cell.uses_true_masks for cell in filled):
        candidates["pairs without true masks"] = [cell for cell in filled if not cell.uses_true_masks]
    comparisons = []
    for among, cells_among in candidates.items():
        new = best_cell([cell for cell in cells_among if cell.published is None])
        published = best_cell([cell for cell in cells_among if cell.published is not None])
        if new and published:
            comparisons.append(BestComparison(among, new, published, gains(published, [new])[0]))
    drawn, on_curves = curves(filled, gains)
    notes = [f"{cell.where.short}: {cell.note}" for cell in filled if cell.note]
    if len(filled) > 2:
        notes.append(f"the best of {len(filled)} cells on validation data: their validation accuracy is optimistic")
    if any(cell.what.kind.endswith("-dfr") for cell in filled):
        notes.append(
            "DFR uses group labels; its validation accuracy is that of a fit to one half of val on the other half"
        )
    return Grid(
        rows.name, fingerprint(rows), len(rows.split_indices("test")),
        "accuracy" if rows.groups is None else "worst-group accuracy",
        tuple(wheres), tuple(whats), tuple(cells), tuple(comparisons), tuple(drawn),
        (*dict.fromkeys(notes), *on_curves),
    )  # fmt: skip


def best_cell(cells: Sequence[Cell]) -> Cell | None:
    """The highest validation accuracy; the first of ties."""
    return max(cells, key=lambda cell: cell.validation or 0.0, default=None)


def _describe(cell: Cell) -> str:
    assert cell.figure is not None
    name = f"{cell.name} ({cell.published})" if cell.published else cell.name
    return f"{name}, {cell.figure.value_text}"


def _cell_facts(cell: Cell) -> dict[str, Any]:
    assert cell.figure is not None
    return {
        "where": str(cell.where), "what": str(cell.what), "published": cell.published, "way": cell.way,
        "validation": cell.validation, "test": asdict(cell.figure),
    }  # fmt: skip
