"""How long a large CSV takes to read and check, without opening pictures, and how much memory.

    python benchmarks/rows.py --count 1000000 --out rows.json

The pictures do not exist, so every row also costs a failed look at the disk, and is reported as missing.
"""

from __future__ import annotations

import csv
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from record import record
from sightline.data.check import check
from sightline.data.rows import read_rows


@dataclass(frozen=True)
class RowsSpeed:
    count: int = 1_000_000
    out: Path | None = None


def main() -> None:
    config = tyro.cli(RowsSpeed, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "label", "group_place", "mask", "box", "split"])
            for i in range(config.count):
                split = ("train", "train", "train", "val", "test")[i % 5]
                name = f"photos/camera{i % 40:02d}/picture_{i:08d}.jpg"
                box = "10 20 110 140"
                writer.writerow(
                    [name, f"species{i % 100:03d}", ("land", "water")[i // 7 % 2], f"masks/{i}.png", box, split]
                )
        began = time.perf_counter()
        rows = read_rows(path)
        read = time.perf_counter()
        report = check(rows, open_images=False)
        checked = time.perf_counter()
    figures = {
        "rows": len(rows),
        "seconds_to_read": round(read - began, 2),
        "seconds_to_check": round(checked - read, 2),
        "seconds": round(checked - began, 2),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "findings": len(report.findings),
    }
    print(figures)
    if config.out:
        record(config.out, "cpu", figures)


if __name__ == "__main__":
    main()
