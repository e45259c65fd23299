"""Settings of the HTML report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from .flags import SOFTWARE, CacheFolder, Writes
from .limits import Count, Seed, Whole
from .measuring import Evaluate


@dataclass(frozen=True)
class Audit(Evaluate):
    """Write an HTML report of a trained model (one offline file): errors, sight, proof and interventions."""

    split: Literal["val", "test"] = "test"
    """Split to report on."""
    sample_of: str | None = None
    """In place of DATA, anything that `predict` reads, also at a URL, if it has labels (a column label, .cls files in
    tar shards, or a folder per class): random images are copied into the run and reported on."""
    sample: Count | None = None
    """With --sample-of: number of images. Default: 1,000."""
    masks: str | None = None
    """Masks in place of those of the data: a folder of masks under the images' paths, or tokencut:BACKBONE,
    found:BACKBONE (unsupervised), u2net:FILE.onnx (supervised), computed once; the report names the source."""
    examples: Whole = 200
    """Maximum number of images shown."""
    quick: bool = False
    """Fewer images for background swaps and distances; no test of the label information in the mask shape."""
    seed: Seed = 0
    """Random seed of the images shown and the backgrounds swapped."""
    out: Annotated[Path | None, Writes({"": (SOFTWARE,)})] = None
    """HTML file. Default: audit.html in the run (for --split val, audit-val.html), or in the results folder of other
    data or of the intervention."""
    cache: CacheFolder = None
    """Folder or URL that caches decoded images, such as the one used in training."""
