"""Results of the tests of explanations: tables for the terminal, JSON for the report, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..metrics.estimates import Estimate
from .perturbation import DIRECTIONS, RANDOM, SHARES, Curve, faithfulness_summary
from .segmentation import FIGURES
from .sufficient_subsets import Subsets

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class StressResults:
    """Fields of tests that were not requested, or could not be run, are empty."""

    data: str
    split: str
    n: int
    accuracy: Estimate | None = None
    curves: tuple[Curve, ...] = ()
    subsets: Subsets | None = None
    neighbours: dict[str, Estimate] = field(default_factory=dict)  # k-NN accuracy by number of neighbours
    masks: dict[str, dict[str, Estimate]] = field(default_factory=dict)  # by map, each of FIGURES
    masks_from: str = ""  # where the masks come from, if they are not the data's own
    notes: tuple[str, ...] = ()  # each begins with the test that it is about

    @property
    def sentences(self) -> list[str]:
        found = [faithfulness_summary(self.curves), self.subsets.sentence if self.subsets else ""]
        return [sentence for sentence in found if sentence]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shares": list(SHARES), "sentences": self.sentences}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StressResults:
        def estimate(read: Mapping[str, Any] | None) -> Estimate | None:
            return None if read is None else Estimate(**read)

        curves = [
            Curve(**(c | {k: estimate(c[k]) for k in ("mean", "trapezoid", "unchanged", "gain")})
                  | {"accuracy": tuple(Estimate(**one) for one in c["accuracy"])})
            for c in values["curves"]
        ]  # fmt: skip
        stored = values["subsets"]
        names = ("reached", "size", "own_reached", "own_size")
        subsets = None if stored is None else Subsets(**(stored | {name: estimate(stored[name]) for name in names}))
        neighbours = {name: Estimate(**one) for name, one in values["neighbours"].items()}
        masks = {m: {name: Estimate(**one) for name, one in some.items()} for m, some in values["masks"].items()}
        about = {name: values[name] for name in ("data", "split", "n")}
        notes, masks_from = tuple(values["notes"]), values.get("masks_from", "")
        return cls(**about, accuracy=estimate(values["accuracy"]), curves=tuple(curves), subsets=subsets,
                   neighbours=neighbours, masks=masks, masks_from=masks_from, notes=notes)  # fmt: skip

    def tables(self) -> Iterator[Table]:
        """Perturbation curves, segmentation, and the rest; with 95 % intervals over images."""
        from rich.markup import escape
        from rich.table import Table

        if self.curves:
            means = [f"{first} relevant pixels blackened first: mean accuracy" for first in ("most", "least")]
            table = Table("map", means[0], "below random by", means[1], "above random by", box=None, pad_edge=False)
            for name in dict.fromkeys(curve.map for curve in self.curves):
                pair = [curve for curve in self.curves if curve.map == name]
                table.add_row(escape(name), *(table_cell(one) for curve in pair for one in (curve.mean, curve.gain)))
            yield table
        if self.masks:
            against = escape(f"map against masks {self.masks_from}" if self.masks_from else "map against true masks")
            table = Table(against, *FIGURES.values(), box=None, pad_edge=False)
            for name, some in self.masks.items():
                table.add_row(escape(name), *map(table_cell, some.values()))
            yield table
        if rest := self.other_rows():
            table = Table("", "value", "n", box=None, pad_edge=False)
            for label, one in rest:
                table.add_row(escape(label), table_cell(one), f"{one.n:,}")
            yield table

    def other_rows(self) -> list[tuple[str, Estimate]]:
        rows = [("accuracy on intact images", self.accuracy)]
        if (subsets := self.subsets) is not None:
            rows += [
                ("sufficient subset for a random label: found", subsets.reached),
                ("  share of pixels", subsets.size),
                ("sufficient subset for the predicted label: found", subsets.own_reached),
                ("  share of pixels", subsets.own_size),
            ]
        names = {name: name.replace("pictures", "images") for name in self.neighbours}  # in files of earlier versions
        rows += [(f"nearest neighbours, {names[key]}: accuracy", one) for key, one in self.neighbours.items()]
        return [(label, one) for label, one in rows if one is not None]


def table_cell(estimate: Estimate | None) -> str:
    """With an escaped bracket, which would otherwise be markup."""
    return "–" if estimate is None else rf"{estimate.value_text} \[{estimate.interval[1:]}"


def draw_curves(results: StressResults, path: Path) -> None:
    """Accuracy against the share of blackened pixels, most relevant first and least relevant first."""
    from ..console.files import save_figure
    from .plots import figure_class

    figure = figure_class()(figsize=(10, 4.6), layout="constrained")
    titles = {"positive": "most relevant pixels first", "negative": "least relevant pixels first"}
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        for curve in [curve for curve in results.curves if curve.direction == direction]:
            values, lows, highs = ([100 * getattr(e, end) for e in curve.accuracy] for end in ("value", "low", "high"))
            x, random = [100 * share for share in SHARES], curve.map == RANDOM
            (line,) = axes.plot(x, values, ":" if random else "-", color="black" if random else None, label=curve.map)
            axes.fill_between(x, lows, highs, color=line.get_color(), alpha=0.08)
        axes.set(title=titles[direction], xlabel="blackened pixels, %", ylim=(0, 100))
    figure.axes[0].set_ylabel("accuracy, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    title = f"{results.data}, split {results.split}: {results.n:,} images; shaded: 95 % intervals"
    figure.suptitle(title, fontsize=10)
    save_figure(path, figure)
