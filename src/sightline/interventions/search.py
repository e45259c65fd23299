"""The search for an intervention on validation data: part removal and token removal, added one step at a time.

Greedy: of all next steps the best is taken while it improves the objective significantly, that is while the lower bound
of its gain, bootstrapped on the same images before and after, is above 0. The bound is one-sided at 5 % divided by the
number of steps tried (Bonferroni), so that on pure noise the search takes a first step in at most one of twenty cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.groups import Cells, Subsets, score
from ..metrics.intervals import TAIL, gain_lower_bound, resample, resample_auc
from ..metrics.predictions import Predictions
from .file import Intervention

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_COLUMNS = 6
ANY_WIDTH = 10_000  # of a console that no table is too wide for
LEVEL = 0.05
RESAMPLES = 10_000  # so that 5 % divided by dozens of steps still covers several resamples
DISPLAY_RESAMPLES = 2000  # for intervals that are shown but decide nothing
OBJECTIVE_LABELS = {"worst-group": "worst-group accuracy", "worst-class": "worst-class accuracy", "auc": "AUROC"}

Predict = Callable[[Sequence[Intervention]], list[Predictions]]


@dataclass(frozen=True)
class Trial:
    """One step from where the search stands, and what it changes."""

    intervention: Intervention
    step: str  # what it adds, in words
    score: float
    gain: Estimate
    classes: dict[str, Estimate]  # differences
    groups: dict[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        values = {"step": self.step, "drop": list(self.intervention.drop), "quantile": self.intervention.quantile}
        cells = {name: {k: asdict(e) for k, e in getattr(self, name).items()} for name in ("classes", "groups")}
        return values | {"score": self.score, "gain": asdict(self.gain)} | cells


@dataclass(frozen=True)
class Step:
    """The best of the steps tried in one round."""

    step: str
    before: float
    after: float
    least_gain: float  # the corrected lower bound
    tried: int
    taken: bool


@dataclass(frozen=True)
class Suspect:
    """A part whose removal improves some group significantly, though not the objective."""

    step: str
    part: int
    group: str
    gain: Estimate
    at_a_cost_to: str  # the group that loses most
    cost: Estimate

    @property
    def sentence(self) -> str:
        cost = f", while {self.at_a_cost_to} changes by {_points(self.cost)}" if self.cost.value < 0 else ""
        return (
            f"{_capitalize(self.step)}, {self.group} improves significantly (corrected for all parts and groups): "
            f"{_points(self.gain)} points{cost}. If that part should not count, remove it with --drop {self.part}."
        )


@dataclass(frozen=True)
class Search:
    objective: str
    split: str
    n: int
    before: float
    trials: tuple[Trial, ...]  # of the first round: every part removed, every quantile
    steps: tuple[Step, ...]
    chosen: Intervention
    gain: Estimate | None  # of the chosen intervention over none; None: nothing was chosen
    suspect: Suspect | None = None  # only if nothing was chosen

    @property
    def sentence(self) -> str:
        label = OBJECTIVE_LABELS[self.objective]
        if self.gain is not None:
            least = min(step.least_gain for step in self.steps if step.taken)
            return (
                f"{_capitalize(self.chosen.description)}: validation {label} {_points(self.gain)} points, from "
                f"{100 * self.before:.1f} % (n = {self.n:,}). Every step has a corrected lower bound of at least "
                f"{100 * least:+.1f} points. It was selected on these images: expect a smaller gain on others."
            )
        if not self.steps:
            return "No intervention is possible: there is no part to remove."
        last = self.steps[-1]
        nothing = (
            f"No intervention improves validation {label} significantly (best of {last.tried}: "
            f"{100 * (last.after - last.before):+.1f}, corrected lower bound {100 * last.least_gain:+.1f})."
        )
        return nothing if self.suspect is None else f"{nothing} {self.suspect.sentence}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "split": self.split,
            "n": self.n,
            "before": self.before,
            "rule": f"one-sided {LEVEL:.0%}, divided by the steps tried; {RESAMPLES:,} draws",
            "trials": [trial.to_dict() for trial in self.trials],
            "steps": [asdict(step) for step in self.steps],
            "gain": None if self.gain is None else asdict(self.gain),
            "suspect": None if self.suspect is None else asdict(self.suspect) | {"sentence": self.suspect.sentence},
        }


def resolve_objective(predictions: Predictions, given: str | None) -> str:
    """The given objective; by default worst-group accuracy, or worst-class accuracy without group labels."""
    objective = given or ("worst-class" if predictions.groups is None else "worst-group")
    if objective not in OBJECTIVE_LABELS:
        raise UserError(f"--objective {objective}: choose one of {', '.join(OBJECTIVE_LABELS)}")
    score(predictions, objective)  # raises if it is not available
    return objective


def search(
    predict: Predict,
    parts: int,
    thresholds: Mapping[float, tuple[float, ...]],
    *,
    objective: str | None = None,
    names: Mapping[int, str] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Search:
    """`predict` gives validation predictions under several interventions; `thresholds` are distances by quantile."""
    current = Intervention(names=names or {})
    options = next_interventions(current, parts, thresholds)
    now, *others = predict([current, *options.values()])
    first, objective = now, resolve_objective(now, objective)
    trials = tuple(
        _trial(step, option, predictions, now, objective, seed)
        for (step, option), predictions in zip(options.items(), others, strict=True)
    )
    suspect = find_suspect(trials, others, now)
    steps: list[Step] = []
    while options:
        scores = [score(predictions, objective) for predictions in others]
        best = int(np.argmax(scores))
        least = gain_bound(others[best], now, objective, LEVEL / len(options), resamples, seed)
        steps.append(Step([*options][best], score(now, objective), scores[best], least, len(options), least > 0))
        if not steps[-1].taken:
            break
        current, now = [*options.values()][best], others[best]
        options = next_interventions(current, parts, thresholds)
        others = predict([*options.values()]) if options else []
    gain = gain_estimate(now, first, objective, seed) if current.changes else None
    suspect = suspect if gain is None else None
    return Search(objective, now.split, len(now), score(first, objective), trials, tuple(steps), current, gain, suspect)


def next_interventions(
    current: Intervention, parts: int, thresholds: Mapping[float, tuple[float, ...]]
) -> dict[str, Intervention]:
    """By step: one more part removed, never the last or a forced one; or token removal, if there is none yet."""
    left = [part for part in range(parts) if part not in current.drop]
    left = left if len(left) > 1 else []
    steps = {
        f"without {current.part_name(k)}": replace(current, drop=(*current.drop, k))
        for k in left
        if k not in current.force
    }
    if current.quantile is None:
        for q, distances in thresholds.items():
            steps[f"quantile {q:g}"] = replace(current, quantile=q, thresholds=distances)
    return steps


# ---- significance ----------------------------------------------------------------------------------------------------


def gain_bound(
    ours: Predictions, theirs: Predictions, objective: str, tail: float, resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """The one-sided lower bound of the gain of `ours` over `theirs` on the same images."""
    return _lower_bound(*_draws(ours, theirs, objective, resamples, seed), tail)


def gain_estimate(ours: Predictions, theirs: Predictions, objective: str, seed: int = 0) -> Estimate:
    """The gain with its 95 % interval, not corrected for the number of steps tried."""
    first, second = _draws(ours, theirs, objective, DISPLAY_RESAMPLES, seed)
    how = "DeLong's covariance, paired" if objective == "auc" else "paired bootstrap over images, of minima"
    value = score(ours, objective) - score(theirs, objective)
    low, high = _lower_bound(first, second, TAIL), -_lower_bound(second, first, TAIL)
    return Estimate(value, low, high, len(ours), how, difference=True)


def find_suspect(trials: Sequence[Trial], every: Sequence[Predictions], before: Predictions) -> Suspect | None:
    """Of the parts whose removal improves a group significantly (exact sign test on the predictions that change,
    one-sided, 5 % divided by parts times groups), the one with the largest gain. Needs group labels: classes trade
    errors whatever is removed."""
    from scipy.stats import binom

    parts = [(trial, after) for trial, after in zip(trials, every, strict=True) if trial.intervention.drop]
    suspects: list[Suspect] = []
    for trial, after in parts if before.groups is not None else ():
        for number, group in enumerate(before.group_names):
            members = before.groups == number
            won = (after.correct & ~before.correct)[members].sum()
            lost = (before.correct & ~after.correct)[members].sum()
            if binom.sf(won - 1, won + lost, 0.5) * len(parts) * len(before.group_names) < LEVEL:
                worst = min(trial.groups, key=lambda name: trial.groups[name].value)
                (part,) = trial.intervention.drop
                suspects.append(Suspect(trial.step, part, group, trial.groups[group], worst, trial.groups[worst]))
    return max(suspects, key=lambda suspect: suspect.gain.value, default=None)


def _draws(
    ours: Predictions, theirs: Predictions, objective: str, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R, k] twice: the metrics whose minimum is the objective, of the same resampled images."""
    if objective == "auc":
        margins, positive = np.stack([ours.margins, theirs.margins]), ours.labels == 1
        _, drawn = resample_auc([margins[:, positive]], [margins[:, ~positive]], resamples, seed)
        return drawn[:, 0, 0], drawn[:, 1, 0]
    cells, subsets = _cells(ours, objective)
    samples = resample([p.correct[:, None] for p in (ours, theirs)], cells.of_image, resamples, seed)
    first, second = (sample.subset_accuracies(subsets.weights)[1][:, 0] for sample in samples)
    return first, second


