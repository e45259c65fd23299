"""Numbers and sentences of the report."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from ..explain.background_swaps import SwapResults
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import evaluate

CONDITION_NAMES = {
    "original": "original",
    "same": "background of the same kind",
    "random": "random background",
    "other": "background of another kind",
    "foreground": "foreground only",
    "background": "background only",
}


def percent(estimate: Estimate) -> str:
    """With the interval; without decimals, unless the value would round to 0 or 100."""
    digits = 0 if 0.01 < estimate.value < 0.99 else 1
    value, low, high = (f"{100 * x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} % [{low}, {high}]"


def points(gain: Estimate) -> tuple[str, str]:
    """A difference in percentage points, and its interval."""
    return minus(f"{100 * gain.value:+.1f}"), minus(gain.interval)


def minus(text: str) -> str:
    return text.replace("-", "−")


def keep_together(page: str) -> str:
    """No line break between a number and its unit, or inside an interval; commands stay as they are, to be copied."""
    pieces = re.split(r"(<pre>.*?</pre>|<code>.*?</code>)", page, flags=re.DOTALL)
    return "".join(one if one.startswith(("<pre>", "<code>")) else without_breaks(one) for one in pieces)


def without_breaks(text: str) -> str:
    text = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)
    text = re.sub(r"\bn = (?=\d)", "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}", text)
    return re.sub(r"(\[[−-]?[\d.]+,) (?=[−-]?[\d.]+\])", "\\1\N{NO-BREAK SPACE}", text)


def mark_code(text: str) -> Markup:
    """Escaped, with `commands` set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def breakable(name: str) -> Markup:
    """Escaped, with line breaks allowed after a slash rather than anywhere: for the names of groups."""
    return Markup(str(escape(name)).replace("/", "/<wbr>"))


def groups_or_classes(metrics: Metrics) -> tuple[str, dict[str, Estimate]]:
    """Accuracy by group if there are any, otherwise by class; and which of the two."""
    return ("group", metrics.groups) if metrics.groups else ("class", metrics.classes)


def best_group(metrics: Metrics) -> str:
    """The easiest group or class, and whether it differs significantly from the worst."""
    kind, cells = groups_or_classes(metrics)
    worst = metrics.worst_group or metrics.worst_class
    best = max(cells, key=lambda name: (cells[name].value, cells[name].n))
    if len(cells) == 1:
        return f"All {metrics.n:,} images are of one {kind}, {best}."
    verdict = "" if worst.high < cells[best].low else "; the difference to the worst is not significant"
    return f"Best {kind}: {best}, accuracy {percent(cells[best])}{verdict}."


def swap_summary(found: SwapResults, masks_from: str = "") -> str:
    """How often another background changes the prediction, and the accuracy from the background alone."""
    source = f" (masks {masks_from})" if masks_from else ""
    alone = percent(evaluate(found.predictions["background"]).accuracy)
    if "other" not in found.predictions:
        return f"Accuracy from the background alone: {alone}{source}."
    changed = percent(found.changed("other"))
    change = f"Another background changes the prediction for {changed} of images"
    return f"{change}; accuracy from the background alone: {alone}{source}."
