"""Where several backbones look: tables for the terminal and lines for a CSV file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..metrics.estimates import Estimate

if TYPE_CHECKING:
    from rich.table import Table

Truth = Literal["masks", "boxes"]
LEVELS = ("patches", "pixels")
FIGURES = {
    "mass": "mass inside",
    "hit": "peak inside",
    "entropy": "entropy (uniform: 100)",
    "top10": "mass of the top 10 %",
    "top25": "mass of the top 25 %",
}
ATTENTION_TARGETS = ("patches", "registers", "CLS")


@dataclass(frozen=True)
class Attention:
    """Agreement with the ground truth of one attention map: one block, with its heads combined in one way."""

    layer: int  # from 0
    heads: str
    levels: dict[str, dict[str, Estimate]]  # "patches" and "pixels": each of FIGURES


@dataclass(frozen=True)
class BackboneAttention:
    """The figures of one backbone."""

    name: str
    parameters: int  # without a head
    blocks: int
    size: tuple[int, int]  # of its images
    patch: int
    attention: tuple[Attention, ...]
    shares: tuple[dict[str, Estimate], ...]  # per block: of CLS's attention, each of PLACES
    even: dict[str, dict[str, Estimate]]  # of a uniform map, whose peak is a random position

    @property
    def short(self) -> str:
        """Of a weights file, the folder and file name."""
        return "/".join(Path(self.name).parts[-2:]).removesuffix(".safetensors")

    def layer(self, index: int) -> str:
        return f"{index} ({index - self.blocks})"


@dataclass(frozen=True)
class BackboneComparison:
    """Several backbones on the same images."""

    data: str
    fingerprint: str
    split: str
    n: int
    truth: Truth
    backbones: tuple[BackboneAttention, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[dict[str, Any]]:
        """One line per figure, for a CSV file."""
        lines = []
        for seen in self.backbones:
            found: list[tuple[int | str, str, str, dict[str, Estimate]]] = [
                (one.layer, one.heads, level, some) for one in seen.attention for level, some in one.levels.items()
            ]
            found += [("", "even", level, some) for level, some in seen.even.items()]
            found += [(layer, "mean", "share of CLS's attention", some) for layer, some in enumerate(seen.shares)]
            for layer, heads, level, some in found:
                about = {"backbone": seen.name, "parameters": seen.parameters, "layer": layer, "heads": heads}
                for figure, one in some.items():
                    figures = {"value": one.value, "low": one.low, "high": one.high, "n": one.n}
                    lines.append(about | {"level": level, "figure": figure} | figures)
        return lines

    def table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            "backbone", "layer", "heads", "level", *FIGURES.values(), "n", box=None, pad_edge=False,
            caption="In %, with 95 % intervals by bootstrap over images. Layers are counted from 0 (from the end).",
        )  # fmt: skip
        table.caption_justify = "left"
        for column in table.columns:
            column.overflow = "fold"

        def add(name: str, layer: str, heads: str, levels: Mapping[str, Mapping[str, Estimate]]) -> None:
            for level, found in levels.items():
                cells = [_cell(found[figure]) for figure in FIGURES]
                table.add_row(escape(name), layer, heads, level, *cells, f"{found['mass'].n:,}")

        for even, alike in groupby(self.backbones, lambda seen: seen.even):
            for seen in alike:
                for one in seen.attention:
                    add(seen.short, seen.layer(one.layer), one.heads, one.levels)
            add("uniform map", "–", "–", even)
        return table

    def table_of_shares(self) -> Table:
        """For the requested blocks; the files have all blocks."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            "attention of CLS", "layer", *(f"on {place}" for place in ATTENTION_TARGETS), "n", box=None, pad_edge=False
        )
        for seen in self.backbones:
            for layer in sorted({one.layer for one in seen.attention}):
                shares = seen.shares[layer]
                cells = [_cell(shares[place]) for place in ATTENTION_TARGETS]
                table.add_row(escape(seen.short), seen.layer(layer), *cells, f"{shares['CLS'].n:,}")
        return table


def _cell(one: Estimate) -> str:
    """Without a space inside the interval, so that a narrow terminal breaks before it, and with an escaped bracket."""
    return rf"{100 * one.value:.1f} \[{100 * one.low:.1f}–{100 * one.high:.1f}]"