def _lower_bound(first: np.ndarray, second: np.ndarray, tail: float) -> float:
    """Of min(first) - min(second), of draws [R, k] of one run each."""
    once = np.ones((len(first), 1))
    return gain_lower_bound(first[:, None], once, second[:, None], once, tail)


def _cells(predictions: Predictions, objective: str) -> tuple[Cells, Subsets]:
    cells = Cells.of(predictions)
    return cells, cells.worst_of(predictions, "group" if objective == "worst-group" else "class")


def _trial(step: str, option: Intervention, ours: Predictions, theirs: Predictions, objective: str, seed: int) -> Trial:
    classes = accuracy_differences(ours, theirs, "worst-class", seed)
    groups = {} if ours.groups is None else accuracy_differences(ours, theirs, "worst-group", seed)
    gain = gain_estimate(ours, theirs, objective, seed)
    return Trial(option, step, score(ours, objective), gain, classes, groups)


def accuracy_differences(ours: Predictions, theirs: Predictions, objective: str, seed: int = 0) -> dict[str, Estimate]:
    """The difference in accuracy in every class, or group, with a 95 % interval."""
    cells, subsets = _cells(ours, objective)
    correct = [predictions.correct[:, None] for predictions in (ours, theirs)]
    first, second = resample(correct, cells.of_image, DISPLAY_RESAMPLES, seed)
    (value, drawn), (other, others) = (sample.subset_accuracies(subsets.weights) for sample in (first, second))
    value, drawn = (value - other)[0], (drawn - others)[:, 0]
    centre = ((first.centre - second.centre) @ subsets.weights.T)[0]
    lows, highs = np.quantile(drawn + (value - centre), [TAIL, 1 - TAIL], axis=0)
    rows = zip(subsets.names, value, lows, highs, subsets.sizes.tolist(), strict=True)
    how = "paired bootstrap over images"
    return {name: Estimate(v, low, high, n, how, difference=True) for name, v, low, high, n in rows}


