"""Figures of the matrix: a heat map with a cell per pair, and the scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..console.files import save_figure
from ..explain.plots import figure_class

if TYPE_CHECKING:
    from ..metrics.estimates import Estimate
    from .scaling import Curve

COLOURS = "viridis"
WIDE, HIGH = 1.75, 0.8  # inches of a cell
AT_LEAST = (6.5, 3.2)  # inches of the figure: less has no room for title and labels
SPAN = 1.0  # minimum range of the colours in points: equal values have no range of their own
GROWS = {"where": "selector (where)", "what": "predictor (what)"}


@dataclass(frozen=True)
class Square:
    """A value, or the reason why there is none."""

    figure: Estimate | None
    published: str = ""  # the name of this pair in the literature
    best: bool = False
    empty: str = ""


def draw_heatmap(
    squares: Sequence[Sequence[Square]], rows: Sequence[str], columns: Sequence[str], title: str, path: Path
) -> None:
    """Values in every cell; empty cells are hatched, the best on validation data is framed."""
    longest = min(3.0, 0.085 * max(map(len, rows)))
    size = (longest + WIDE * len(columns) + 1.2, HIGH * len(rows) + 1.5)
    figure = figure_class()(figsize=tuple(map(max, AT_LEAST, size)), layout="constrained")
    axes = figure.subplots()
    known = [100 * square.figure.value for line in squares for square in line if square.figure]
    low, high = (min(known), max(known)) if known else (0.0, 100.0)
    values = [[100 * s.figure.value if s.figure else float("nan") for s in line] for line in squares]
    image = axes.imshow(values, cmap=COLOURS, vmin=low, vmax=max(high, low + SPAN), aspect="auto")
    for y, line in enumerate(squares):
        for x, square in enumerate(line):
            _square(axes, x, y, square, dark=bool(image.norm(values[y][x]) < 0.5))
    axes.set_xticks(range(len(columns)), [fill(name, 22) for name in columns], fontsize=8)
    axes.set_yticks(range(len(rows)), [fill(name, 34) for name in rows], fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_title(fill(title, round(12 * figure.get_figwidth())), fontsize=9)
    axes.set_xlabel("framed: best on validation data, excluding true masks; italics: name in the literature", size=7)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if known:
        figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01).ax.tick_params(labelsize=7)
    save_figure(path, figure, dpi=130)


def _square(axes: Any, x: int, y: int, square: Square, *, dark: bool) -> None:
    from matplotlib.patches import Rectangle

    at = (x - 0.5, y - 0.5)
    if square.figure is None:
        axes.add_patch(Rectangle(at, 1, 1, facecolor="0.93", edgecolor="0.7", hatch="///", linewidth=0))
        box = {"facecolor": "0.93", "edgecolor": "none", "pad": 1}
        why = fill(square.empty, 30, max_lines=3, placeholder=" …")
        axes.text(x, y, why, ha="center", va="center", fontsize=5.5, color="0.25", bbox=box)
        return
    colour, one = "white" if dark else "black", square.figure
    axes.text(x, y - 0.12, f"{100 * one.value:.1f}", ha="center", va="center", fontsize=12, color=colour)
    below = f"[{100 * one.low:.1f}, {100 * one.high:.1f}]  n = {one.n:,}"
    axes.text(x, y + 0.17, below, ha="center", va="center", fontsize=6.5, color=colour)
    axes.text(x, y + 0.37, square.published, ha="center", va="center", fontsize=6.5, style="italic", color=colour)
    if square.best:
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="red", linewidth=2.5))


def draw_scaling(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Gain over the smallest model against parameters, as the selector grows and as the predictor grows (A²)."""
    sides = [side for side in GROWS if any(curve.grows == side for curve in curves)]
    figure = figure_class()(figsize=(5.2 * len(sides), 4.4), layout="constrained")
    for axes, side in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides, strict=True):
        ticks = {}
        for curve in (curve for curve in curves if curve.grows == side):
            x = [point.parameters for point in curve.points]
            gains = [(p.gain.value, p.gain.low, p.gain.high) if p.gain else (0.0, 0.0, 0.0) for p in curve.points]
            ends = [[100 * (v - low) for v, low, _ in gains], [100 * (high - v) for v, _, high in gains]]
            label = f"{curve.kind}, {'what' if side == 'where' else 'where'} fixed: {curve.fixed}"
            axes.errorbar(x, [100 * v for v, _, _ in gains], yerr=ends, marker="o", capsize=3, label=fill(label, 60))
            ticks |= {p.parameters: f"{p.name}\n{p.parameters / 1e6:.3g} M" for p in curve.points}
        axes.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="parameters", ylabel="gain over the smallest model, points")
        axes.minorticks_off()
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
        axes.margins(x=0.2)
        axes.set_title(f"size of the {GROWS[side]}", fontsize=9)
        axes.legend(fontsize=6.5)
    figure.suptitle(f"{title}; bars: 95 % intervals of paired differences", fontsize=9)
    save_figure(path, figure)
