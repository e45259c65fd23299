"""How A² scales: as the backbone that looks grows with the one that answers fixed, and the other way round.

As in the paper (fig. 6 and 7): the gain over the smallest model, against parameters. What is fixed is the largest
backbone that answers, and the smallest that looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..metrics.estimates import Estimate
from .cells import Cell
from .words import Word, attention_of

Gains = Callable[[Cell, Sequence[Cell]], list[Estimate]]
KINDS = ("crop-probe", "crop-dfr", "crop-zero-shot")
WHICHEVER = "whatever backbones were given, pretrained alike or not"


@dataclass(frozen=True)
class Point:
    name: str
    parameters: int
    gain: Estimate | None  # none for the smallest, which the others are measured against


@dataclass(frozen=True)
class Curve:
    """One side grows, the other is fixed."""

    grows: Literal["where", "what"]
    fixed: str
    kind: str  # of what answers
    points: tuple[Point, ...]  # the smallest first


def curves(filled: Sequence[Cell], gains: Gains) -> tuple[list[Curve], list[str]]:
    """Every curve that has two sizes; and notes: on what they join, and where there is none."""
    found: list[Curve] = []
    of_attention = [cell for cell in filled if cell.where.kind == "attention" and cell.what.kind in KINDS]
    for kind in dict.fromkeys(cell.what.kind for cell in of_attention):
        cells = [cell for cell in of_attention if cell.what.kind == kind]
        largest = max(cells, key=lambda cell: cell.parameters["what"] or 0).what
        smallest = min(cells, key=lambda cell: cell.parameters["where"] or 0).where
        growing: dict[Literal["where", "what"], tuple[Word, list[list[Cell]]]] = {
            "where": (largest, alike([cell for cell in cells if cell.what == largest])),
            "what": (smallest, [[cell for cell in cells if cell.where == smallest]]),
        }
        for side, (fixed, families) in growing.items():
            found += [curve(side, fixed, kind, family, gains) for family in families if sizes(family, side) > 1]
    missing = [side for side in ("where", "what") if of_attention and all(one.grows != side for one in found)]
    notes = [f"the curves of how A² scales join {WHICHEVER}"] if found else []
    notes += [f"no curve of how A² scales with the {side}: that takes backbones of two sizes" for side in missing]
    return found, notes


def alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """By block and heads, which a curve does not mix: the last of each are what the paper has."""
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(attention_of(cell.where.of)[1:], []).append(cell)
    return list(found.values())


def sizes(cells: Sequence[Cell], side: str) -> int:
    return len({cell.parameters[side] for cell in cells})


def curve(side: Literal["where", "what"], fixed: Word, kind: str, cells: Sequence[Cell], gains: Gains) -> Curve:
    first, *others = sorted(cells, key=lambda cell: cell.parameters[side] or 0)
    measured = [None, *gains(first, others)]
    points = [
        Point(getattr(cell, side).short.partition(":")[2], cell.parameters[side] or 0, gain)
        for cell, gain in zip((first, *others), measured, strict=True)
    ]
    return Curve(side, fixed.short, kind, tuple(points))
