"""Scaling of A²: with the size of the selector's backbone at a fixed predictor, and the other way round.

As in the paper (fig. 6 and 7): the gain over the smallest model, against parameters. Fixed is the largest backbone of
the predictor, or the smallest of the selector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..metrics.estimates import Estimate
from .cells import Cell
from .words import Spec, parse_attention

GainFunction = Callable[[Cell, Sequence[Cell]], list[Estimate]]
KINDS = ("crop-probe", "crop-dfr", "crop-zero-shot")
CURVE_NOTE = "all given backbones, whatever their pretraining"


@dataclass(frozen=True)
class Point:
    name: str
    parameters: int
    gain: Estimate | None  # None for the smallest, which is the reference


@dataclass(frozen=True)
class Curve:
    """One side grows while the other is fixed."""

    grows: Literal["where", "what"]
    fixed: str
    kind: str  # of the predictor
    points: tuple[Point, ...]  # smallest first


def curves(filled: Sequence[Cell], gains: GainFunction) -> tuple[list[Curve], list[str]]:
    """Every curve with at least two sizes; and notes about what they join and which are missing."""
    found: list[Curve] = []
    of_attention = [cell for cell in filled if cell.where.kind == "attention" and cell.what.kind in KINDS]
    for kind in dict.fromkeys(cell.what.kind for cell in of_attention):
        cells = [cell for cell in of_attention if cell.what.kind == kind]
        largest = max(cells, key=lambda cell: cell.parameters["what"] or 0).what
        smallest = min(cells, key=lambda cell: cell.parameters["where"] or 0).where
        growing: dict[Literal["where", "what"], tuple[Spec, list[list[Cell]]]] = {
            "where": (largest, by_layer_and_heads([cell for cell in cells if cell.what == largest])),
            "what": (smallest, [[cell for cell in cells if cell.where == smallest]]),
        }
        for side, (fixed, families) in growing.items():
            found += [curve(side, fixed, kind, family, gains) for family in families if sizes(family, side) > 1]
    missing = [side for side in ("where", "what") if of_attention and all(one.grows != side for one in found)]
    notes = [f"the scaling curves of A² join {CURVE_NOTE}"] if found else []
    notes += [f"no scaling curve of A² over the {side}: it needs backbones of two sizes" for side in missing]
    return found, notes


def by_layer_and_heads(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Grouped by block and heads, which a curve does not mix; the paper has the last block."""
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(parse_attention(cell.where.of)[1:], []).append(cell)
    return list(found.values())


def sizes(cells: Sequence[Cell], side: str) -> int:
    return len({cell.parameters[side] for cell in cells})


def curve(side: Literal["where", "what"], fixed: Spec, kind: str, cells: Sequence[Cell], gains: GainFunction) -> Curve:
    first, *others = sorted(cells, key=lambda cell: cell.parameters[side] or 0)
    measured = [None, *gains(first, others)]
    points = [
        Point(getattr(cell, side).short.partition(":")[2], cell.parameters[side] or 0, gain)
        for cell, gain in zip((first, *others), measured, strict=True)
    ]
    return Curve(side, fixed.short, kind, tuple(points))
