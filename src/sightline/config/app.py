"""Settings of the browser app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .flags import CacheFolder, OtherData, RunFolder
from .limits import Checked, Count, Within


@dataclass(frozen=True)
class App(Checked):
    """Inspect and correct a model in the browser: remove parts, draw a sight, compare, save the intervention."""

    run: RunFolder
    """Run folder."""
    data: OtherData = None
    """New location of the run's data."""
    layout: str | None = None
    """Layout of a published dataset, optionally NAME:VARIANT."""
    host: str = "127.0.0.1"
    """Address to serve on. Default: this machine only; 0.0.0.0: everyone who can reach it and has the token that is
    printed with the address."""
    port: Annotated[int, Within(1, 65535)] | None = None
    """Port. Default: the first free one from 7860 on."""
    browser: bool = False
    """Open the page in the browser."""
    limit: Count = 1000
    """Maximum number of training images for the distance quantiles of token removal."""
    batch: Count = 16
    """Images per batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, such as the one used in training."""
