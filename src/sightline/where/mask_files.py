"""Masks of a whole data set, computed once and kept as files."""

from __future__ import annotations

import contextlib
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

from ..data.batches import Workers
from ..data.fingerprints import file_stamps
from ..data.images import Canvas, Placement, Sample, decode
from ..data.rows import Rows
from ..errors import UserError
from ..sight import Look
from ..vit.model import Input, ViT
from ..vit.weights import weights_sha256

FORMAT = 1
STAMP = "mask of"  # the key under which a mask says which picture it is of


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
    """The rows with masks of what `where` looks at: 1-bit PNG files in `folder`, written now or found there.

    What lies outside the model's crop of a picture is not visible. A mask is re-used if it is whole, and made
    of the same picture (by its size, or checksum in an archive) with the same weights and settings. Every process
    does its share.
    """
    assert isinstance(where, nn.Module), "what looks is a module, whose weights and repr say what it is"
    canvas = Canvas.of(expects)
    check_odd_patches(where, canvas)
    home = Path(folder).resolve() / look_print(where, canvas, accelerator.device)
    first = {image: i for i, image in reversed(list(enumerate(rows.images)))}
    stamps = dict(zip(first, file_stamps(rows.root, first), strict=True))
    files = {image: home / f"{_harmless(image)}.png" for image in first}
    mine = np.array_split(np.array(sorted(first.values())), accelerator.num_processes)[accelerator.process_index]
    todo = [i for i in mine if not _usable(files[rows.images[i]], stamps[rows.images[i]])]
    where.to(accelerator.device).eval()
    turns = [todo[start : start + batch] for start in range(0, len(todo), batch)]
    decoding = Workers(_Pictures(rows, canvas), workers)
    done = len(mine) - len(todo)
    try:
        for turn, samples in zip(turns, decoding.run(turns), strict=True):
            visible = _visible(where, samples, accelerator.device)
            for i, sample, mask in zip(turn, samples, visible, strict=True):
                image, whole = rows.images[i], placed_back(mask, Placement.of(sample.size, canvas))
                _save(whole, files[image], stamps[image])
            done += len(turn)
            if progress is not None:
                progress(done)
    finally:
        decoding.close()
    accelerator.wait_for_everyone()
    paths = {image: Path(os.path.relpath(file, rows.root.resolve())).as_posix() for image, file in files.items()}
    note = f"masks by {type(where).__name__}, not by people"
    return replace(rows, masks=[paths[image] for image in rows.images], notes=(*rows.notes, note))


def check_odd_patches(where: nn.Module, canvas: Canvas) -> None:
    """The pictures are brought to the size of the model that masks are for; what looks may have other patches."""
    vit, (h, w) = getattr(where, "vit", None), canvas.size
    if not isinstance(vit, ViT):
        return
    patch = vit.config.patch
    if h % patch or w % patch or min(h, w) < 2 * patch:
        near = max(2, round(min(h, w) / patch)) * patch
        raise UserError(
            f"masks by {type(where).__name__}: its backbone has patches of {patch} pixels, and pictures here are "
            f"{h}×{w}; choose --size {near}, if the model's own patches divide it, or another backbone for --masks"
        )


def look_print(where: nn.Module, canvas: Canvas, device: torch.device) -> str:
    """Changes with the settings and weights that look, and with how pictures are brought to size."""
    facts = f"{FORMAT} {where!r} {weights_sha256(where)} {canvas} {device.type}"
    return f"{type(where).__name__.lower()}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def placed_back(visible: Tensor, place: Placement) -> Image.Image:
    """A mask of the canvas [h, w] as one of the whole file; the canvas shows exactly `visible` of it again.

    As large as the file, or as the enlarged picture, so that nothing of a fine mask is lost on a small file.
    """
    whole = Image.new("1", place.resized)
    whole.paste(Image.fromarray(visible.cpu().numpy()), (place.left, place.top))
    size = place.size if min(a / b for a, b in zip(place.size, place.resized, strict=True)) >= 1 else place.resized
    return whole.resize(size, Image.Resampling.NEAREST)


@dataclass(frozen=True, eq=False)
class _Pictures:
    """Decodes the pictures of some rows."""

    rows: Rows
    canvas: Canvas

    def __call__(self, chosen: list[int]) -> list[Sample]:
        return [decode(self.rows, int(i), self.canvas, mask=False) for i in chosen]


@torch.no_grad()
def _visible(where: Look, samples: list[Sample], device: torch.device) -> Tensor:
    images = torch.stack([sample.image for sample in samples]).to(device).float() / 255
    return where.look(images).visible(tuple(images.shape[-2:])).cpu()


def _usable(file: Path, stamp: str) -> bool:
    try:
        with Image.open(file) as mask:
            same = mask.info.get(STAMP) == stamp
            mask.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return same


def _save(mask: Image.Image, file: Path, stamp: str) -> None:
    """Under another name first: a file that is there is a whole one."""
    text = PngImagePlugin.PngInfo()
    text.add_text(STAMP, stamp)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        mask.save(partial, format="PNG", pnginfo=text)
        partial.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"{file}: cannot be written ({error.strerror or error}); choose another folder") from error


def _harmless(image: str) -> str:
    """A path that stays inside a folder, whatever the picture's says."""
    parts = PurePosixPath(image.replace("\\", "/")).parts
    return "/".join("up" if part == ".." else part.replace(":", "") for part in parts if part != "/")
