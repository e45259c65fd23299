"""How well a method looks, in figures: overlap with true masks, attention inside them, key points; with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from accelerate.utils import gather_object

from ..data.rows import Rows
from ..errors import UserError
from .estimates import Estimate
from .intervals import MOST_DRAWN, TAIL
from .keypoints import adjusted_rand_index, normalised_mutual_information
from .overlap import Columns

if TYPE_CHECKING:
    from rich.table import Table

RESAMPLES = 2000
FIGURES = {
    "grid_iou": "IoU of the sight, patch grid",
    "pixel_iou": "IoU of the sight, pixels",
    "parts_grid_iou": "IoU of the parts, patch grid",
    "pooled_iou": "IoU pooled over all pixels, as published",
    "coverage": "share of the picture in sight",
    "keypoint_error": "key point error (shares of the box)",
    "nmi": "NMI of parts and key points",
    "ari": "ARI of parts and key points",
}
NO_SHARES = ("contingency", "keypoint_error")
MAP_FIGURES = {"mass": "share inside the mask", "hit": "maximum inside the mask", "entropy": "entropy (1: uniform)"}


@dataclass(frozen=True)
class Localization:
    """How well a method looks, on one split."""

    split: str
    n: int
    figures: dict[str, Estimate]
    maps: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pictures: Mapping[str, Sequence[Any]] = field(default_factory=dict, compare=False, repr=False)
    """The column `image`, and those figures that are means over pictures; None where one does not count."""

    def to_dict(self) -> dict[str, Any]:
        """But for the single pictures, which have a file of their own."""
        said = asdict(replace(self, pictures={})) | {"notes": list(self.notes)}
        return {name: value for name, value in said.items() if name != "pictures"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Localization:
        figures = {name: Estimate(**one) for name, one in values["figures"].items()}
        maps = {m: {name: Estimate(**one) for name, one in some.items()} for m, some in values["maps"].items()}
        return cls(values["split"], values["n"], figures, maps, tuple(values["notes"]))

    def table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        rows = [(FIGURES[name], one) for name, one in self.figures.items()]
        for map_name, some in self.maps.items():
            rows += [(f"map {map_name}: {MAP_FIGURES[name]}", one) for name, one in some.items()]
        table = Table("", "value", "95 % interval", "n", box=None, pad_edge=False, caption="Bootstrap over images.")
        table.caption_justify = "left"
        for label, one in rows:
            table.add_row(escape(label), one.figure, one.interval, f"{one.n:,}")
        return table


def with_truth(
    rows: Rows, indices: np.ndarray, truth: Literal["masks", "boxes"] = "masks"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Those that there is something to compare with for, and what was left out."""
    known, column = (rows.masks, "mask") if truth == "masks" else (rows.boxes, "box")
    there = np.array([known is not None and len(known[i]) > 0 for i in indices], dtype=bool)
    if not there.any():
        raise UserError(
            f"{rows.name}: no {truth} to compare with; list them in rows.csv (column {column}), or choose other data"
        )
    left_out = int((~there).sum())
    note = f"left out, for want of a {column}: {left_out:,} of {len(indices):,} pictures"
    return indices[there], (note,) if left_out else ()


def in_order(mine: list[tuple[np.ndarray, Columns]]) -> Columns:
    """From indices and columns of this process's batches, on every process, those of all, in the order of the rows."""
    parts = gather_object(mine)
    order = np.argsort(np.concatenate([part[0] for part in parts]), kind="stable")
    return {name: np.concatenate([part[1][name] for part in parts])[order] for name in parts[0][1]}


def each_picture(columns: Columns) -> dict[str, list[float | None]]:
    """Of the figures that are means over pictures: not those that are pooled over pixels or key points."""
    return {
        name: [float(value) if counts else None for value, counts in column]
        for name, column in columns.items()
        if name not in ("pooled_iou", "keypoint_error", "contingency")
    }


def estimates(
    columns: Columns, resamples: int = RESAMPLES, seed: int = 0, *, plain: Collection[str] = ()
) -> dict[str, Estimate]:
    """Every figure with an interval from images drawn again, the same for all figures.

    As in `intervals`, shares are drawn as if one more image were all right and one more all wrong; those that are
    `plain`, since no image is right or wrong in them, as they are.
    """
    n = len(next(iter(columns.values())))
    flat = {name: column.reshape(n, -1).astype(np.float64) for name, column in columns.items()}
    padded = {
        name: np.concatenate([column, _two_more(column, name not in (*NO_SHARES, *plain))])
        for name, column in flat.items()
    }
    drawn = _drawn(np.concatenate(list(padded.values()), axis=1), n, resamples, seed)
    ends = np.cumsum([column.shape[1] for column in flat.values()])
    sums = dict(zip(flat, np.split(drawn, ends[:-1], axis=1), strict=True))
    found = {}
    for name, column in columns.items():
        for figure, formula in _formulas(name).items():
            shape = column.shape[1:]
            value = float(formula(flat[name].sum(axis=0).reshape(1, *shape))[0])
            if not math.isfinite(value):
                continue
            spread = formula(sums[name].reshape(-1, *shape))
            if formula is _ratio:
                spread = spread + value - float(_ratio(padded[name].sum(axis=0)[None])[0])
            low, high = np.nanquantile(spread, [TAIL, 1 - TAIL])
            counted = flat[name] if formula is not _ratio else flat[name][:, 1:]
            found[figure] = Estimate(value, low, high, int(counted.any(axis=1).sum()), "bootstrap over images")
    return found


def _formulas(name: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    if name == "contingency":
        return {"nmi": normalised_mutual_information, "ari": adjusted_rand_index}
    return {name: _ratio}


def _ratio(sums: np.ndarray) -> np.ndarray:
    return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


def _two_more(column: np.ndarray, is_share: bool) -> np.ndarray:
    """[2, c]: nothing and everything of what an image usually weighs; no change where a figure is not a share."""
    more = np.zeros((2, column.shape[1]))
    if is_share:
        more[:, 1] = column[:, 1].mean()
        more[1, 0] = more[1, 1]
    return more


def _drawn(rows: np.ndarray, n: int, resamples: int, seed: int) -> np.ndarray:
    """[R, c]: sums over n of the rows, drawn with replacement."""
    generator = np.random.default_rng(seed)
    step = max(1, MOST_DRAWN // len(rows))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    chances = np.full(len(rows), 1 / len(rows))
    return np.concatenate([generator.multinomial(n, chances, size=size) @ rows for size in sizes])
