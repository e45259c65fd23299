"""A backbone so small that tracing it is quick, runs of it, and what an exported file outputs."""

from pathlib import Path

import torch
from PIL import Image

from sightline.export.check import open_session, run_session
from sightline.vit.weights import save_backbone

from .conftest import small_vit

SETTINGS = {"size": 32, "workers": 0, "device": "cpu", "batch": 16}


def tiny(folder: Path, **changes) -> str:
    path = folder / "tiny.safetensors"
    if not path.exists():
        save_backbone(small_vit(classes=0, **{"depth": 2} | changes), path)
    return str(path)


def toy_images(toy: Path, count: int, size: int = 32) -> torch.Tensor:
    files = sorted((toy / "test").glob("*.png"))[:count]
    some = [torch.frombuffer(bytearray(Image.open(f).convert("RGB").resize((size, size)).tobytes()), dtype=torch.uint8)
            for f in files]  # fmt: skip
    return torch.stack(some).view(count, size, size, 3).permute(0, 3, 1, 2).contiguous().float() / 255


def onnx_outputs(folder: Path, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    return run_session(open_session(str(folder / "model.onnx")), given)
