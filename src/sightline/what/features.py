"""A frozen backbone's features, computed once and kept under a fingerprint of everything they depend on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..checkpoint import load_tensors, save_tensors
from ..data.batches import Batches
from ..data.images import Canvas
from ..data.rows import Rows, fingerprint
from ..errors import UserError
from ..vit import Input, ViT


@torch.no_grad()
def cls_features(
    vit: ViT,
    rows: Rows,
    indices: np.ndarray,
    expects: Input,
    accelerator: Accelerator,
    folder: Path,
    *,
    batch: int,
    workers: int,
) -> np.ndarray:
    """float32 [n, D]: the CLS token of every row, in the order of `indices`."""
    path = folder / f"features-{feature_print(vit, rows, indices, expects, accelerator)}.safetensors"
    if path.exists():
        return load_tensors(path)[0]["features"].numpy()
    vit.to(accelerator.device).eval()
    batches = Batches(
        rows, indices, Canvas.of(expects), batch, shuffle=False, seed=0, workers=workers, masks=False,
        rank=accelerator.process_index, world=accelerator.num_processes,
    )  # fmt: skip
    parts = []
    for some in batches.epoch(0):
        with accelerator.autocast():
            images = some.images.to(accelerator.device).float() / 255
            if len(some):
                parts.append((some.indices.cpu().numpy(), vit(images).cls.float().cpu().numpy()))
    batches.close()
    gathered = {int(i): row for numbers, rows_ in gather_object(parts) for i, row in zip(numbers, rows_, strict=True)}
    features = np.stack([gathered[int(i)] for i in indices])
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
        save_tensors(path, {"features": torch.from_numpy(features)}, {"rows": rows.name, "n": len(indices)})
    accelerator.wait_for_everyone()
    return features


def feature_print(vit: ViT, rows: Rows, indices: np.ndarray, expects: Input, accelerator: Accelerator) -> str:
    digest = hashlib.sha256(
        f"{fingerprint(rows.take(indices))} {vit.config} {expects} {accelerator.mixed_precision}".encode()
    )
    for name, tensor in vit.state_dict().items():
        if not name.startswith(("head.", "fc_norm.")):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:24]