# ---- the table -------------------------------------------------------------------------------------------------------


def search_table(measured: Mapping[str, Any], console: Console) -> Table:
    """Every part removed and every quantile, with the change in each group, or class, of the validation data. Where
    that is too wide: without the intervals of the groups; only the largest gain and the largest loss; or both."""
    trials = measured["trials"]
    kind = "groups" if trials and trials[0]["groups"] else "classes"
    cells = [*trials[0][kind]] if trials else []
    every = [cells] if len(cells) <= MOST_COLUMNS else []
    shapes = [(shown, intervals) for shown in [*every, []] for intervals in (True, False)]
    options = console.options.update(max_width=ANY_WIDTH)
    for shown, intervals in shapes:
        table = _table(measured, kind, shown, intervals=intervals)
        if console.measure(table, options=options).maximum <= console.width:
            break
    table.caption = _caption(measured, intervals=intervals)
    return table


def _table(measured: Mapping[str, Any], kind: str, shown: Sequence[str], *, intervals: bool) -> Table:
    from rich.markup import escape
    from rich.table import Column, Table

    def change(one: Estimate) -> str:
        return _points(one) if intervals else f"{100 * one.value:+.1f}"

    label = _capitalize(OBJECTIVE_LABELS[measured["objective"]].removesuffix(" accuracy"))
    names = ["", label, "Gain", *map(escape, shown or ["Largest gain", "Largest loss"])]
    table = Table(*(Column(name, overflow="fold") for name in names), box=None, pad_edge=False)
    table.caption_justify = "left"
    for trial in measured["trials"]:
        gain = Estimate(**trial["gain"])
        by_cell = {name: Estimate(**estimate) for name, estimate in trial[kind].items()}
        order = sorted(by_cell, key=lambda name: by_cell[name].value, reverse=True)
        extremes = [] if shown else [f"{escape(name)} {change(by_cell[name])}" for name in (order[0], order[-1])]
        columns = extremes or [change(by_cell[name]) for name in shown]
        table.add_row(escape(trial["step"]), f"{100 * trial['score']:.1f} %", _points(gain), *columns)
    return table


def _caption(measured: Mapping[str, Any], *, intervals: bool) -> str:
    label = OBJECTIVE_LABELS[measured["objective"]]
    others = "" if intervals else " The intervals of the others are on the page with images."
    return (
        f"Differences in points, with 95 % intervals, from {100 * measured['before']:.1f} % {label} as trained; "
        f"split {measured['split']!r} of {measured['data']}, n = {measured['n']:,}.{others}"
    )


def _points(gain: Estimate) -> str:
    return f"{100 * gain.value:+.1f} {gain.interval}"


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]
