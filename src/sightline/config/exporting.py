"""Settings for exporting and publishing a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .flags import RunFolder, Writes
from .limits import Checked, Count

ONNX = {"model.onnx": ("sightline",), "model.json": ("weights_sha256",), "README.md": ("ightline",)}


@dataclass(frozen=True)
class Export(Checked):
    """Export a model to ONNX, with inputs for part and token removal; check it against PyTorch; write a model card."""

    run: RunFolder
    """Run folder."""
    out: Annotated[Path | None, Writes(ONNX)] = None
    """Output folder. Default: RUN/onnx."""
    images: tuple[Path, ...] = ()
    """Images, or folders of images, for the comparison of ONNX with PyTorch. Default: some of the run's data."""
    limit: Count = 8
    """Maximum number of these images."""
    intervention: bool = True
    """Make the intervention saved with the run, if any, the default of the removal inputs."""

    @property
    def folder(self) -> Path:
        return self.out or self.run / "onnx"


@dataclass(frozen=True)
class Push(Checked):
    """Publish a run on the Hugging Face Hub: weights, settings, metrics, intervention, ONNX file and model card.

    No images, predictions or optimiser state. `sightline.load("hf:OWNER/NAME")` loads it."""

    run: RunFolder
    """Run folder."""
    repository: Annotated[Positional[str], arg(metavar="OWNER/NAME")]
    """OWNER/NAME; created if necessary."""
    public: bool = False
    """Create a public repository. Default: private; an existing repository keeps its visibility."""
    images: tuple[Path, ...] = ()
    """Images, or folders of images, for the certificate in the model card. Default: some of the run's data."""
    limit: Count = 8
    """Maximum number of these images."""
    message: str = "A Sightline run"
    """Commit message."""
