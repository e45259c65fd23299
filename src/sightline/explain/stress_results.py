"""What tests of explanations have found: tables for people, JSON for the report, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..metrics.estimates import Estimate
from .perturbation import DIRECTIONS, RANDOM, SHARES, Curve, in_words
from .segmentation import FIGURES
from .sufficient_subsets import Subsets

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Stressed:
    """What was found; what was not asked for, or could not be, is empty."""

    data: str
    split: str
    n: int
    accuracy: Estimate | None = None
    curves: tuple[Curve, ...] = ()
    subsets: Subsets | None = None
    neighbours: dict[str, Estimate] = field(default_factory=dict)  # accuracy, by how many
    masks: dict[str, dict[str, Estimate]] = field(default_factory=dict)  # by map, each of FIGURES
    masks_from: str = ""  # in words, where those are not the data's own
    notes: tuple[str, ...] = ()  # each begins with the test that it is about

    @property
    def sentences(self) -> list[str]:
        found = [in_words(self.curves), self.subsets.sentence if self.subsets else ""]
        return [sentence for sentence in found if sentence]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shares": list(SHARES), "sentences": self.sentences}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stressed:
        def one(read: Mapping[str, Any] | None) -> Estimate | None:
            return None if read is None else Estimate(**read)

        curves = [
            Curve(**(c | {k: one(c[k]) for k in ("mean", "trapezoid", "unchanged", "gain")})
                  | {"accuracy": tuple(Estimate(**each) for each in c["accuracy"])})
            for c in values["curves"]
        ]  # fmt: skip
        said = values["subsets"]
        ends = ("reached", "size", "own_reached", "own_size")
        subsets = None if said is None else Subsets(**(said | {name: one(said[name]) for name in ends}))
        neighbours = {name: Estimate(**each) for name, each in values["neighbours"].items()}
        masks = {m: {name: Estimate(**each) for name, each in some.items()} for m, some in values["masks"].items()}
        about = {name: values[name] for name in ("data", "split", "n")}
        notes, masks_from = tuple(values["notes"]), values.get("masks_from", "")
        return cls(**about, accuracy=one(values["accuracy"]), curves=tuple(curves), subsets=subsets,
                   neighbours=neighbours, masks=masks, masks_from=masks_from, notes=notes)  # fmt: skip

    def tables(self) -> Iterator[Table]:
        """Maps while pixels turn black, maps against masks, and the rest; with 95 % intervals over pictures."""
        from rich.markup import escape
        from rich.table import Table

        if self.curves:
            means = [f"{first} relevant pixels black first: accuracy" for first in ("most", "least")]
            table = Table("", means[0], "below random by", means[1], "above random by", box=None, pad_edge=False)
            for name in dict.fromkeys(curve.map for curve in self.curves):
                pair = [curve for curve in self.curves if curve.map == name]
                table.add_row(name, *(cell(one) for curve in pair for one in (curve.mean, curve.gain)))
            yield table
        if self.masks:
            against = escape(f"held against masks {self.masks_from}".strip())
            table = Table(against, *FIGURES.values(), box=None, pad_edge=False)
            for name, some in self.masks.items():
                table.add_row(name, *map(cell, some.values()))
            yield table
        if rest := self.rest():
            table = Table("", "value", "n", box=None, pad_edge=False)
            for label, one in rest:
                table.add_row(label, cell(one), f"{one.n:,}")
            yield table

    def rest(self) -> list[tuple[str, Estimate]]:
        rows = [("accuracy, whole pictures", self.accuracy)]
        if (said := self.subsets) is not None:
            rows += [("sufficient pixels for a random label: found", said.reached), ("  share of pixels", said.size)]
            rows += [
                ("sufficient pixels for its own answer: found", said.own_reached),
                ("  share of pixels", said.own_size),
            ]
        rows += [(f"nearest neighbours, {name}: accuracy", one) for name, one in self.neighbours.items()]
        return [(label, one) for label, one in rows if one is not None]


def cell(one: Estimate | None) -> str:
    """The bracket is no markup."""
    return "–" if one is None else rf"{one.figure} \[{one.interval[1:]}"


def draw(found: Stressed, path: Path) -> None:
    """Accuracy against the share of black pixels, the most relevant first and the least relevant first."""
    from .plots import figure_class

    figure = figure_class()(figsize=(10, 4.6), layout="constrained")
    titles = {"positive": "most relevant pixels first", "negative": "least relevant pixels first"}
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        for curve in [curve for curve in found.curves if curve.direction == direction]:
            values, lows, highs = ([100 * getattr(e, end) for e in curve.accuracy] for end in ("value", "low", "high"))
            x, chance = [100 * share for share in SHARES], curve.map == RANDOM
            (line,) = axes.plot(x, values, ":" if chance else "-", color="black" if chance else None, label=curve.map)
            axes.fill_between(x, lows, highs, color=line.get_color(), alpha=0.08)
        axes.set(title=titles[direction], xlabel="black pixels, %", ylim=(0, 100))
    figure.axes[0].set_ylabel("accuracy, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{found.data}, split {found.split}: {found.n:,} pictures; shaded: 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=120)
