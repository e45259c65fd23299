"""DICOM radiographs as 8-bit RGB images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from ..errors import UserError
from .formats import check_size


def read_dicom(source: Path | BinaryIO, name: str | None = None) -> Image.Image:
    """A radiograph as RGB, dense is bright: by its window, else 8 bits unchanged and more bits stretched to 8."""
    name = name or str(source)
    try:
        import pydicom
    except ImportError:
        raise UserError(f"{name}: DICOM needs pydicom; install it with: pip install 'sightline[medical]'") from None
    try:
        data = pydicom.dcmread(source)
        check_size((int(data.Columns) * int(data.get("NumberOfFrames") or 1), int(data.Rows)), name)
        pixels = data.pixel_array
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except UserError:
        raise
    except Exception as error:  # pydicom and its decoders fail in many ways
        raise UserError(f"{name}: not a readable DICOM image ({error}); restore or remove it") from None
    photometric = data.get("PhotometricInterpretation", "MONOCHROME2")
    if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    if pixels.ndim != 2 or photometric not in ("MONOCHROME1", "MONOCHROME2"):
        shape = " x ".join(map(str, pixels.shape))
        raise UserError(f"{name}: {photometric} of {shape} {pixels.dtype}; expected one grey image, or 8-bit RGB")
    grey = _grey_levels(pixels, data)
    grey = 1 - grey if photometric == "MONOCHROME1" else grey
    return Image.fromarray(np.round(255 * grey).astype(np.uint8)).convert("RGB")


def _grey_levels(pixels: np.ndarray, data: Any) -> np.ndarray:
    """From 0 to 1, by the file's window (DICOM PS3.3 C.11.2.1.2), or by the range of the type or of the values."""
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
    """A file may have several windows; the first is its default."""
    if value is None or value == "":
        return None
    return float(value if isinstance(value, (str, int, float)) else value[0])
