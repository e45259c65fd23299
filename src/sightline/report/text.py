"""A report's figures in plain words."""

from __future__ import annotations

from ..explain.background_swaps import Swaps
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import evaluate

CONDITIONS = {
    "original": "as they are",
    "same": "background of the same kind",
    "random": "background of any kind",
    "other": "background of another kind",
    "foreground": "foreground alone",
    "background": "background alone",
}


def percent(estimate: Estimate) -> str:
    """Without decimals, unless that would make nearly all look like all; with the interval."""
    digits = 0 if 0.01 < estimate.value < 0.99 else 1
    value, low, high = (f"{100 * x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} % [{low}, {high}]"


def share(estimate: Estimate) -> str:
    """Of the time, with the interval behind it."""
    value, _, interval = percent(estimate).partition(" [")
    return f"{value} of the time [{interval}"


def points(gain: Estimate) -> tuple[str, str]:
    """A difference, and its interval."""
    return minus(f"{100 * gain.value:+.1f}"), minus(gain.interval)


def minus(text: str) -> str:
    return text.replace("-", "−")


def cells_of(metrics: Metrics) -> tuple[str, dict[str, Estimate]]:
    """Groups where there are any, or else classes, and what they are called."""
    return ("group", metrics.groups) if metrics.groups else ("class", metrics.classes)


def headline(metrics: Metrics) -> str:
    """Where it fails first, then where it is easy."""
    kind, cells = cells_of(metrics)
    worst = metrics.worst_group or metrics.worst_class
    best = max(cells, key=lambda name: (cells[name].value, cells[name].n))
    if len(cells) == 1:
        return f"It is right {share(metrics.accuracy)}; all pictures are of one {kind}, {best}."
    if worst.high < cells[best].low:
        return f"On {worst.of} it is right {share(worst)}; on the easiest {kind}, {best}, {percent(cells[best])}."
    return (
        f"On the worst {kind}, {worst.of}, it is right {share(worst)}; on the best, {best}, {percent(cells[best])}: "
        "the difference may be chance."
    )


def overall(metrics: Metrics, split: str) -> str:
    return f"Over all {metrics.n:,} pictures of the {split} data it is right {share(metrics.accuracy)}."


def of_swaps(found: Swaps, masks_from: str = "") -> str:
    """What another background does, and what is known without the foreground; and by whose masks, if they are not the
    data's own."""
    if masks_from:
        said = of_swaps(found)
        return f"By masks {masks_from}: {said[0].lower()}{said[1:]}"
    alone = evaluate(found.answers["background"]).accuracy
    said = f"from the background alone it is right {share(alone)}."
    if "other" not in found.answers:
        return said[0].upper() + said[1:]
    return f"Another background changes its answer in {percent(found.changed('other'))} of the pictures; {said}"
