"""Settings of the commands that go through a collection of images: predictions, and features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from .flags import PREDICTIONS, Writes
from .limits import Checked, Count, Processes


@dataclass(frozen=True)
class ToParts(Checked):
    """A result of one Parquet file per chunk of images."""

    run: Annotated[Positional[str | Path], arg(metavar="RUN")]
    """Run folder, its URL (s3://, gs://, …), or hf:OWNER/NAME."""
    images: Annotated[Positional[tuple[str | Path, ...]], arg(metavar="INPUT …")]
    """Images, folders of images, tables (.csv, .parquet) with a column image, or tar shards; on the disk or by URL. Of
    a folder with rows.csv, the rows listed there; tar shards also as shard-{000..099}.tar."""
    out: Annotated[str | Path | None, arg(metavar="PATH|URL"), Writes()] = None
    """Folder or URL: one Parquet file per chunk, continued if some are there."""
    shard: str | None = None
    """Only every n-th chunk, from the i-th on, as i/n with i from 0 (0/8, 1/8, …, 7/8), for n machines or jobs."""
    chunk: Count = 1024
    """Images per Parquet file."""
    engine: Literal["local", "ray"] = "local"
    """This machine, or a Ray cluster: that of RAY_ADDRESS, or else one started on this machine."""
    workers: Processes = 2
    """Decoding processes; with --engine ray, copies of the model, each with a GPU or a CPU core of its own."""
    intervention: bool = True
    """Apply the intervention saved with the run, if any."""
    batch: Count = 64
    """Images per batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` takes the GPU if there is one."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Predict(ToParts):
    """Predict the classes of images without labels, of a few or of millions."""

    out: Annotated[str | Path | None, arg(metavar="PATH|URL"), PREDICTIONS] = None
    """A .csv, .json or .parquet file; or a folder or URL: one Parquet file per chunk, continued if some are there.
    Default: CSV on standard output."""
    distance: bool = True
    """In Parquet: also the distance to the training images; the first time it reads up to 2,048 of these."""
    overlay: Annotated[Path | None, Writes()] = None
    """Folder for images of the sight, for methods that do not see everything."""
    mask: Path | None = None
    """For a single image: a mask, bright where the model may look, in place of its own sight."""

    kind: ClassVar[str] = "predict"


@dataclass(frozen=True)
class Embed(ToParts):
    """Write the features and sights of images to Parquet."""

    kind: ClassVar[str] = "embed"
