"""Batch predictions on this machine: `python benchmarks/batch.py [--images N] [--out FILE]`.

Toy images in a tar file are predicted locally and with Ray, with 1, 2 and 4 workers, and once more with each engine
while a process is killed twice on the way; the files must be equal. Throughput is between the first and the last part,
so without start-up, and as a share of the model's own limit: what one process does with batches that are there already.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

import sightline
from sightline.batch.scoring import Scorer
from sightline.config import Erm, Predict
from sightline.datasets.toy import write_toy

SIDE, DISTINCT, CHUNK, BATCH = 64, 64, 64, 32


def make_collection(folder: Path, count: int) -> tuple[Path, Path]:
    """A run of the embedded backbone, and a tar file of `count` images from a few distinct files."""
    toy = write_toy(folder / "toy", train=DISTINCT, val=32, test=DISTINCT, size=SIDE)
    settings = {"backbone": "sightline-nano", "size": SIDE, "epochs": 1, "batch": 32, "workers": 0, "device": "cpu"}
    config = Erm(data=toy, out=folder / "run", **settings)
    run = sightline.train(config)
    contents = [path.read_bytes() for path in sorted((toy / "test").rglob("*.png"))]
    with tarfile.open(folder / "images.tar", "w") as archive:
        for i in range(count):
            content = contents[i % len(contents)]
            info = tarfile.TarInfo(f"{i:08d}.png")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return run, folder / "images.tar"


def model_limit(run: Path, rounds: int = 12) -> float:
    """Images per second of one process with batches that are there already; the median of the rounds."""
    score = Scorer(sightline.load(run))
    images = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8)
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        score(images)
        rates.append(BATCH / (time.perf_counter() - began))
    return sorted(rates)[rounds // 2]


def steady_rate(out: Path) -> float:
    """Images per second between the first and the last part."""
    times = sorted(path.stat().st_mtime for path in out.glob("part-*.parquet"))
    return (len(times) - 1) * CHUNK / (times[-1] - times[0])


def as_command(command: Predict) -> list[str]:
    flags = {name: getattr(command, name) for name in ("out", "chunk", "batch", "workers", "device", "engine")}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "sightline", "predict", str(command.run), *map(str, command.images), *words]


def memory_of(process: subprocess.Popen, out: Path, parts: int) -> list[float]:
    """MiB of the main process when a fifth of the parts are there, and when the last but one is."""
    seen, marks = [], [parts // 5, parts - 2]
    while process.poll() is None:
        if len(seen) < 2 and len(list(out.glob("part-*.parquet"))) >= marks[len(seen)]:
            seen.append(round(psutil.Process(process.pid).memory_info().rss / 2**20, 1))
        time.sleep(0.02)
    return seen


def local_curve(command: Predict, folder: Path, parts: int) -> list[dict[str, Any]]:
    rows = []
    for workers in (1, 2, 4):
        out = folder / f"local-{workers}"
        process = subprocess.Popen(as_command(replace(command, out=out, workers=workers)), stdout=subprocess.DEVNULL)
        memory = memory_of(process, out, parts)
        assert process.returncode == 0, "an undisturbed run succeeds"
        rows.append({"workers": workers, "images_per_second": steady_rate(out), "memory_mib": memory})
    return rows


def killed_local(command: Predict, out: Path, parts: int) -> int:
    """The main process is killed after a third and after two thirds of the parts; the same command goes on."""
    kills = 0
    for share in (1 / 3, 2 / 3):
        process = subprocess.Popen(as_command(replace(command, out=out, workers=2)), stdout=subprocess.DEVNULL)
        while len(list(out.glob("part-*.parquet"))) < share * parts:
            assert process.poll() is None, "it was to be killed first"
            time.sleep(0.01)
        process.kill()
        process.wait()
        kills += 1
    subprocess.run(as_command(replace(command, out=out, workers=2)), check=True, stdout=subprocess.DEVNULL)
    return kills


def kill_ray_workers(out: Path, parts: int, killed: list[int]) -> None:
    for share in (1 / 3, 2 / 3):
        while len(list(out.glob("part-*.parquet"))) < share * parts:
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            if process.pid not in killed and "MapWorker" in " ".join(process.cmdline()):
                process.kill()
                killed.append(process.pid)
                break


def with_ray(command: Predict, folder: Path, parts: int, copies: tuple[int, ...]) -> dict[str, Any]:
    import ray

    ray.init(num_cpus=max(2, *copies), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rows, killed = [], []
    for workers in copies:
        out = folder / f"ray-{workers}"
        sightline.predict(replace(command, out=out, engine="ray", workers=workers))
        rows.append({"workers": workers, "images_per_second": steady_rate(out)})
    out = folder / "ray-killed"
    threading.Thread(target=kill_ray_workers, args=(out, parts, killed), daemon=True).start()
    sightline.predict(replace(command, out=out, engine="ray", workers=2))
    ray.shutdown()
    return {"curve": rows, "killed": len(killed)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000, help="images; a multiple of 64")
    parser.add_argument("--copies", type=int, nargs="*", default=[1, 2, 4], help="copies of the model with Ray")
    parser.add_argument("--folder", type=Path, default=Path("runs/batch"), help="is emptied first")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batch_cpu.json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's name); by default 15: behind all other work
    torch.set_num_threads(1)
    shutil.rmtree(options.folder, ignore_errors=True)
    run, images = make_collection(options.folder, options.images)
    parts = options.images // CHUNK
    command = Predict(run, (images,), chunk=CHUNK, batch=BATCH, device="cpu")
    limits = [model_limit(run)]
    local = local_curve(command, options.folder, parts)
    kills = killed_local(command, options.folder / "local-killed", parts)
    limits.append(model_limit(run))
    ray = with_ray(command, options.folder, parts, tuple(options.copies))
    limits.append(model_limit(run))
    reference = contents(options.folder / "local-1")
    others = [path for path in sorted(options.folder.iterdir()) if path.name.startswith(("local-", "ray-"))]
    limit = sorted(limits)[1]
    for row in (*local, *ray["curve"]):
        row["share_of_limit"] = row["images_per_second"] / limit
    result = {
        "command": f"python benchmarks/batch.py --images {options.images}",
        "images": options.images, "distinct_images": DISTINCT, "side": SIDE, "parts": parts,
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "shared_with_other_work": True},
        "model_limit_images_per_second": limits,
        "local": {"curve": local, "main_process_killed": kills},
        "ray": {"curve": ray["curve"], "workers_killed": ray["killed"]},
        "files_equal": {path.name: contents(path) == reference for path in others},
    }  # fmt: skip
    assert all(result["files_equal"].values()), result["files_equal"]
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
