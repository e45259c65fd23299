"""A frozen backbone's features, computed once and kept under a fingerprint of everything they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..data.cache import fingerprint
from ..data.images import Canvas
from ..data.rows import Rows
from ..errors import UserError
from ..metrics.inference import inference_batches, map_batches
from ..training.checkpoint import load_tensors, save_tensors
from ..vit.model import Input, ViT
from ..vit.weights import weights_sha256

FORMAT = 2
HEADS = ("head.", "fc_norm.")  # come after the features


def cls_features(
    vit: ViT,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    folder: Path,
    *,
    decoded: Path | None = None,
    batch: int,
    workers: int,
) -> np.ndarray:
    """float32 [n, D]: the CLS token of every row, in the order of `indices`."""
    return kept_features(
        lambda images: vit(images).cls, [vit], rows, indices, expects, accelerator, folder,
        decoded=decoded, batch=batch, workers=workers,
    )  # fmt: skip


def kept_features(
    embed: Callable[[Tensor], Tensor],
    modules: Sequence[nn.Module],
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    folder: Path,
    *,
    decoded: Path | None = None,
    batch: int,
    workers: int,
) -> np.ndarray:
    """float32 [n, ...]: what `embed` makes of every row's picture, computed now or found in `folder`.

    `modules` are all that it works with: their weights and what they print as must say everything about it.
    Decoded pictures are kept in the folder `decoded`, where one is named: others may look at them, too.
    """
    path, there = folder, False
    if accelerator.is_main_process:
        path = folder / f"features-{feature_print(modules, rows, indices, expects, accelerator)}.safetensors"
        there = path.exists()
    path, there = broadcast_object_list([path, there])  # of the main process: all must go the same way
    if there:
        return load_tensors(path)[0]["features"].numpy()
    for module in modules:
        module.to(accelerator.device).eval()
    batches = inference_batches(rows, indices, expects, accelerator, batch=batch, workers=workers, cache=decoded)
    try:
        features = map_batches(lambda images, _: embed(images), batches, accelerator)
    finally:
        batches.close()
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
        save_tensors(path, {"features": torch.from_numpy(features)}, {"rows": rows.name, "n": len(indices)})
    accelerator.wait_for_everyone()
    return features


def feature_print(
    modules: Sequence[nn.Module], rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator
) -> str:
    """Changes with the files (their sizes and times of change, or checksums), the weights and the arithmetic."""
    files = fingerprint(rows, Canvas.of(expects), indices)
    made_by = [f"{module!r} {weights_sha256(module, without=HEADS)}" for module in modules]
    arithmetic = f"{accelerator.device.type} {accelerator.mixed_precision}"
    facts = f"{FORMAT} {files} {expects} {arithmetic} {made_by}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
