"""Localisation: what a method looks at, measured against true object masks and key points.

Works for any method with `look` and `maps`; every figure has its n and a 95 % interval over images.
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

from ..console.terminal import counted, is_main_process, present, print_notes, watched
from ..data.batches import Batch
from ..data.rows import SPLITS, Rows
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, sight_and_maps
from ..metrics.keypoints import PartLocations, keypoint_errors
from ..metrics.localization import (
    LOCALIZATION_LABELS,
    RESAMPLES,
    Localization,
    bootstrap_metrics,
    gather_in_order,
    per_image_values,
    select_annotated,
)
from ..metrics.overlap import Columns, localization_columns
from ..sight import Method
from ..vit.model import Input
from ..where.relevance import has_relevance_map, relevance_map

if TYPE_CHECKING:
    from ..config import Localize
    from ..load import EvaluationData


def localize(
    method: Method,
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
    """All localisation figures of `method` on these rows.

    `fit` are rows on which key points are regressed from the centres of parts (never those of `indices`).
    `published` measures key points in the geometry of the published code, which is half a cell off.
    """
    chosen, notes = select_annotated(rows, np.asarray(indices))
    collect = _Collector(method, rows, expects, accelerator, batch, workers, cache, published)
    positions, columns = _split_positions(collect(chosen))
    if positions is not None and fit is not None and len(fit):
        fit_positions, _ = _split_positions(collect(np.asarray(fit)))
        assert fit_positions is not None, "the same method finds parts on one split and not on the other"
        errors = keypoint_errors(fit_positions, positions)
        columns["keypoint_error"] = np.stack([np.nansum(errors, axis=1), np.isfinite(errors).sum(axis=1)], axis=1)
    elif positions is not None:
        notes = (*notes, "no key point error: its regression needs training rows other than those measured")
    plain = {name for name in columns if name == "coverage" or name.startswith("entropy ")}
    found = bootstrap_metrics(columns, resamples, seed, plain=plain)
    maps: dict[str, dict[str, Estimate]] = {}
    for name in [name for name in found if name not in LOCALIZATION_LABELS]:
        figure, _, map_name = name.partition(" ")
        maps.setdefault(map_name, {})[figure] = found.pop(name)
    if published and positions is not None:
        notes = (*notes, "key points are measured in the geometry of the published code")
    split = "+".join(SPLITS[i] for i in np.unique(rows.splits[chosen]))
    per_image_figures = {"image": [rows.images[i] for i in np.sort(chosen)]} | per_image_values(columns)
    figures = {name: found[name] for name in LOCALIZATION_LABELS if name in found}
    return Localization(split, len(chosen), figures, maps, notes, per_image_figures)


# ---- per image -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Collector:
    """Runs a method over rows and collects per image what the figures are made of."""

    method: Method
    rows: Rows
    expects: Input
    accelerator: Accelerator
    batch: int
    workers: int
    cache: Path | None
    published: bool

    @torch.no_grad()
    def __call__(self, indices: np.ndarray) -> Columns:
        """The columns of all processes, on every process, in the order of the rows."""
        collected: list[tuple[np.ndarray, Columns]] = []
        batches = batches_with_masks(
            self.method, self.rows, indices, self.expects, self.accelerator,
            batch=self.batch, workers=self.workers, cache=self.cache,
        )  # fmt: skip
        for truth, masks in batches:
            if len(truth):
                images = truth.images.float() / 255
                with self.accelerator.autocast():
                    sight, maps = sight_and_maps(self.method, images, masks)
                    if has_relevance_map(self.method):  # it sees everything; so, what does its prediction rely on?
                        maps = maps | {"gae": relevance_map(self.method, images)}
                columns = localization_columns(sight, maps, truth, published=self.published)
                collected.append((truth.indices.cpu().numpy(), columns))
        return gather_in_order(collected)


def batches_with_masks(
    method: Method,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    *,
    batch: int,
    workers: int,
    cache: Path | None,
    true_masks: bool = True,
    task: str = "looking at images",
) -> Iterator[tuple[Batch, Tensor | None]]:
    """Batches with the data's `true_masks`, and beside each the masks that the method needs as input, if any."""
    sources = [(rows, true_masks)]
    given = method.with_masks(rows) if method.needs_masks else rows
    if method.needs_masks and (given is not rows or not true_masks):
        sources.append((given, True))
    with ExitStack() as to_close:
        opened = [
            inference_batches(
                source, indices, expects, accelerator, batch=batch, workers=workers, cache=cache, masks=masks
            )
            for source, masks in sources
        ]
        for batches in opened:
            to_close.callback(batches.close)
        for several in watched(zip(*(batches.epoch(0) for batches in opened), strict=True), len(opened[0]), task):
            moved = [each.to(accelerator.device) for each in several]
            yield moved[0], moved[-1].masks if method.needs_masks else None


