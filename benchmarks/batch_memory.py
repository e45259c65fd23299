"""Memory of batch predictions without decoding processes: `python benchmarks/batch_memory.py [--images N]`.

With decoding processes (`benchmarks/batch.py`), what is counted for each depends on how much they share with others.
Here there is one process, and its resident memory is all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import torch

from batch import BATCH, CHUNK, make_collection, run_command
from sightline.config import Predict

TIMES = 5  # every shard is read, so that fewer images have to be made
POINTS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--folder", type=Path, default=Path("runs/batch-memory"), help="is emptied first, and removed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batch_memory_cpu.json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(options.folder, ignore_errors=True)
    run, shards, _ = make_collection(options.folder, options.images // TIMES, options.side)
    out, parts = options.folder / "parts", options.images // CHUNK
    command = Predict(run, tuple(shards) * TIMES, out=out, chunk=CHUNK, batch=BATCH, device="cpu", workers=0)
    points: list[dict[str, float]] = []

    def watch(process: subprocess.Popen, done: int) -> None:
        if done > len(points) * parts / POINTS:
            rss = psutil.Process(process.pid).memory_info().rss / 2**20
            points.append({"parts": done, "rss_mib": round(rss, 1)})

    assert run_command(command, watch) == 0, "it was not disturbed"
    result = {
        "command": f"python benchmarks/batch_memory.py --images {options.images} --side {options.side}",
        "images": options.images, "parts": parts, "torch": torch.__version__, "points": points,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
