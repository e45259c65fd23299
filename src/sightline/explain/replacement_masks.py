"""Masks that replace the data's own, read from a folder or created by a saliency method. Their source, with the
weights that made them, is reported wherever they count, so that no figure passes for one against true masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator

from ..config import Audit, Stress
from ..console.terminal import bar
from ..data.rows import Rows
from ..data.shared_cache import is_shared
from ..errors import UserError
from ..load import Model

if TYPE_CHECKING:
    from ..load import EvaluationData


def with_replacement_masks(
    rows: Rows, indices: np.ndarray, command: Stress | Audit, model: Model, dataset: EvaluationData,
    accelerator: Accelerator,
) -> tuple[Rows, str]:  # fmt: skip
    """The rows with the masks of --masks at `indices`, and their source, worded to follow 'masks'; without --masks the
    rows unchanged and an empty source."""
    if command.masks is None:
        return rows, ""
    if model.method.needs_masks:
        raise UserError("--masks: this method takes masks as input, so other masks would change its predictions")
    from ..methods.given_mask import check_saliency_weights, find_masks, saliency
    from ..where.mask_files import write_masks

    where = saliency(command.masks, command.seed)
    if where is None:
        masks = find_masks(rows, Path(command.masks))
        if not any(masks[i] for i in indices):
            first = rows.images[indices[0]]
            raise UserError(f"{command.masks}: has no mask for any of the images, such as {first}")
        return replace(rows, masks=masks), f"from the folder {command.masks}"
    shared = is_shared(command.cache)  # masks are many small files: they stay on the disk
    folder = model.run.folder / "masks" if command.cache is None or shared else command.cache
    folder = folder if dataset.own else folder / dataset.fingerprint[:8]  # other images may have the same names
    with bar("creating masks", len(indices)) as tick:
        made = write_masks(
            where, rows.take(indices), model.expects, folder, accelerator,
            batch=command.batch, workers=command.workers, progress=tick,
        ).masks  # fmt: skip
    assert made is not None
    by_index = dict(zip(indices.tolist(), made, strict=True))
    masks = [by_index.get(i, "") for i in range(len(rows))]
    return replace(rows, masks=masks), f"created by {command.masks}@{check_saliency_weights(where, {})[:12]}"
