"""Several methods in one table: which differences are significant, paired on the same images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .estimates import Estimate, Metrics
from .groups import RESAMPLES, Cells, Subsets, evaluate_seeds
from .intervals import TAIL, Sample, gain_lower_bound, resample, sum_over_runs
from .predictions import Predictions, align_runs
from .tables import named_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class Entry:
    """One method, perhaps with several seeds, and its gain over the reference (None for the reference itself)."""

    name: str
    metrics: Metrics
    accuracy_gain: Estimate | None = None
    worst_gain: Estimate | None = None

    @property
    def worst(self) -> Estimate:
        return self.metrics.worst_group or self.metrics.worst_class


@dataclass(frozen=True)
class Comparison:
    reference: str
    worst_of: str  # "group", or "class" where there are no group labels
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    @property
    def has_background_gap(self) -> bool:
        return any(entry.metrics.background_gap for entry in self.entries)

    def rows(self) -> list[tuple[str, ...]]:
        """Name, accuracy and worst-group (or class) accuracy of every method, with intervals."""
        gap = self.has_background_gap
        return [
            (
                entry.name if entry.metrics.seeds == 1 else f"{entry.name} ({entry.metrics.seeds} seeds)",
                f"{entry.metrics.accuracy.value_text}  {entry.metrics.accuracy.interval}",
                f"{entry.worst.value_text}  {entry.worst.interval}",
                *([entry.metrics.background_gap.value_text if entry.metrics.background_gap else "–"] if gap else []),
                "" if entry.worst_gain is None else verdict(entry.worst_gain),
            )
            for entry in self.entries
        ]

    def table(self) -> Table | Text:
        """In short; at 80 columns nothing is cut off but the middle of very long names."""
        gap = ("background gap",) * self.has_background_gap
        columns = ("", "accuracy", f"worst {self.worst_of}", *gap, "verdict")
        return named_table(columns, self.rows())

    def gains_table(self) -> Table | Text:
        """The paired differences to the reference."""
        columns = ("difference", "accuracy", "", f"worst {self.worst_of}", "")
        rows = [
            (entry.name, *_gain_cells(entry.accuracy_gain), *_gain_cells(entry.worst_gain))
            for entry in self.entries
            if entry.worst_gain is not None
        ]
        how = max((entry.worst_gain.how for entry in self.entries if entry.worst_gain), key=len)
        caption = (
            f"The same {self.entries[0].metrics.n:,} images for all. Differences to {self.reference} in points: {how}."
        )
        return named_table(columns, rows, caption)

    @property
    def sentence(self) -> str:
        """Who wins, by worst-group (or worst-class) accuracy."""
        best = max(self.entries, key=lambda entry: entry.worst.value)
        kind = f"worst-{self.worst_of} accuracy"
        head = f"Highest {kind}: {best.name}, {best.worst.value_text} {best.worst.interval}"
        if best.worst_gain is None:  # the reference
            worse = [entry.name for entry in self.entries if entry.worst_gain and verdict(entry.worst_gain) == "worse"]
            open_ = [e.name for e in self.entries if e.worst_gain and verdict(e.worst_gain) == "undecided"]
            return (
                f"{head}; "
                + "; ".join(
                    [f"significantly more than {listed(worse)}"] * bool(worse)
                    + [f"the difference to {listed(open_)} is not significant"] * bool(open_)
                )
                + "."
            )
        gain = f"{best.worst_gain.value_text} {best.worst_gain.interval} against {self.reference}"
        return f"{head}; {gain}, {'significant' if verdict(best.worst_gain) == 'better' else 'not significant'}."

    def to_dict(self) -> dict[str, Any]:
        entries = [
            {
                "name": entry.name,
                "metrics": entry.metrics.to_dict(),
                "accuracy_gain": _gain_to_dict(entry.accuracy_gain),
                "worst_gain": _gain_to_dict(entry.worst_gain),
            }
            for entry in self.entries
        ]
        about = {"reference": self.reference, "worst_of": self.worst_of}
        return about | {"sentence": self.sentence, "entries": entries, "warnings": list(self.warnings)}


def verdict(gain: Estimate) -> str:
    """Whether the 95 % interval of a difference excludes 0."""
    if gain.low > 0:
        return "better"
    return "worse" if gain.high < 0 else "undecided"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1] if names else ""


def _gain_cells(gain: Estimate | None) -> tuple[str, str]:
    return (f"{100 * gain.value:+.1f} {gain.interval}", verdict(gain)) if gain else ("–", "")


def _gain_to_dict(gain: Estimate | None) -> dict[str, Any] | None:
    return asdict(gain) | {"verdict": verdict(gain)} if gain else None


def compare(
    named: Mapping[str, Sequence[Predictions]],
    *,
    reference: str | None = None,
    train_group_counts: Mapping[str, int] | None = None,
    comparisons: int | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Every method against the reference, by default the first, on the same images.

    A pair shares the resampled images; the seeds of each method are resampled independently. The intervals of the
    differences hold together at 95 %: their level is divided by the number of `comparisons` (Bonferroni), by default
    of those made here.
    """
    empty = [name for name, predictions in named.items() if not predictions]
    if empty:
        raise UserError(f"run {empty[0]!r} has no predictions to compare")
    if len(named) < 2:
        raise UserError("a single run cannot be compared: give at least two")
    reference = next(iter(named)) if reference is None else reference
    if reference not in named:
        raise UserError(f"no run {reference!r} to compare with: choose one of {', '.join(named)}")
    runs = _align_named(named)
    entries, tail = [], TAIL / (comparisons or len(runs) - 1)
    for name, predictions in runs.items():
        metrics = evaluate_seeds(predictions, train_group_counts=train_group_counts, seed=seed, resamples=resamples)
        gains = (None, None) if name == reference else paired_gains(predictions, runs[reference], resamples, seed, tail)
        entries.append(Entry(name, metrics, *gains))
    worst_of = "class" if entries[0].metrics.worst_group is None else "group"
    return Comparison(reference, worst_of, tuple(entries), tuple(_warnings(entries)))


