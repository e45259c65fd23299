"""Localisation metrics with intervals: overlap of the sight with object masks, attention inside them, key points."""

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
LOCALIZATION_LABELS = {
    "grid_iou": "Sight IoU, patch grid",
    "pixel_iou": "Sight IoU, pixels",
    "parts_grid_iou": "Part IoU, patch grid",
    "pooled_iou": "IoU pooled over all pixels, as published",
    "coverage": "Coverage (visible fraction of the image)",
    "keypoint_error": "Key point error (fraction of the box)",
    "nmi": "NMI of parts and key points",
    "ari": "ARI of parts and key points",
}
NO_FRACTIONS = ("contingency", "keypoint_error")
MAP_LABELS = {"mass": "attention mass inside the mask", "hit": "hit rate (maximum inside the mask)",
              "entropy": "entropy (1: uniform)"}  # fmt: skip


@dataclass(frozen=True)
class Localization:
    """How well the sight and the maps of a method match the object masks of one split."""

    split: str
    n: int
    figures: dict[str, Estimate]
    maps: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    per_image: Mapping[str, Sequence[Any]] = field(default_factory=dict, compare=False, repr=False)
    """The column `image` and the metrics that are means over images; None for an image that does not count."""

    def to_dict(self) -> dict[str, Any]:
        """Without the values per image, which have a file of their own."""
        values = asdict(replace(self, per_image={})) | {"notes": list(self.notes)}
        return {name: value for name, value in values.items() if name != "per_image"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Localization:
        def read(estimates: Mapping[str, Any]) -> dict[str, Estimate]:
            return {name: Estimate(**estimate) for name, estimate in estimates.items()}

        maps = {name: read(estimates) for name, estimates in values["maps"].items()}
        return cls(values["split"], values["n"], read(values["figures"]), maps, tuple(values["notes"]))

    def table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        rows = [(LOCALIZATION_LABELS[name], estimate) for name, estimate in self.figures.items()]
        for map_name, estimates in self.maps.items():
            rows += [(f"Map {map_name}: {MAP_LABELS[name]}", estimate) for name, estimate in estimates.items()]
        table = Table("", "Value", "95 % interval", "n", box=None, pad_edge=False, caption="Bootstrap over images.")
        table.caption_justify = "left"
        for label, estimate in rows:
            table.add_row(escape(label), estimate.value_text, estimate.interval, f"{estimate.n:,}")
        return table


def select_annotated(
    rows: Rows, indices: np.ndarray, truth: Literal["masks", "boxes"] = "masks"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The rows that have ground truth to compare with, and a note about those that have none."""
    known, column = (rows.masks, "mask") if truth == "masks" else (rows.boxes, "box")
    annotated = np.array([known is not None and len(known[i]) > 0 for i in indices], dtype=bool)
    if not annotated.any():
        raise UserError(
            f"{rows.name}: no {truth} to compare with; add the column {column} to rows.csv, or choose other data"
        )
    missing = int((~annotated).sum())
    note = f"without a {column}, not measured: {missing:,} of {len(indices):,} images"
    return indices[annotated], (note,) if missing else ()


def gather_in_order(own: list[tuple[np.ndarray, Columns]]) -> Columns:
    """The columns of all processes in the order of the rows, from indices and columns of this process's batches."""
    gathered = gather_object(own)
    order = np.argsort(np.concatenate([indices for indices, _ in gathered]), kind="stable")
    names = gathered[0][1]
    return {name: np.concatenate([columns[name] for _, columns in gathered])[order] for name in names}


def per_image_values(columns: Columns) -> dict[str, list[float | None]]:
    """The values per image of the metrics that are means over images, not pooled over pixels or key points."""
    return {
        name: [float(value) if counts else None for value, counts in column]
        for name, column in columns.items()
        if name not in ("pooled_iou", "keypoint_error", "contingency")
    }


def bootstrap_metrics(
    columns: Columns, resamples: int = RESAMPLES, seed: int = 0, *, plain: Collection[str] = ()
) -> dict[str, Estimate]:
    """Every metric with a bootstrap interval over images; all metrics share the resampled images.

    As in `intervals`, fractions are resampled as if there were one more image with value 1 and one more with value 0;
    metrics named in `plain` are resampled as they are.
    """
    n = len(next(iter(columns.values())))
    flat = {name: column.reshape(n, -1).astype(np.float64) for name, column in columns.items()}
    padded = {
        name: np.concatenate([column, _two_more(column, name not in (*NO_FRACTIONS, *plain))])
        for name, column in flat.items()
    }
    drawn = _draw_sums(np.concatenate(list(padded.values()), axis=1), n, resamples, seed)
    ends = np.cumsum([column.shape[1] for column in flat.values()])
    sums = dict(zip(flat, np.split(drawn, ends[:-1], axis=1), strict=True))
    estimates = {}
    for name, column in columns.items():
        for metric, formula in _formulas(name).items():
            shape = column.shape[1:]
            value = float(formula(flat[name].sum(axis=0).reshape(1, *shape))[0])
            if not math.isfinite(value):
                continue
            spread = formula(sums[name].reshape(-1, *shape))
            if formula is _ratio:
                spread = spread + value - float(_ratio(padded[name].sum(axis=0)[None])[0])
            low, high = np.nanquantile(spread, [TAIL, 1 - TAIL])
            counted = flat[name] if formula is not _ratio else flat[name][:, 1:]
            estimates[metric] = Estimate(value, low, high, int(counted.any(axis=1).sum()), "bootstrap over images")
    return estimates


def _formulas(name: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    if name == "contingency":
        return {"nmi": normalised_mutual_information, "ari": adjusted_rand_index}
    return {name: _ratio}


def _ratio(sums: np.ndarray) -> np.ndarray:
    return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


def _two_more(column: np.ndarray, is_fraction: bool) -> np.ndarray:
    """[2, c]: two images of mean weight with values 0 and 1; two without weight for a metric that is no fraction."""
    more = np.zeros((2, column.shape[1]))
    if is_fraction:
        more[:, 1] = column[:, 1].mean()
        more[1, 0] = more[1, 1]
    return more


def _draw_sums(rows: np.ndarray, n: int, resamples: int, seed: int) -> np.ndarray:
    """[R, c]: sums over n rows drawn with replacement."""
    generator = np.random.default_rng(seed)
    step = max(1, MOST_DRAWN // len(rows))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    chances = np.full(len(rows), 1 / len(rows))
    return np.concatenate([generator.multinomial(n, chances, size=size) @ rows for size in sizes])
