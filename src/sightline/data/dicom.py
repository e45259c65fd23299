"""DICOM radiographs as 8-bit RGB images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from ..errors import UserError


def read_dicom(source: Path | BinaryIO) -> Image.Image:
    """A radiograph as RGB: bright is dense, within its window, or else 8 bits as they are and more bits stretched."""
    try:
        import pydicom
    except ImportError:
        raise UserError(f"{source}: DICOM needs pydicom; install it with: pip install 'sightline[medical]'") from None
    try:
        data = pydicom.dcmread(source)
        pixels = data.pixel_array
    except FileNotFoundError:
        raise UserError(f"{source}: no such file") from None
    except Exception as error:  # pydicom and its decoders fail in many ways
        raise UserError(f"{source}: not a DICOM picture that can be read ({error}); restore it or remove it") from None
    kind = data.get("PhotometricInterpretation", "MONOCHROME2")
    if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    if pixels.ndim != 2 or kind not in ("MONOCHROME1", "MONOCHROME2"):
        shape = " x ".join(map(str, pixels.shape))
        raise UserError(f"{source}: {kind} of {shape} {pixels.dtype}; expected one grey picture, or RGB of 8 bits")
    shades = _shades(pixels, data)
    shades = 1 - shades if kind == "MONOCHROME1" else shades
    return Image.fromarray(np.round(255 * shades).astype(np.uint8)).convert("RGB")


def _shades(pixels: np.ndarray, data: Any) -> np.ndarray:
    """From 0 to 1 by the window the file names (DICOM PS3.3 C.11.2.1.2), or by what the pixels can hold or do hold."""
    from pydicom.pixels import apply_modality_lut

    centre, width = (_first(data.get(name)) for name in ("WindowCenter", "WindowWidth"))
    values = apply_modality_lut(pixels, data).astype(np.float64)
    if centre is not None and width is not None and width > 1:
        return np.clip((values - centre + 0.5) / (width - 1) + 0.5, 0, 1)
    if data.BitsStored <= 8 and pixels.dtype == np.uint8:
        return np.clip(pixels / (2.0**data.BitsStored - 1), 0, 1)
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _first(value: Any) -> float | None:
    """A file may name several windows; the first is its default."""
    if value is None or value == "":
        return None
    return float(value if isinstance(value, (str, int, float)) else value[0])