def _align_named(named: Mapping[str, Sequence[Predictions]]) -> dict[str, list[Predictions]]:
    titled = [
        (name, f"{name} (seed {number})" if len(predictions) > 1 else name, run)
        for name, predictions in named.items()
        for number, run in enumerate(predictions, 1)
    ]
    runs: dict[str, list[Predictions]] = {name: [] for name in named}
    for (name, _, _), run in zip(titled, align_runs([(title, run) for _, title, run in titled]), strict=True):
        runs[name].append(run)
    return runs


def paired_gains(
    ours: Sequence[Predictions], theirs: Sequence[Predictions], resamples: int, seed: int, tail: float = TAIL
) -> tuple[Estimate, Estimate]:
    """The differences in accuracy and in worst-group (or worst-class) accuracy, of runs on the same images."""
    first, cells = ours[0], Cells.of(ours[0])
    correct = [np.stack([run.correct for run in block], axis=1) for block in (ours, theirs)]
    samples = resample(correct, cells.of_image, resamples, seed)
    how = f"paired bootstrap over images within {'classes' if first.groups is None else 'groups'}"
    how += " and over seeds" if len(ours) + len(theirs) > 2 else ""
    how += f", corrected for {round(TAIL / tail)} comparisons" if tail < TAIL else ""
    subsets = cells.worst_of(first, "class" if first.groups is None else "group")
    return _accuracy_gain(*samples, cells, how, tail), _worst_gain(*samples, subsets, len(first), how, tail)


def _accuracy_gain(ours: Sample, theirs: Sample, cells: Cells, how: str, tail: float) -> Estimate:
    n = int(cells.sizes.sum())
    (our_value, our_draws), (their_value, their_draws) = (s.weighted_mean(cells.sizes / n) for s in (ours, theirs))
    draws = sum_over_runs([(1.0, our_draws, ours.runs), (-1.0, their_draws, theirs.runs)])
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(our_value.mean() - their_value.mean(), low, high, n, how, difference=True)


def _worst_gain(ours: Sample, theirs: Sample, subsets: Subsets, n: int, how: str, tail: float) -> Estimate:
    our_values, our_draws = ours.subset_accuracies(subsets.weights)
    their_values, their_draws = theirs.subset_accuracies(subsets.weights)
    value = our_values.min(axis=1).mean() - their_values.min(axis=1).mean()
    low = gain_lower_bound(our_draws, ours.runs, their_draws, theirs.runs, tail)
    high = -gain_lower_bound(their_draws, theirs.runs, our_draws, ours.runs, tail)
    how += "; both minima are biased low, and the interval allows for each that could be the worst"
    return Estimate(value, low, high, n, how, difference=True)


def _warnings(entries: Sequence[Entry]) -> Iterator[str]:
    """Each once; those that are not of all methods name theirs."""
    for warning in dict.fromkeys(warning for entry in entries for warning in entry.metrics.warnings):
        own = [entry.name for entry in entries if warning in entry.metrics.warnings]
        yield warning if len(own) == len(entries) else f"{listed(own)}: {warning}"
    if len(entries) > 2:
        yield f"the intervals of the {len(entries) - 1} differences are corrected for their number (Bonferroni)"
    if single := [entry.name for entry in entries if entry.metrics.seeds == 1]:
        yield f"one training of {listed(single)}: intervals allow for other images, not for training again"
