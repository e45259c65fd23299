"""How good are the maps? What a method looks at, held against true masks and key points.

Works for anything that has `look` and `maps`; every figure has its n and a 95 % interval over images.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..console.terminal import counted, is_main_process, print_notes, watched
from ..data.batches import Batch
from ..data.rows import SPLITS, Rows
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, sight_for
from ..metrics.keypoints import Places, keypoint_errors
from ..metrics.localization import (
    FIGURES,
    RESAMPLES,
    Localization,
    each_picture,
    estimates,
    in_order,
    with_truth,
)
from ..metrics.overlap import Columns, per_image
from ..sight import Look
from ..vit.model import Input
from ..where.relevance import can_be_explained, relevance_map

if TYPE_CHECKING:
    from ..config import Localize
    from ..load import EvaluationData


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
        is_told = self.method.needs_masks
        given = self.method.with_masks(self.rows) if is_told else self.rows
        opened = [
            inference_batches(
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


def _split_off(columns: Columns) -> tuple[Places | None, Columns]:
    """The places of parts and key points, which are no sums, and the rest."""
    places = {name.removeprefix("places "): value for name, value in columns.items() if name.startswith("places ")}
    rest = {name: value for name, value in columns.items() if not name.startswith("places ")}
    return (Places(**places) if places else None), rest


# ---- a run -----------------------------------------------------------------------------------------------------------


def localize_run(command: Localize) -> tuple[Localization, Path]:
    """A trained model on a split of its own data or of others, and the file that says so."""
    from ..console.files import write
    from ..load import evaluation_data, opened, results_folder

    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    asked = evaluation_data(command, model.run)
    indices = asked.rows.where(command.split)
    if not len(indices):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    with_truth(asked.rows, indices)  # or it says so, before a folder is made
    path = results_folder(command, model.run, asked) / "localization.json"
    before = figures_before(path, asked)
    found = localize(
        model.method, asked.rows, indices, model.expects, accelerator,
        fit=asked.rows.where("train") if command.split != "train" else None,
        published=command.published, batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    if accelerator.is_main_process:
        splits = before.get("splits", {}) | {command.split: found.to_dict()}
        content = {"data": asked.rows.name, "fingerprint": asked.fingerprint, "splits": splits}
        write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        save_pictures(path.parent / "localization" / f"{command.split}.csv", found, maps=command.maps)
    accelerator.wait_for_everyone()
    return found, path


def save_pictures(path: Path, found: Localization, *, maps: bool) -> None:
    """Figures of the sight, and those of each of the `maps` only where they are asked for: there may be many."""
    from ..console.files import as_csv, make_folder, write

    names = [name for name in found.pictures if maps or name == "image" or name in FIGURES]
    columns = [[_brief(value) for value in found.pictures[name]] for name in names]
    lines = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    make_folder(path.parent)
    write(path, as_csv(names, lines))


def _brief(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def figures_before(path: Path, asked: EvaluationData) -> dict[str, Any]:
    """What a file of figures says already, if it is there, of these data."""
    from ..load import check_other_data

    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it") from error
    check_other_data(path, known, asked)
    return content


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Localize) -> int:
    from rich.console import Console
    from rich.markup import escape

    if command.of_backbones:
        from .localize_backbones import show_backbones

        return show_backbones(command)
    found, path = localize_run(command)
    if is_main_process():
        console = Console(highlight=False)
        console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(found.n)}", soft_wrap=True)
        console.print(found.table())
        print_notes(console, found.notes)
        print(f"The figures are in {path}.")
    return 0
