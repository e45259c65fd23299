"""Which intervention helps? Parts dropped and doubtful patches removed, one at a time, on validation data.

Greedy: of all next steps the best one is taken, while it surely helps: while the low end of its gain, drawn on the same
images before and after, lies above 0. That is one-sided, at 5 % divided by the number of steps tried (Bonferroni), so
that on pure noise the search takes its first step in at most one of twenty cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.groups import Cells, Parts, score
from ..metrics.intervals import TAIL, areas, resample
from ..metrics.predictions import Predictions
from .file import Intervention

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_COLUMNS = 6
ANY_WIDTH = 10_000  # of a screen that no table is too wide for
LEVEL = 0.05
RESAMPLES = 10_000  # so many that a twentieth, divided by dozens of steps, is still made of several draws
BRIEFLY = 2000  # for what is shown, but decides nothing
WORDS = {"worst-group": "worst group", "worst-class": "worst class", "auc": "AUC"}  # objectives

AnswersTo = Callable[[Sequence[Intervention]], list[Predictions]]


@dataclass(frozen=True)
class Trial:
    """One step from where the search stands, and what it changes."""

    intervention: Intervention
    step: str  # in words: what it adds
    score: float
    gain: Estimate
    classes: dict[str, Estimate]  # differences
    groups: dict[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        said = {"step": self.step, "drop": list(self.intervention.drop), "quantile": self.intervention.quantile}
        cells = {name: {k: asdict(e) for k, e in getattr(self, name).items()} for name in ("classes", "groups")}
        return said | {"score": self.score, "gain": asdict(self.gain)} | cells


@dataclass(frozen=True)
class Step:
    """The best of the steps tried in a round."""

    step: str
    before: float
    after: float
    least_gain: float  # the corrected low end
    tried: int
    taken: bool


@dataclass(frozen=True)
class Suspect:
    """A part without which some group surely gains, though it is not the one that the search is for."""

    step: str
    part: int
    group: str
    gain: Estimate
    at_a_cost_to: str  # the group that loses most
    cost: Estimate

    @property
    def sentence(self) -> str:
        paid = f", and {self.at_a_cost_to} changes by {_points(self.cost)}" if self.cost.value < 0 else ""
        return (
            f"{self.step[0].upper()}{self.step[1:]}, {self.group} surely gains, allowing for all parts and groups: "
            f"{_points(self.gain)} points{paid}. Look at what it shows; if that should not count, leave it out: --drop "
            f"{self.part}."
        )


@dataclass(frozen=True)
class Search:
    objective: str
    split: str
    n: int
    before: float
    trials: tuple[Trial, ...]  # of the first round: every part left out, every quantile
    steps: tuple[Step, ...]
    chosen: Intervention
    gain: Estimate | None  # of what was chosen over no change
    suspect: Suspect | None = None  # looked for where nothing was chosen

    @property
    def sentence(self) -> str:
        last = self.steps[-1] if self.steps else None
        if self.gain is not None:
            least = min(step.least_gain for step in self.steps if step.taken)
            return (
                f"{self.chosen.words[0].upper()}{self.chosen.words[1:]}: {self.gain} of the {WORDS[self.objective]}, "
                f"from {100 * self.before:.1f} %. Each step gains at least {100 * least:.1f} points, allowing for all "
                "that were tried. Chosen on these pictures: expect less on others."
            )
        if last is None:
            return "There is nothing to leave out."
        nothing = (
            f"Nothing surely helps: the best of {last.tried}, {last.step}, gains "
            f"{100 * (last.after - last.before):+.1f} points of the {WORDS[self.objective]}, and that may be chance "
            f"(at least {100 * last.least_gain:+.1f}, allowing for all that were tried). It is not kept."
        )
        more = "" if self.suspect is None else self.suspect.sentence
        return f"{nothing} But {more[0].lower()}{more[1:]}" if more else nothing

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


def objective_of(answers: Predictions, said: str | None) -> str:
    """The worst group where there are groups, otherwise the worst class; or what is said."""
    objective = said or ("worst-class" if answers.groups is None else "worst-group")
    if objective not in WORDS:
        raise UserError(f"--objective {objective}: choose one of {', '.join(WORDS)}")
    score(answers, objective)  # or it says why that cannot be measured
    return objective


def search(
    answers_to: AnswersTo,
    parts: int,
    thresholds: Mapping[float, tuple[float, ...]],
    *,
    objective: str | None = None,
    names: Mapping[int, str] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Search:
    """`answers_to` answers the validation data under several interventions; `thresholds` are by quantile."""
    current = Intervention(names=names or {})
    options = next_steps(current, parts, thresholds)
    now, *others = answers_to([current, *options.values()])
    first, objective = now, objective_of(now, objective)
    trials = tuple(
        _trial(step, option, answers, now, objective, seed)
        for (step, option), answers in zip(options.items(), others, strict=True)
    )
    suspect = suspected(trials, others, now)
    taken: list[Step] = []
    while options:
        scores = [score(answers, objective) for answers in others]
        best = int(np.argmax(scores))
        least = least_gain(others[best], now, objective, LEVEL / len(options), resamples, seed)
        step = Step([*options][best], score(now, objective), scores[best], least, len(options), least > 0)
        taken.append(step)
        if not step.taken:
            break
        current, now = [*options.values()][best], others[best]
        options = next_steps(current, parts, thresholds)
        others = answers_to([*options.values()]) if options else []
    gain = gained(now, first, objective, seed) if current.changes else None
    suspect = suspect if gain is None else None
    return Search(objective, now.split, len(now), score(first, objective), trials, tuple(taken), current, gain, suspect)


def next_steps(
    current: Intervention, parts: int, thresholds: Mapping[float, tuple[float, ...]]
) -> dict[str, Intervention]:
    """One more part left out, though never the last one or a forced one; or one quantile, if there is none yet."""
    left = [part for part in range(parts) if part not in current.drop]
    left = left if len(left) > 1 else []
    steps = {
        f"without {current.part(k)}": replace(current, drop=(*current.drop, k)) for k in left if k not in current.force
    }
    if current.quantile is None:
        for q, distances in thresholds.items():
            steps[f"quantile {q:g}"] = replace(current, quantile=q, thresholds=distances)
    return steps


# ---- is it more than chance? -----------------------------------------------------------------------------------------


def least_gain(
    ours: Predictions, theirs: Predictions, objective: str, tail: float, resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """The low end, one-sided, of how far `ours` are above `theirs` on the same images."""
    return _least(*_drawn(ours, theirs, objective, resamples, seed), tail)


def gained(ours: Predictions, theirs: Predictions, objective: str, seed: int = 0) -> Estimate:
    """The gain with its 95 % interval, not corrected for anything."""
    first, second = _drawn(ours, theirs, objective, BRIEFLY, seed)
    how = "DeLong's covariance, paired" if objective == "auc" else "paired bootstrap over images, of minima"
    value = score(ours, objective) - score(theirs, objective)
    return Estimate(value, _least(first, second, TAIL), -_least(second, first, TAIL), len(ours), how, difference=True)


def suspected(trials: Sequence[Trial], every: Sequence[Predictions], before: Predictions) -> Suspect | None:
    """Of parts without which a group surely gains (exact sign test on answers that change, one-sided, 5 % divided by
    parts times groups), the one with the largest gain. Classes trade errors whatever is left out: groups are needed."""
    from scipy.stats import binom

    parts = [(trial, after) for trial, after in zip(trials, every, strict=True) if trial.intervention.drop]
    found: list[Suspect] = []
    for trial, after in parts if before.groups is not None else ():
        for number, group in enumerate(before.group_names):
            here = before.groups == number
            won, lost = ((after.correct & ~before.correct)[here].sum(), (before.correct & ~after.correct)[here].sum())
            if binom.sf(won - 1, won + lost, 0.5) * len(parts) * len(before.group_names) < LEVEL:
                worst = min(trial.groups, key=lambda name: trial.groups[name].value)
                (part,) = trial.intervention.drop
                found.append(Suspect(trial.step, part, group, trial.groups[group], worst, trial.groups[worst]))
    return max(found, key=lambda one: one.gain.value, default=None)


def _drawn(
    ours: Predictions, theirs: Predictions, objective: str, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R, k] twice: the figures of which the lowest counts, drawn on the same images."""
    if objective == "auc":
        margins, positive = np.stack([ours.margins, theirs.margins]), ours.labels == 1
        _, drawn = areas([margins[:, positive]], [margins[:, ~positive]], resamples, seed)
        return drawn[:, 0, 0], drawn[:, 1, 0]
    cells, parts = _cells(ours, objective)
    correct = [answers.correct[:, None] for answers in (ours, theirs)]
    first, second = (s.parts(parts.shares)[1][:, 0] for s in resample(correct, cells.of_image, resamples, seed))
    return first, second


