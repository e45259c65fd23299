"""rows.csv for Waterbirds v1.0 as it lies in waterbirds.zip, with CUB's masks from cub224.zip: nothing is unpacked.

    python benchmarks/packs.py PACKS --out data/v1 [--limit 400]

PACKS: the folder of both archives, to which the paths in OUT/rows.csv lead. An archive with the masks alone will do.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from sightline.errors import UserError

CLASSES, PLACES, SPLITS = ("landbird", "waterbird"), ("land", "water"), ("train", "val", "test")


@dataclass(frozen=True)
class Packs:
    packs: Positional[Path]
    """Folder with waterbirds.zip and cub224.zip."""
    out: Path
    """Output folder."""
    limit: int | None = None
    """To try things out: at most so many images of each split and group."""


def write_rows(config: Packs) -> Path:
    birds, masks = config.packs / "waterbirds.zip", config.packs / "cub224.zip"
    for archive in (birds, masks):
        if not archive.is_file():
            raise UserError(f"{archive}: no such file")
    with zipfile.ZipFile(birds) as file:
        table = list(csv.DictReader(io.StringIO(file.read("metadata.csv").decode())))
    config.out.mkdir(parents=True, exist_ok=True)
    there = os.path.relpath(config.packs.resolve(), config.out.resolve())
    seen: dict[tuple[str, str, str], int] = {}
    with (config.out / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "group", "split", "mask"])
        for row in table:
            cell = row["split"], row["y"], row["place"]
            seen[cell] = seen.get(cell, 0) + 1
            if config.limit is not None and seen[cell] > config.limit:
                continue
            name = row["img_filename"]
            writer.writerow(
                [
                    f"{there}/waterbirds.zip/{name}", CLASSES[int(row["y"])], PLACES[int(row["place"])],
                    SPLITS[int(row["split"])], f"{there}/cub224.zip/masks/{Path(name).with_suffix('.png')}",
                ]
            )  # fmt: skip
    return config.out / "rows.csv"


if __name__ == "__main__":
    print(write_rows(tyro.cli(Packs, description=__doc__)))
