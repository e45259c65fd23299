"""Masks in place of the data's own, from a folder or made once by a program: wherever they count it is said whose they
are, and which weights made them, so that no figure against them passes for one against true masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator

from ..config import Audit, Stress
from ..console.terminal import bar
from ..data.rows import Rows
from ..errors import UserError
from ..load import Model

if TYPE_CHECKING:
    from ..load import EvaluationData


def with_other_masks(
    rows: Rows, at: np.ndarray, command: Stress | Audit, model: Model, asked: EvaluationData, accelerator: Accelerator
) -> tuple[Rows, str]:
    """The rows, those `at` these places with the masks of --masks, and words that go on after 'masks'; without --masks
    the rows as they are, and no words."""
    if command.masks is None:
        return rows, ""
    if model.method.needs_masks:
        raise UserError("--masks: this method is told by masks where to look, so others would change its answers")
    from ..methods.given_mask import masks_in, saliency, same_saliency
    from ..where.mask_files import write_masks

    where = saliency(command.masks, command.seed)
    if where is None:
        masks = masks_in(rows, Path(command.masks))
        if not any(masks[i] for i in at):
            raise UserError(f"{command.masks}: has no mask for any of these pictures, such as {rows.images[at[0]]}")
        return replace(rows, masks=masks), f"from the folder {command.masks}"
    home = command.cache or model.run.folder / "masks"
    home = home if asked.own else home / asked.fingerprint[:8]  # whose pictures may have the same names and sizes
    with bar("discovering masks", len(at)) as tick:
        made = write_masks(
            where, rows.take(at), model.expects, home, accelerator,
            batch=command.batch, workers=command.workers, progress=tick,
        ).masks  # fmt: skip
    assert made is not None
    by_place = dict(zip(at.tolist(), made, strict=True))
    masks = [by_place.get(i, "") for i in range(len(rows))]
    return replace(rows, masks=masks), f"discovered by {command.masks}@{same_saliency(where, {})[:12]}"