def _least(first: np.ndarray, second: np.ndarray, tail: float) -> float:
    """A gain of minima is the largest of min(first) - second, over all of the second that could be the lowest, so that
    the level is divided by how many these are, too (as in `compare`)."""
    lows, highs = np.quantile(second, [tail, 1 - tail], axis=0)
    rivals = np.flatnonzero(lows <= highs.min())
    gains = first.min(axis=1)[:, None] - second[:, rivals]
    return float(np.quantile(gains, tail / len(rivals), axis=0).max())


def _cells(answers: Predictions, objective: str) -> tuple[Cells, Parts]:
    cells = Cells.of(answers)
    if objective == "worst-group":
        return cells, cells.parts(cells.groups, answers.group_names)
    return cells, cells.parts(cells.labels, answers.classes)


def _trial(step: str, option: Intervention, ours: Predictions, theirs: Predictions, objective: str, seed: int) -> Trial:
    by = ("worst-class",) if ours.groups is None else ("worst-class", "worst-group")
    found = [differences(ours, theirs, kind, seed) for kind in by]
    gain = gained(ours, theirs, objective, seed)
    return Trial(option, step, score(ours, objective), gain, found[0], found[1] if len(found) > 1 else {})


def differences(ours: Predictions, theirs: Predictions, by: str, seed: int = 0) -> dict[str, Estimate]:
    """In every class, or group: how much more is right, with a 95 % interval."""
    cells, parts = _cells(ours, by)
    correct = [answers.correct[:, None] for answers in (ours, theirs)]
    first, second = resample(correct, cells.of_image, BRIEFLY, seed)
    (value, drawn), (other, others) = first.parts(parts.shares), second.parts(parts.shares)
    value, drawn = (value - other)[0], (drawn - others)[:, 0]
    centre = ((first.centre - second.centre) @ parts.shares.T)[0]
    lows, highs = np.quantile(drawn + (value - centre), [TAIL, 1 - TAIL], axis=0)
    every = zip(parts.names, value, lows, highs, parts.sizes.tolist(), strict=True)
    how = "paired bootstrap over images"
    return {name: Estimate(v, low, high, n, how, difference=True) for name, v, low, high, n in every}


