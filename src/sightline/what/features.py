"""Features of a frozen backbone, computed once and cached under a fingerprint of everything they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..data.cache import cache_fingerprint
from ..data.images import Preprocess
from ..data.rows import Rows
from ..data.shared_cache import fetch, on_disk, publish
from ..errors import UserError
from ..metrics.inference import inference_batches, map_batches
from ..training.checkpoint import load_cached, load_tensors, save_tensors
from ..vit.model import Input, ViT
from ..vit.weights import HEAD_PREFIXES, weights_sha256

FORMAT = 2


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
    return cached_features(
        lambda images: vit(images).cls, [vit], rows, indices, expects, accelerator, folder,
        decoded=decoded, batch=batch, workers=workers,
    )  # fmt: skip


def cached_features(
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
    """float32 [n, ...]: `embed` of every row's image, computed now or read from `folder`.

    `modules` are all that `embed` uses; their weights and repr identify it. With the folder `decoded`, decoded images
    are cached there for this and other uses.
    """
    folder = on_disk(folder)
    name, exists, found = "", False, None
    if accelerator.is_main_process:
        name = f"features-{features_fingerprint(modules, rows, indices, expects, accelerator)}.safetensors"
        fetch(folder / name)
        found = load_cached(folder / name)
        exists = found is not None
    name, exists = broadcast_object_list([name, exists])  # from the main process: all must take the same branch
    path = folder / name
    if exists:
        fetch(path)  # for a process on another machine
        return (load_tensors(path)[0] if found is None else found)["features"].numpy()
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
        publish(path)
    accelerator.wait_for_everyone()
    return features


def features_fingerprint(
    modules: Sequence[nn.Module], rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator
) -> str:
    """Depends on the files (sizes and modification times, or checksums), the weights and the arithmetic."""
    files = cache_fingerprint(rows, Preprocess.of(expects), indices)
    made_by = [f"{module!r} {weights_sha256(module, without=HEAD_PREFIXES)}" for module in modules]
    arithmetic = f"{accelerator.device.type} {accelerator.mixed_precision}"
    facts = f"{FORMAT} {files} {expects} {arithmetic} {made_by}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
