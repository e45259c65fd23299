"""index.html of a benchmark: the table, and figures that show every method with its interval."""

from __future__ import annotations

import base64
import io
from typing import Any

from ..config.flags import SOFTWARE
from ..metrics.estimates import Estimate
from .table import Table

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="{{ software }}">
<title>{{ table.data }}: {{ table.lines | length }} methods</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } img { max-width: 100%; } caption, p { text-align: left; color: #444; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } caption, p { color: #bbb; }
 th, td { border-color: #444; } img { background: #fff; } }
</style>
<h1>{{ table.data }}</h1>
<div class="scroll"><table>
<caption>{{ table.caption }}</caption>
<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for line in table.lines %}
<tr>{% for cell in line.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for warning in table.warnings %}<p>{{ warning }}</p>
{% endfor %}
{% if figure %}<p><img alt="Accuracy and worst-{{ table.worst_of }} accuracy of each method" src="{{ figure }}"></p>
{% endif %}
</html>
"""


def render_page(table: Table, *, figures: bool) -> str:
    """All names are escaped; nothing is loaded from elsewhere."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figure = figure_of(table) if figures else ""
    return environment.from_string(PAGE).render(table=table, figure=figure, software=SOFTWARE)


def figure_of(table: Table) -> str:
    """As a data URL: worst-group and average accuracy with intervals, and accuracy against worst-group accuracy."""
    from ..explain.plots import figure_class

    figure = figure_class()(figsize=(11, 1.5 + 0.35 * len(table.lines)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for k, (label, marker) in enumerate(((f"worst {table.worst_of}", "o"), ("accuracy", "|"))):
        for row, line in enumerate(table.lines):
            one = line.worst if k == 0 else line.metrics.accuracy
            errorbar(left, one, row + 0.18 * k, f"C{k}", marker, label if row == 0 else None)
    left.set_yticks(range(len(table.lines)), [shortened(line.name) for line in table.lines])
    left.invert_yaxis()
    left.set(xlabel="per cent, with 95 % intervals")
    left.legend(fontsize=8)
    for row, line in enumerate(table.lines):
        right.plot(100 * line.metrics.accuracy.value, 100 * line.worst.value, "o", color=f"C{row % 10}")
        right.annotate(
            shortened(line.name, 24), (100 * line.metrics.accuracy.value, 100 * line.worst.value), fontsize=7
        )
    right.set(xlabel="accuracy, %", ylabel=f"worst {table.worst_of}, %")
    right.margins(0.2)
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def errorbar(axes: Any, one: Estimate, at: float, colour: str, marker: str, label: str | None) -> None:
    ends = [[100 * (one.value - one.low)], [100 * (one.high - one.value)]]
    axes.errorbar([100 * one.value], [at], xerr=ends, fmt=marker, color=colour, label=label, capsize=2, markersize=5)


def shortened(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
