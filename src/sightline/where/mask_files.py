"""Masks of a whole dataset, computed once by a selector and stored as PNG files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, PngImagePlugin
from torch import Tensor, nn

from ..console.files import save_image
from ..data.batches import Workers
from ..data.fingerprints import file_fingerprints
from ..data.images import DecodedImage, Preprocess, ResizeCrop, decode
from ..data.rows import Rows
from ..errors import UserError
from ..sight import Look
from ..vit.model import Input, ViT
from ..vit.weights import weights_sha256

FORMAT = 1
STAMP = "mask of"  # PNG text key: the fingerprint of the image that a mask belongs to


def write_masks(
    where: Look,
    rows: Rows,
    expects: Input,
    folder: Path | str,
    accelerator: Accelerator,
    *,
    batch: int = 64,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Rows:
    """The rows with masks of what `where` looks at: 1-bit PNG files in `folder`, written now or reused.

    Pixels outside the model's centre crop are not visible. A mask is reused if the file is complete and was made of the
    same image (by file size, or checksum in an archive) with the same weights and settings. Processes share the work.
    """
    assert isinstance(where, nn.Module), "a selector is a module, identified by its weights and repr"
    preprocess = Preprocess.of(expects)
    check_patches_divide(where, preprocess)
    home = Path(folder).resolve() / saliency_fingerprint(where, preprocess, accelerator.device)
    first = {image: i for i, image in reversed(list(enumerate(rows.images)))}
    fingerprints = dict(zip(first, file_fingerprints(rows.root, first), strict=True))
    files = {image: home / f"{_safe_path(image)}.png" for image in first}
    own = np.array_split(np.array(sorted(first.values())), accelerator.num_processes)[accelerator.process_index]
    todo = [i for i in own if not _is_current(files[rows.images[i]], fingerprints[rows.images[i]])]
    where.to(accelerator.device).eval()
    chunks = [todo[start : start + batch] for start in range(0, len(todo), batch)]
    decoding = Workers(_ImageDecoder(rows, preprocess), workers)
    done = len(own) - len(todo)
    try:
        for chunk, samples in zip(chunks, decoding.run(chunks), strict=True):
            visible = _visible(where, samples, accelerator.device)
            for i, sample, mask in zip(chunk, samples, visible, strict=True):
                image, whole = rows.images[i], uncrop_mask(mask, ResizeCrop.of(sample.size, preprocess))
                _save(whole, files[image], fingerprints[image])
            done += len(chunk)
            if progress is not None:
                progress(done)
    finally:
        decoding.close()
    accelerator.wait_for_everyone()
    paths = {image: Path(os.path.relpath(file, rows.root.resolve())).as_posix() for image, file in files.items()}
    note = f"masks made by {type(where).__name__}, not annotated by people"
    return replace(rows, masks=[paths[image] for image in rows.images], notes=(*rows.notes, note))


def check_patches_divide(where: nn.Module, preprocess: Preprocess) -> None:
    """Images have the size of the model that the masks are for; the selector's patches must divide it."""
    vit, (h, w) = next((part for part in where.children() if isinstance(part, ViT)), None), preprocess.size
    if vit is None:
        return
    patch = vit.config.patch
    if h % patch or w % patch or min(h, w) < 2 * patch:
        near = max(2, round(min(h, w) / patch)) * patch
        raise UserError(
            f"--masks {type(where).__name__}: its backbone's {patch}-pixel patches do not divide images of {h}×{w}; "
            f"choose --size {near} if the model's own patches divide it, or another backbone for --masks"
        )


def saliency_fingerprint(where: nn.Module, preprocess: Preprocess, device: torch.device) -> str:
    """Depends on the selector's settings and weights, and on the preprocessing of images."""
    facts = f"{FORMAT} {where!r} {weights_sha256(where)} {preprocess} {device.type}"
    return f"{type(where).__name__.lower()}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def uncrop_mask(visible: Tensor, place: ResizeCrop) -> Image.Image:
    """A mask [h, w] of the preprocessed image as one of the whole file; preprocessing it gives exactly `visible` again.

    It has the size of the file, or of the upscaled image, so that a fine mask loses nothing on a small file.
    """
    whole = Image.new("1", place.resized)
    whole.paste(Image.fromarray(visible.cpu().numpy()), (place.left, place.top))
    size = place.size if min(a / b for a, b in zip(place.size, place.resized, strict=True)) >= 1 else place.resized
    return whole.resize(size, Image.Resampling.NEAREST)


@dataclass(frozen=True, eq=False)
class _ImageDecoder:
    """Decodes the images of some rows."""

    rows: Rows
    preprocess: Preprocess

    def __call__(self, chosen: list[int]) -> list[DecodedImage]:
        return [decode(self.rows, int(i), self.preprocess, mask=False) for i in chosen]


@torch.no_grad()
def _visible(where: Look, samples: list[DecodedImage], device: torch.device) -> Tensor:
    images = torch.stack([sample.image for sample in samples]).to(device).float() / 255
    return where.look(images).visible(tuple(images.shape[-2:])).cpu()


def _is_current(file: Path, stamp: str) -> bool:
    try:
        with Image.open(file, formats=["PNG"]) as mask:
            same = mask.info.get(STAMP) == stamp
            mask.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return same


def _save(mask: Image.Image, file: Path, stamp: str) -> None:
    """With the stamp of what it was computed from."""
    text = PngImagePlugin.PngInfo()
    text.add_text(STAMP, stamp)
    save_image(file, mask, sync=False, marked=False, pnginfo=text)


def _safe_path(image: str) -> str:
    """A relative path that stays inside its folder, whatever the image's path is."""
    parts = PurePosixPath(image.replace("\\", "/")).parts
    return "/".join("up" if part == ".." else part.replace(":", "") for part in parts if part != "/")
