"""Metrics as tables on a screen: in short, and with all details. Both fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from .estimates import METRIC_LABELS, Classification, Estimate, Metrics

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_ROWS = 12  # groups or classes
BAR = 16  # characters
NAME = 34  # characters of a name, in 80 columns
NARROW = 80  # columns
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_text(value: float, width: int = BAR) -> str:
    """A horizontal bar for a value in [0, 1]."""
    eighths = round(8 * width * min(max(value, 0.0), 1.0))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def shortened(names: Iterable[str], width: int = NAME) -> dict[str, str]:
    """Names of at most `width` characters: long ones lose their middle, unless two would then be equal."""
    names = list(names)
    short = {
        name: name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}"
        for name in names
    }
    return short if len({*short.values()}) == len(short) else {name: name for name in names}


def plain_table(*columns: str, caption: str = "") -> Table:
    """A table without lines, whose first column holds names and whose others hold numbers."""
    from rich.table import Column, Table

    header = [
        Column(columns[0], overflow="fold"),
        *(Column(name, justify="right", no_wrap=True) for name in columns[1:]),
    ]
    table = Table(*header, box=None, pad_edge=False, caption=caption or None)
    table.caption_justify = "left"
    return table


def named_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table | Text:
    """Names, then numbers. If a name is too long for 80 columns, every name has a line of its own above its numbers."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= NARROW:
        table = plain_table(*columns, caption=escape(caption))
        for row in rows:
            table.add_row(*map(escape, row))
        return table
    from rich.text import Text

    def line(cells: Sequence[str]) -> str:
        return "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)).rstrip()

    lines = [f"{columns[0]}\n{line(columns[1:])}".strip("\n")]
    return Text(
        "\n".join([*lines, *(f"{name}\n{line(cells)}" for name, *cells in rows), *([caption] if caption else [])])
    )


def summary_table(metrics: Metrics, most: int = MAX_ROWS) -> Table:
    """Accuracy, overall and in every group (or class), with a bar; of very many only the worst."""
    from rich.table import Column

    worst, cells = (metrics.worst_group, metrics.groups) if metrics.groups else (metrics.worst_class, metrics.classes)
    shown = list(cells.items())
    if len(cells) > most:
        shown = sorted(shown, key=lambda item: item[1].value)[:most]
    names = shortened(name for name, _ in shown)
    table = plain_table("", "accuracy", "95 % interval", "n")
    table.columns.append(Column("0 %" + f"{'100 %':>{BAR - 3}}", no_wrap=True, _index=4))
    for name, one in [("all images", metrics.accuracy), *shown]:
        is_worst = worst is not None and name == worst.of and len(cells) > 1
        cells_ = (names.get(name, name), one.value_text, one.interval, f"{one.n:,}", bar_text(one.value))
        table.add_row(*map(escape, cells_), style="bold" if is_worst else None)
    if len(cells) > most:
        kind = "groups" if metrics.groups else "classes"
        table.add_row(f"[dim]{len(cells) - most} {kind} with higher accuracy: --details[/]")
    return table


def details_table(metrics: Metrics) -> Table:
    """Every metric, with the method of its interval below."""
    methods: dict[str, list[str]] = {}
    table = plain_table("", "value", "95 % interval", "n")
    for label, one in detailed(metrics):
        methods.setdefault(one.how, []).append(label)
        name = f"{label}: {one.of}" if one.of else label
        table.add_row(*map(escape, (name, one.value_text, one.interval, f"{one.n:,}")))
    for kind, cells in (("every group", metrics.groups), ("every class", metrics.classes)):
        for how in {estimate.how for estimate in cells.values()}:
            methods.setdefault(how, []).append(kind)
    if metrics.groups:
        for name, one in metrics.classes.items():
            table.add_row(*map(escape, (f"Class {name}", one.value_text, one.interval, f"{one.n:,}")))
    table.caption = escape("\n".join(f"{', '.join(labels)}: {how}." for how, labels in methods.items()))
    return table


def detailed(metrics: Metrics) -> list[tuple[str, Estimate]]:
    """All metrics that are known, by their labels."""
    found = [(label, one) for name, label in METRIC_LABELS.items() if (one := getattr(metrics, name)) is not None]
    if (by_class := metrics.classification) is not None:
        found += [("Macro F1", by_class.macro_f1), ("Expected calibration error", by_class.calibration_error)]
    return found


def class_table(found: Classification, most: int = 3 * MAX_ROWS) -> Table:
    """Precision, recall and F1 of every class; of very many those with the lowest F1."""
    ordered = list(found.scores.items())
    if len(ordered) > most:
        ordered = sorted(ordered, key=lambda item: item[1].f1.value if item[1].f1 else 1.0)[:most]
    names = shortened(name for name, _ in ordered)
    table = plain_table("class", "precision", "recall", "F1", "n")
    for name, one in ordered:
        values = ["–" if each is None else f"{100 * each.value:.1f} %" for each in (one.precision, one.recall, one.f1)]
        table.add_row(escape(names[name]), *values, f"{one.recall.n if one.recall else 0:,}")
    if len(found.scores) > most:
        table.add_row(f"[dim]{len(found.scores) - most} classes with higher F1 not shown[/]")
    return table


def confusion_sentence(found: Classification, most: int = 3) -> str:
    """The most frequent confusions."""
    pairs = found.top_confusions(most)
    if not pairs:
        return "No image is misclassified."
    listed = [f"{label} as {predicted or 'none of the classes'} ({k:,} of {n:,})" for label, predicted, k, n in pairs]
    return f"Most frequent confusions: {', '.join(listed)}."
