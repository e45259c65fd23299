"""Before and after: which classes a change of the model has helped, and which it has harmed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..metrics.estimates import Estimate
from .perturbation import mean_over

MOST_NAMED = 30  # classes that are named in the picture: the most helped and the most harmed


@dataclass(frozen=True)
class Seen:
    """Answers to pictures, by name."""

    images: list[str]
    labels: list[str]
    predicted: list[str]

    @property
    def correct(self) -> np.ndarray:
        return np.array(self.predicted) == np.array(self.labels)


def seen_in(path: Path) -> Seen:
    """From a file of answers; probabilities need not be in it."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = list(csv.DictReader(file))
        return Seen(*([line[name] for line in lines] for name in ("image", "label", "predicted")))
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}); make it with `sightline evaluate`") from error


def both(before: Path, after: Path) -> tuple[Seen, Seen]:
    """The same pictures, as two files have them."""
    first = seen_in(before)
    return first, in_order_of(first, seen_in(after), before.stem)


def in_order_of(reference: Seen, other: Seen, name: str) -> Seen:
    """The same pictures in the same order, or it is said that they are not the same."""
    at = {image: i for i, image in enumerate(other.images)}
    if set(at) != set(reference.images) or len(other.images) != len(reference.images):
        raise UserError(f"{name}: the runs have not answered the same pictures; evaluate them again")
    order = [at[image] for image in reference.images]
    moved = Seen(*([column[i] for i in order] for column in (other.images, other.labels, other.predicted)))
    if moved.labels != reference.labels:
        raise UserError(f"{name}: the same pictures have other labels in one of the runs; evaluate them again")
    return moved


@dataclass(frozen=True)
class Change:
    label: str
    before: float
    after: float
    gain: Estimate  # on the same pictures


def class_changes(before: Seen, after: Seen) -> list[Change]:
    """Of every class, the most harmed first; both have answered the same pictures in the same order."""
    labels, found = np.array(before.labels), []
    for label in np.unique(labels):
        mine = labels == label
        one, other = (some.correct[mine].astype(np.float64) for some in (before, after))
        found.append(Change(str(label), one.mean(), other.mean(), mean_over(other, one)))
    return sorted(found, key=lambda change: (change.gain.value, change.label))


def in_words(changes: Sequence[Change]) -> str:
    """How many classes changed at all, and how many surely, chance allowed for one by one."""
    helped, harmed = (sum(sign * change.gain.value > 0 for change in changes) for sign in (1, -1))
    sure = [sum(1 for c in changes if c.gain.low > 0), sum(1 for c in changes if c.gain.high < 0)]
    return (
        f"Of {len(changes):,} classes {helped:,} are helped ({sure[0]:,} surely) and {harmed:,} harmed ({sure[1]:,} "
        "surely), each at 95 % by itself."
    )


def draw_changes(named: Mapping[str, Sequence[Change]], path: Path, title: str) -> None:
    """A panel per data set: every class that changed, sorted, at most so many at either end."""
    from ..datasets.imagenet import imagenet_classes
    from .plots import figure_class

    called = imagenet_classes()  # who is called by a number there
    tallest = max(min(len(changes), MOST_NAMED) for changes in named.values())
    figure = figure_class()(figsize=(4.6 * len(named), max(2.5, 0.22 * tallest + 1.4)), layout="constrained")
    for axes, (name, changes) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items(), strict=True):
        few = [change for change in changes if change.gain.value] or list(changes)
        if len(few) > MOST_NAMED:
            few = few[: MOST_NAMED // 2] + few[-MOST_NAMED // 2 :]
        values = [100 * change.gain.value for change in few]
        ends = [[100 * (c.gain.value - c.gain.low) for c in few], [100 * (c.gain.high - c.gain.value) for c in few]]
        colours = ["tab:red" if value < 0 else "tab:green" if value > 0 else "tab:grey" for value in values]
        axes.barh(range(len(few)), values, xerr=ends, color=colours, ecolor="0.5", height=0.75)
        axes.set_yticks(range(len(few)), [f"{called.get(c.label, c.label)} (n {c.gain.n:,})" for c in few], fontsize=7)
        axes.axvline(0, color="black", linewidth=0.8)
        left = len(changes) - len(few)
        more = f"\n{left:,} that changed less, or not at all, are not shown" if left else ""
        axes.set_title(f"{name}: accuracy after − before, points{more}", fontsize=8)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
