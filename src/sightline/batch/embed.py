"""`sightline embed`: features and sights of a collection of images, in Parquet."""

from __future__ import annotations

from ..config import Embed
from ..console.terminal import is_main_process
from ..errors import UserError
from ..training.distributed import make_accelerator
from .job import report, write_result
from .parts import Summary


def embed(command: Embed) -> Summary:
    """Write the features and sights of all images of this shard."""
    if command.out is None:
        raise UserError("--out: missing; name a folder or a URL for the Parquet files")
    return write_result(command, make_accelerator(command.device))


def run_command(command: Embed) -> int:
    summary = embed(command)
    return report("Features", str(command.out), summary) if is_main_process() else 0