def _split_positions(columns: Columns) -> tuple[PartLocations | None, Columns]:
    """The positions of parts and key points, which are not summed, and the other columns."""
    positions = {name.removeprefix("places "): value for name, value in columns.items() if name.startswith("places ")}
    rest = {name: value for name, value in columns.items() if not name.startswith("places ")}
    return (PartLocations(**positions) if positions else None), rest


# ---- a run -----------------------------------------------------------------------------------------------------------


def localize_run(command: Localize) -> tuple[Localization, Path]:
    """Localisation of a trained model on a split of its own data or of other data, and the file it is written to."""
    from ..console.checksums import write_json_with_checksum
    from ..load import evaluation_data, open_model, results_folder

    accelerator, model = open_model(command.run, command.device, intervention=command.intervention)
    dataset = evaluation_data(command, model.run)
    indices = images_of_split(dataset.rows, command.split, dataset.path)
    select_annotated(dataset.rows, indices)  # raises before a folder is created
    path = results_folder(command, model.run, dataset) / "localization.json"
    before = previous_results(path, dataset)
    found = localize(
        model.method, dataset.rows, indices, model.expects, accelerator,
        fit=dataset.rows.split_indices("train") if command.split != "train" else None,
        published=command.published_keypoints, batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    if accelerator.is_main_process:
        splits = before.get("splits", {}) | {command.split: found.to_dict()}
        content = {"data": dataset.rows.name, "fingerprint": dataset.fingerprint, "splits": splits}
        write_json_with_checksum(path, content)
        save_per_image(path.parent / "localization" / f"{command.split}.csv", found, maps=command.per_map)
    accelerator.wait_for_everyone()
    return found, path


def images_of_split(rows: Rows, split: str, path: Path) -> np.ndarray:
    indices = rows.split_indices(split)
    if not len(indices):
        raise UserError(f"{path}: no images in the split {split!r}; choose another --split")
    return indices


def save_per_image(path: Path, found: Localization, *, maps: bool) -> None:
    """The figures of the sight for every image; those of each map only on request, because there may be many."""
    from ..console.files import as_csv, make_folder, write

    names = [name for name in found.per_image if maps or name == "image" or name in LOCALIZATION_LABELS]
    columns = [
        [f"{value:.4g}" if isinstance(value, float) else value for value in found.per_image[name]] for name in names
    ]
    lines = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    make_folder(path.parent)
    write(path, as_csv(names, lines))


def previous_results(path: Path, dataset: EvaluationData) -> dict[str, Any]:
    """The content of a results file, {} if there is none; an error if it is about other data."""
    from ..load import check_same_data

    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it and run again") from error
    check_same_data(path, known, dataset)
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

        def show() -> None:
            console = Console(highlight=False)
            console.print(f"{escape(str(command.run))}, split {command.split!r}: {counted(found.n)}", soft_wrap=True)
            console.print(found.table())
            print_notes(console, found.notes)
            print(f"Results saved to {path}.")

        present(command, {"file": str(path)} | found.to_dict(), show)
    return 0
