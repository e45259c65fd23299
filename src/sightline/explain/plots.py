"""Figures of where backbones look: against model size, and by block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console.files import save_figure
from ..errors import UserError

if TYPE_CHECKING:
    from ..metrics.estimates import Estimate
    from .attention_tables import Attention, BackboneComparison

BARS = "; bars: 95 % intervals"
SHOWN = {"mass": "attention inside, %", "hit": "peak inside, %"}


def figure_class() -> Any:
    """Matplotlib's Figure, used without pyplot: no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "figures need matplotlib: pip install 'sightline[plots]', or leave them out with --no-figures"
        ) from None
    return Figure


def draw_sizes(found: BackboneComparison, path: Path) -> None:
    """Mass and hit against parameters, in the last requested block; a line joins the sizes of one model family."""
    curves: dict[tuple[str, str], list[tuple[int, Attention, str]]] = {}
    for seen in found.backbones:
        last = max(one.layer for one in seen.attention)
        for one in seen.attention:
            if one.layer == last:
                curves.setdefault((family(seen.name), one.heads), []).append((seen.parameters, one, seen.short))
    figure = figure_class()(figsize=(10, 4.6), layout="constrained")
    sizes = sorted({seen.parameters for seen in found.backbones})
    for axes, (name, label) in zip(figure.subplots(1, 2), SHOWN.items(), strict=True):
        for (kind, heads), points in curves.items():
            ordered = sorted(points, key=lambda point: point[0])
            drawn = [(size, one.levels["pixels"][name], short) for size, one, short in ordered]
            sizes_of = "/".join(Path(kind).parts[-2:])
            _curve(axes, drawn, f"{sizes_of}, heads: {heads}", dashed=kind.startswith("random:"))
        axes.set(xscale="log", xlabel="parameters", ylabel=label)
        axes.margins(x=0.3)
        axes.minorticks_off()
        axes.set_xticks(sizes, [f"{size / 1e6:.3g} M" for size in sizes], rotation=30, fontsize=8)
        _even(axes, found, name)
    _finish(figure, found, path, BARS)


def family(name: str) -> str:
    """A backbone's name without its size.

    >>> family("dinov2-s14-reg"), family("runs/ti/backbone.safetensors")
    ('dinov2-*14-reg', 'runs/*/backbone.safetensors')
    """
    return re.sub(r"(?<![a-z])(nano|ti|s|b|l|h|g)(?![a-z])", "*", name)


def draw_layers(found: BackboneComparison, path: Path) -> None:
    """Mass and hit by block, over relative depth, for the requested blocks."""
    figure = figure_class()(figsize=(10, 4.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2), SHOWN.items(), strict=True):
        for seen in found.backbones:
            for joined, maps in groupby(sorted(seen.attention, key=lambda one: (one.heads, one.layer)), _heads):
                points = [((one.layer + 1) / seen.blocks, one.levels["pixels"][name], "") for one in maps]
                _curve(axes, points, f"{seen.short}, heads: {joined}", dashed=seen.name.startswith("random:"))
        axes.set(xlabel="relative depth (1: last block)", ylabel=label)
        _even(axes, found, name)
    _finish(figure, found, path, BARS)


def draw_shares(found: BackboneComparison, path: Path) -> None:
    """Attention of CLS to patches, registers and itself, by block."""
    n = len(found.backbones)
    figure = figure_class()(figsize=(max(3.2 * n, 5), 3.4), layout="constrained")
    panels = figure.subplots(1, n, sharey=True, squeeze=False)[0]
    for axes, seen in zip(panels, found.backbones, strict=True):
        places = list(seen.shares[0])
        bottom = [0.0] * seen.blocks
        for place, colour in zip(places, ("tab:green", "tab:orange", "tab:grey"), strict=True):
            heights = [100 * shares[place].value for shares in seen.shares]
            axes.bar(range(seen.blocks), heights, bottom=bottom, color=colour, width=0.9, label=place)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_title(seen.short, fontsize=9)
        axes.set(xlabel="layer", ylim=(0, 100), xticks=range(0, seen.blocks, max(1, seen.blocks // 6)))
    panels[0].set_ylabel("attention of CLS, %")
    _finish(figure, found, path)


def _heads(one: Any) -> str:
    return one.heads


def _curve(axes: Any, points: Sequence[tuple[float, Estimate, str]], label: str, *, dashed: bool) -> None:
    x, estimates, names = zip(*points, strict=True)
    values = [100 * one.value for one in estimates]
    ends = [[100 * (one.value - one.low) for one in estimates], [100 * (one.high - one.value) for one in estimates]]
    axes.errorbar(x, values, yerr=ends, marker="o", capsize=3, linestyle="--" if dashed else "-", label=label)
    for at, value, name in zip(x, values, names, strict=True):
        axes.annotate(name, (at, value), xytext=(0, 6), textcoords="offset points", fontsize=7, ha="center")


def _even(axes: Any, found: BackboneComparison, name: str) -> None:
    values = sorted({round(100 * seen.even["pixels"][name].value, 2) for seen in found.backbones})
    for i, value in enumerate(values):
        axes.axhline(value, color="black", linewidth=0.8, linestyle=":", label="uniform map" if i == 0 else None)
    axes.set_ylim(bottom=0)


def _finish(figure: Any, found: BackboneComparison, path: Path, more: str = "") -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"{found.data}, split {found.split}: {found.n:,} images{more}", fontsize=10)
    save_figure(path, figure)
