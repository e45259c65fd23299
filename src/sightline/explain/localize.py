"""How good are the maps? What a method looks at, held against true masks and key points.

Works for anything that has `look` and `maps`; every figure has its n and a 95 % interval over images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..console import watched
from ..data.batches import Batch
from ..data.rows import SPLITS, Rows
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import answering_batches, needs_masks, shown, sight_for
from ..metrics.intervals import MOST_DRAWN, TAIL
from ..metrics.keypoints import Places, adjusted_rand_index, keypoint_errors, normalised_mutual_information
from ..metrics.overlap import Columns, per_image
from ..sight import Look
from ..vit.model import Input
from ..where.relevance import can_be_explained, relevance_map

if TYPE_CHECKING:
    from rich.table import Table

    from ..config import Localize
    from ..evaluate import Asked

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


def localize(
    method: Look,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    fit: np.ndarray | None = None,
    published: bool = False,
    batch: int = 64,
    workers: int = 0,
    cache: Path | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Localization:
    """Everything that can be said about where `method` looks on these rows.

    `fit` are rows to learn the place of key points on, from the centres of parts (never those of `indices`).
    `published` measures key points in the geometry of the published code, which is half a cell off.
    """
    chosen, notes = with_truth(rows, np.asarray(indices))
    watch = _Watch(method, rows, expects, accelerator, batch, workers, cache, published)
    columns = watch(chosen)
    places, columns = _split_off(columns)
    if places is not None and fit is not None and len(fit):
        known, _ = _split_off(watch(np.asarray(fit)))
        assert known is not None, "the same method finds parts on one split and not on the other"
        errors = keypoint_errors(known, places)
        columns["keypoint_error"] = np.stack([np.nansum(errors, axis=1), np.isfinite(errors).sum(axis=1)], axis=1)
    elif places is not None:
        notes = (*notes, "no key point error: it is fitted on train rows, and there are none beside those measured")
    plain = {name for name in columns if name == "coverage" or name.startswith("entropy ")}
    found = estimates(columns, resamples, seed, plain=plain)
    maps: dict[str, dict[str, Estimate]] = {}
    for name in [name for name in found if name not in FIGURES]:
        figure, _, map_name = name.partition(" ")
        maps.setdefault(map_name, {})[figure] = found.pop(name)
    if published and places is not None:
        notes = (*notes, "key points are measured in the geometry of the published code")
    split = "+".join(SPLITS[i] for i in np.unique(rows.splits[chosen]))
    pictures = {"image": [rows.images[i] for i in np.sort(chosen)]} | each_picture(columns)
    figures = {name: found[name] for name in FIGURES if name in found}
    return Localization(split, len(chosen), figures, maps, notes, pictures)


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


# ---- per image -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Watch:
    """Looks at rows with a method, and notes per image what the figures are made of."""

    method: Look
    rows: Rows
    expects: Input
    accelerator: Accelerator
    batch: int
    workers: int
    cache: Path | None
    published: bool

    @torch.no_grad()
    def __call__(self, indices: np.ndarray) -> Columns:
        """On every process, those of all processes, in the order of the rows."""
        mine: list[tuple[np.ndarray, Columns]] = []
        with ExitStack() as to_close:
            for truth, told in self._batches(indices, to_close):
                if len(truth):
                    images = truth.images.float() / 255
                    with self.accelerator.autocast():
                        sight, maps = sight_for(self.method, images, told), self.method.maps(images)
                        if can_be_explained(self.method):  # it sees everything; so, what does its answer rely on?
                            maps = maps | {"gae": relevance_map(self.method, images)}
                    seen = per_image(sight, maps, truth, published=self.published)
                    mine.append((truth.indices.cpu().numpy(), seen))
        return in_order(mine)

    def _batches(self, indices: np.ndarray, to_close: ExitStack) -> Iterator[tuple[Batch, Tensor | None]]:
        """With true masks; and beside them those that the method is told by, if it is."""
        is_told = needs_masks(self.method)
        given = shown(self.method, self.rows) if is_told else self.rows
        opened = [
            answering_batches(
                rows, indices, self.expects, self.accelerator,
                batch=self.batch, workers=self.workers, cache=self.cache, masks=True,
            )
            for rows in ([self.rows] if given is self.rows else [self.rows, given])
        ]  # fmt: skip
        for batches in opened:
            to_close.callback(batches.close)
        for several in watched(zip(*(batches.epoch(0) for batches in opened), strict=True), len(opened[0])):
            moved = [batch.to(self.accelerator.device) for batch in several]
            yield moved[0], moved[-1].masks if is_told else None


def in_order(mine: list[tuple[np.ndarray, Columns]]) -> Columns:
    """From indices and columns of this process's batches, on every process, those of all, in the order of the rows."""
    parts = gather_object(mine)
    order = np.argsort(np.concatenate([part[0] for part in parts]), kind="stable")
    return {name: np.concatenate([part[1][name] for part in parts])[order] for name in parts[0][1]}


def _split_off(columns: Columns) -> tuple[Places | None, Columns]:
    """The places of parts and key points, which are no sums, and the rest."""
    places = {name.removeprefix("places "): value for name, value in columns.items() if name.startswith("places ")}
    rest = {name: value for name, value in columns.items() if not name.startswith("places ")}
    return (Places(**places) if places else None), rest


def each_picture(columns: Columns) -> dict[str, list[float | None]]:
    """Of the figures that are means over pictures: not those that are pooled over pixels or key points."""
    return {
        name: [float(value) if counts else None for value, counts in column]
        for name, column in columns.items()
        if name not in ("pooled_iou", "keypoint_error", "contingency")
    }


# ---- over images -----------------------------------------------------------------------------------------------------


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


# ---- a run -----------------------------------------------------------------------------------------------------------


def localize_run(command: Localize) -> tuple[Localization, Path]:
    """A trained model on a split of its own data or of others, and the file that says so."""
    from ..evaluate import data_asked_for, folder_for, opened, save_plainly

    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    asked = data_asked_for(command, model.run)
    indices = asked.rows.where(command.split)
    if not len(indices):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    with_truth(asked.rows, indices)  # or it says so, before a folder is made
    path = folder_for(command, model.run, asked) / "localization.json"
    before = figures_before(path, asked)
    found = localize(
        model.method, asked.rows, indices, model.expects, accelerator,
        fit=asked.rows.where("train") if command.split != "train" else None,
        published=command.published, batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    if accelerator.is_main_process:
        splits = before.get("splits", {}) | {command.split: found.to_dict()}
        content = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "splits": splits}
        save_plainly(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        save_pictures(path.parent / "localization" / f"{command.split}.csv", found, maps=command.maps)
    accelerator.wait_for_everyone()
    return found, path


def save_pictures(path: Path, found: Localization, *, maps: bool) -> None:
    """Figures of the sight, and those of each of the `maps` only where they are asked for: there may be many."""
    from ..evaluate import as_csv, make_folder, save_plainly

    names = [name for name in found.pictures if maps or name == "image" or name in FIGURES]
    columns = [[_brief(value) for value in found.pictures[name]] for name in names]
    lines = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    make_folder(path.parent)
    save_plainly(path, as_csv(names, lines))


def _brief(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def figures_before(path: Path, asked: Asked) -> dict[str, Any]:
    """What a file of figures says already, if it is there, of these data."""
    from ..evaluate import refuse_other_data

    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it") from error
    refuse_other_data(path, known, asked)
    return content
