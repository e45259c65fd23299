"""Pictures from files to tensors: RGB in [0, 1], whatever the file's mode, size and orientation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import UserError
from ..vit import Input

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"}
RESAMPLE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Files as given, folders as the pictures in them, sorted."""
    found = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise UserError(f"{path}: no pictures in this folder ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    return found


def read_image(path: Path | str) -> Image.Image:
    """RGB, upright. Grey becomes RGB, 16 bits become 8, transparency becomes white."""
    image = ImageOps.exif_transpose(_open(path))
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image, dtype=np.float64), image.mode, path))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_mask(path: Path | str) -> Image.Image:
    """One bit per pixel: what is brighter than half counts as visible."""
    return ImageOps.exif_transpose(_open(path)).convert("L").point(lambda level: 255 * (level >= 128), mode="1")


def to_tensor(image: Image.Image, expects: Input) -> Tensor:
    """Floats [3, h, w] in [0, 1], resized and cropped as the model expects."""
    image = _fit(image, expects, RESAMPLE[expects.resample])
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 255


def mask_to_tensor(mask: Image.Image, expects: Input) -> Tensor:
    """bool [h, w], through the same geometry as its image."""
    return torch.from_numpy(np.array(_fit(mask.convert("L"), expects, Image.Resampling.NEAREST))) >= 128


def _open(path: Path | str) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
        return image
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise UserError(f"{path}: not an image that can be read; remove it, or convert it to PNG or JPEG") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: a damaged image ({error}); restore it or remove it") from error


def _to_8_bits(values: np.ndarray, mode: str, path: Path | str) -> np.ndarray:
    top = 1.0 if mode == "F" else 65535.0
    if values.size and (values.min() < 0 or values.max() > top):
        raise UserError(
            f"{path}: pixel values from {values.min():g} to {values.max():g} in mode {mode}; save it as 8 or 16 bits"
        )
    return np.round(values / top * 255).astype(np.uint8)


def _fit(image: Image.Image, expects: Input, resample: Image.Resampling) -> Image.Image:
    """Resize so that `size / crop` is just covered, then cut `size` from the centre."""
    h, w = expects.size
    scale = max(math.floor(h / expects.crop) / image.height, math.floor(w / expects.crop) / image.width)
    image = image.resize((max(w, round(image.width * scale)), max(h, round(image.height * scale))), resample)
    left, top = round((image.width - w) / 2), round((image.height - h) / 2)
    return image.crop((left, top, left + w, top + h))
