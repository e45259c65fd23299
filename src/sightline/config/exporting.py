"""How a trained model leaves its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Export:
    """Write a model as ONNX, for any number of pictures, with parts and distances to switch as inputs; hold it against
    torch, and describe it (README.md, a model card)."""

    run: Positional[Path]
    out: Path | None = None
    """The folder to write to. Default: RUN/onnx."""
    images: tuple[Path, ...] = ()
    """Pictures, or folders of them, to hold the file against the model on. Default: some of the run's data."""
    limit: int = 8
    """Take at most this many of them."""
    intervention: bool = True
    """Make the intervention that is kept with the run, if any, the switches' default."""

    @property
    def folder(self) -> Path:
        return self.out or self.run / "onnx"


@dataclass(frozen=True)
class Push:
    """Publish a run on the Hugging Face hub: weights, run.json, figures, intervention, the ONNX file if there is one,
    and a model card; no pictures, answers or states of training. `sightline.load("hf:OWNER/NAME")` loads it."""

    run: Positional[Path]
    repository: Positional[str]
    """OWNER/NAME; it is made if need be."""
    public: bool = False
    """For everybody to see. Default: private; a repository that is there stays as it is."""
    images: tuple[Path, ...] = ()
    """Pictures, or folders of them, for the card's certificate. Default: some of the run's data."""
    limit: int = 8
    """Take at most this many of them."""
    message: str = "A Sightline run"
    """Of the commit."""