def table(measured: Mapping[str, Any], console: Console) -> Table:
    """Every part left out, and every quantile: what that does to each group, or class, of the validation data; where
    these are many, or the console is too narrow for them, to the one that gains most and the one that loses most."""
    trials = measured["trials"]
    kind = "groups" if trials and trials[0]["groups"] else "classes"
    cells = [*trials[0][kind]] if trials else []
    if len(cells) <= MOST_COLUMNS:
        made = _table(measured, kind, cells)
        if console.measure(made, options=console.options.update(max_width=ANY_WIDTH)).minimum <= console.width:
            return made
    return _table(measured, kind, [])


def _table(measured: Mapping[str, Any], kind: str, shown: Sequence[str]) -> Table:
    from rich.markup import escape
    from rich.table import Column, Table

    what = WORDS[measured["objective"]]
    caption = (
        f"Differences in points, with 95 % intervals, to {100 * measured['before']:.1f} % of the {what} as trained; "
        f"{measured['split']!r} data of {measured['data']}, n {measured['n']:,}."
    )
    names = ["", what, "gain", *map(escape, shown or ["most gained", "most lost"])]
    header = [Column(name, overflow="fold") for name in names]
    made = Table(*header, box=None, pad_edge=False, caption=caption)
    made.caption_justify = "left"
    for trial in measured["trials"]:
        gain, by = Estimate(**trial["gain"]), {name: Estimate(**one) for name, one in trial[kind].items()}
        order = sorted(by, key=lambda name: by[name].value, reverse=True)
        named = [] if shown else [f"{escape(name)} {_points(by[name])}" for name in (order[0], order[-1])]
        columns = named or [_points(by[name]) for name in shown]
        made.add_row(escape(trial["step"]), f"{100 * trial['score']:.1f} %", _points(gain), *columns)
    return made


def _points(gain: Estimate) -> str:
    return f"{100 * gain.value:+.1f} {gain.interval}"
