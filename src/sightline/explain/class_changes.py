"""Per-class accuracy before and after a change of the model: which classes improve, and which get worse."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..console.files import save_figure
from ..console.printable import from_cell
from ..errors import UserError
from ..metrics.estimates import Estimate
from .estimates import bootstrap_mean

MAX_CLASSES = 30  # in the figure: the most improved and the most worsened


@dataclass(frozen=True)
class LabelledPredictions:
    """Labels and predicted classes of images, all by name."""

    images: list[str]
    labels: list[str]
    predicted: list[str]

    @property
    def correct(self) -> np.ndarray:
        return np.array(self.predicted) == np.array(self.labels)


def read_predictions(path: Path) -> LabelledPredictions:
    """From a predictions file, with or without probabilities."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = list(csv.DictReader(file))
        return LabelledPredictions(
            *([from_cell(line[name]) for line in lines] for name in ("image", "label", "predicted"))
        )
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}); create it with `sightline evaluate`") from error


def read_pair(before: Path, after: Path) -> tuple[LabelledPredictions, LabelledPredictions]:
    """Two predictions files for the same images, in the same order."""
    first = read_predictions(before)
    return first, align_images(first, read_predictions(after), before.stem)


def align_images(reference: LabelledPredictions, other: LabelledPredictions, name: str) -> LabelledPredictions:
    """`other` in the order of `reference`; an error if images or labels differ."""
    at = {image: i for i, image in enumerate(other.images)}
    if set(at) != set(reference.images) or len(other.images) != len(reference.images):
        raise UserError(f"{name}: the runs were evaluated on different images; evaluate them again")
    order = [at[image] for image in reference.images]
    columns = (other.images, other.labels, other.predicted)
    aligned = LabelledPredictions(*([column[i] for i in order] for column in columns))
    if aligned.labels != reference.labels:
        raise UserError(f"{name}: the runs were evaluated with different labels; evaluate them again")
    return aligned


@dataclass(frozen=True)
class ClassChange:
    label: str
    before: float
    after: float
    gain: Estimate  # on the same images


def class_changes(before: LabelledPredictions, after: LabelledPredictions) -> list[ClassChange]:
    """The change in accuracy of every class, largest loss first; both on the same images in the same order."""
    labels, changes = np.array(before.labels), []
    for label in np.unique(labels):
        own = labels == label
        first, second = (predictions.correct[own].astype(np.float64) for predictions in (before, after))
        changes.append(ClassChange(str(label), first.mean(), second.mean(), bootstrap_mean(second, first)))
    return sorted(changes, key=lambda change: (change.gain.value, change.label))


def changes_summary(changes: Sequence[ClassChange]) -> str:
    """How many classes improve or get worse, and how many significantly, without correction for multiple tests."""
    better, worse = (sum(sign * change.gain.value > 0 for change in changes) for sign in (1, -1))
    significant = [sum(c.gain.low > 0 for c in changes), sum(c.gain.high < 0 for c in changes)]
    return (
        f"Of {len(changes):,} classes, {better:,} improve ({significant[0]:,} significantly) and {worse:,} get worse "
        f"({significant[1]:,} significantly), each at the 95 % level without correction for multiple comparisons."
    )


def draw_changes(by_name: Mapping[str, Sequence[ClassChange]], path: Path, title: str) -> None:
    """A panel per data set with the classes whose accuracy changed, sorted, at most so many from either end."""
    from ..datasets.imagenet import imagenet_classes
    from .plots import figure_class

    class_names = imagenet_classes()  # ImageNet labels are WordNet numbers
    tallest = max(min(len(changes), MAX_CLASSES) for changes in by_name.values())
    figure = figure_class()(figsize=(4.6 * len(by_name), max(2.5, 0.22 * tallest + 1.4)), layout="constrained")
    panels = figure.subplots(1, len(by_name), squeeze=False)[0]
    for axes, (name, changes) in zip(panels, by_name.items(), strict=True):
        shown = [change for change in changes if change.gain.value] or list(changes)
        if len(shown) > MAX_CLASSES:
            shown = shown[: MAX_CLASSES // 2] + shown[-MAX_CLASSES // 2 :]
        values = [100 * change.gain.value for change in shown]
        ends = [[100 * (c.gain.value - c.gain.low) for c in shown], [100 * (c.gain.high - c.gain.value) for c in shown]]
        colours = ["tab:red" if value < 0 else "tab:green" if value > 0 else "tab:grey" for value in values]
        axes.barh(range(len(shown)), values, xerr=ends, color=colours, ecolor="0.5", height=0.75)
        labels = [f"{class_names.get(c.label, c.label)} (n = {c.gain.n:,})" for c in shown]
        axes.set_yticks(range(len(shown)), labels, fontsize=7)
        axes.axvline(0, color="black", linewidth=0.8)
        hidden = len(changes) - len(shown)
        more = f"\n{hidden:,} classes with smaller or no changes not shown" if hidden else ""
        axes.set_title(f"{name}: change in accuracy, points{more}", fontsize=8)
    figure.suptitle(title, fontsize=9)
    save_figure(path, figure)
