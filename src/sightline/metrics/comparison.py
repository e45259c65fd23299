"""Several runs in one table: which differences are more than chance, on the same images, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .estimates import Estimate, Metrics
from .groups import RESAMPLES, Cells, Parts, across_seeds
from .intervals import TAIL, Sample, least_gain, over_runs, resample
from .predictions import Predictions, aligned

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Entry:
    """One method, perhaps with several seeds, and how far it is above the reference (None for the reference)."""

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
    worst_of: str  # "group", or "class" where no groups are known
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    @property
    def header(self) -> tuple[str, ...]:
        gains = f"accuracy − {self.reference}", "", f"worst {self.worst_of} − {self.reference}", ""
        gap = ("background gap",) if self.has_background_gap else ()
        return "", "seeds", "accuracy", f"worst {self.worst_of}", *gap, *gains

    @property
    def has_background_gap(self) -> bool:
        return any(entry.metrics.background_gap for entry in self.entries)

    def rows(self) -> list[tuple[str, ...]]:
        """One per method, under `header`."""
        return [
            (
                entry.name,
                str(entry.metrics.seeds),
                *(f"{e.figure}  {e.interval}" for e in (entry.metrics.accuracy, entry.worst)),
                *([str(entry.metrics.background_gap or "–")] if self.has_background_gap else []),
                *_gain(entry.accuracy_gain),
                *_gain(entry.worst_gain),
            )
            for entry in self.entries
        ]

    def table(self) -> Table:
        from rich.table import Column, Table

        longest = max((entry.worst_gain.how for entry in self.entries if entry.worst_gain), key=len)
        caption = f"The same {self.entries[0].metrics.n:,} images for all. Differences: {longest}."
        header = [Column(name, overflow="fold") for name in self.header]  # names may share their beginning
        table = Table(*header, box=None, pad_edge=False, caption=caption)
        table.caption_justify = "left"
        for row in self.rows():
            table.add_row(*row)
        return table

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
        return about | {"entries": entries, "warnings": list(self.warnings)}


def verdict(gain: Estimate) -> str:
    if gain.low > 0:
        return "better"
    return "worse" if gain.high < 0 else "undecided"


def _gain(gain: Estimate | None) -> tuple[str, str]:
    return (f"{gain.figure}  {gain.interval}", verdict(gain)) if gain else ("–", "")


def _gain_to_dict(gain: Estimate | None) -> dict[str, Any] | None:
    return asdict(gain) | {"verdict": verdict(gain)} if gain else None


def compare(
    named: Mapping[str, Sequence[Predictions]],
    *,
    reference: str | None = None,
    train_group_counts: Mapping[str, int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Every method against the reference, by default the first, on the images that all of them answered.

    The images are drawn once for both of a pair, the seeds of each for itself.
    """
    empty = [name for name, answers in named.items() if not answers]
    if empty:
        raise UserError(f"the run {empty[0]!r} has no answers to compare")
    if len(named) < 2:
        raise UserError("one run alone cannot be compared: name at least two")
    reference = next(iter(named)) if reference is None else reference
    if reference not in named:
        raise UserError(f"there is no run {reference!r} to compare with: choose one of {', '.join(named)}")
    runs = _on_the_same_images(named)
    entries = []
    for name, answers in runs.items():
        metrics = across_seeds(answers, train_group_counts=train_group_counts, seed=seed, resamples=resamples)
        gains = (None, None) if name == reference else _gains(answers, runs[reference], resamples, seed)
        entries.append(Entry(name, metrics, *gains))
    worst_of = "class" if entries[0].metrics.worst_group is None else "group"
    return Comparison(reference, worst_of, tuple(entries), tuple(_warnings(entries)))


def _on_the_same_images(named: Mapping[str, Sequence[Predictions]]) -> dict[str, list[Predictions]]:
    titled = [
        (name, f"{name} (seed {number})" if len(answers) > 1 else name, run)
        for name, answers in named.items()
        for number, run in enumerate(answers, 1)
    ]
    runs: dict[str, list[Predictions]] = {name: [] for name in named}
    for (name, _, _), run in zip(titled, aligned([(title, run) for _, title, run in titled]), strict=True):
        runs[name].append(run)
    return runs


def _gains(
    answers: Sequence[Predictions], others: Sequence[Predictions], resamples: int, seed: int
) -> tuple[Estimate, Estimate]:
    first, cells = answers[0], Cells.of(answers[0])
    correct = [np.stack([run.correct for run in block], axis=1) for block in (answers, others)]
    ours, theirs = resample(correct, cells.of_image, resamples, seed)
    how = f"paired bootstrap over images within {'classes' if first.groups is None else 'groups'}"
    how += " and over seeds" if len(answers) + len(others) > 2 else ""
    if first.groups is None:
        parts = cells.parts(cells.labels, first.classes)
    else:
        parts = cells.parts(cells.groups, first.group_names)
    return _accuracy_gain(ours, theirs, cells, how), _worst_gain(ours, theirs, parts, len(first), how)


def _accuracy_gain(ours: Sample, theirs: Sample, cells: Cells, how: str) -> Estimate:
    n = int(cells.sizes.sum())
    (our_value, our_draws), (their_value, their_draws) = (s.averages(cells.sizes / n) for s in (ours, theirs))
    draws = over_runs(our_draws, ours.runs) - over_runs(their_draws, theirs.runs)
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Estimate(our_value.mean() - their_value.mean(), low, high, n, how, difference=True)


def _worst_gain(ours: Sample, theirs: Sample, parts: Parts, n: int, how: str) -> Estimate:
    (our_values, our_draws), (their_values, their_draws) = (s.parts(parts.shares) for s in (ours, theirs))
    value = our_values.min(axis=1).mean() - their_values.min(axis=1).mean()
    low = least_gain(our_draws, ours.runs, their_draws, theirs.runs)
    high = -least_gain(their_draws, theirs.runs, our_draws, ours.runs)
    how += "; both minima are biased low, and the interval allows for each that could be the worst"
    return Estimate(value, low, high, n, how, difference=True)


def _warnings(entries: Sequence[Entry]) -> Iterator[str]:
    yield from dict.fromkeys(warning for entry in entries for warning in entry.metrics.warnings)
    if len(entries) > 2:
        yield f"{len(entries) - 1} methods are compared, each at 95 %: one verdict in twenty may be chance"
