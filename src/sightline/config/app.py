"""A page to look at a model in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class App:
    """Look at what a model sees, and correct it, in your browser: drop parts, draw what it may see, compare, save."""

    run: Positional[Path]
    data: Positional[Path | None] = None
    """Where the run's data are now."""
    layout: str | None = None
    """Of published data, perhaps with an option."""
    host: str = "127.0.0.1"
    """Who may open the page: by default this machine alone; 0.0.0.0: all who can reach it, without a password."""
    port: int | None = None
    """Default: the first that is free, from 7860 on."""
    browser: bool = False
    """Open the page at once."""
    sample: int = 1000
    """At most so many training pictures tell how far patches usually lie from their part."""
    batch: int = 16
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache: Path | None = None
    """Take decoded pictures from this folder, such as the one of training, and keep them there."""
