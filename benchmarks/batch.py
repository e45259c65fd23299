"""Batch predictions on this machine: `python benchmarks/batch.py [--images N] [--out FILE]`.

Images that all differ, in tar shards, are predicted with the local engine and with Ray: undisturbed; with the command
killed (-9) twice on the way and started again; with Ray also with two workers killed. Every row is compared. A smaller
part of the collection gives the curve over 1, 2 and 4 workers.

Throughput is between the first and the last part, so without start-up, and as a share of the model's own limit: what
one process does with batches that are there already, measured before and after each run. Where the cores are shared
with other work, both depend on it, so the same is also measured in CPU time: of the model alone, and of the processes
that hold it (with the local engine the command, with Ray the workers, which decode as well).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

import sightline
from sightline.batch.parts import read_tables
from sightline.batch.scoring import Scorer
from sightline.batch.sources import list_items, read_item
from sightline.config import Erm, Predict
from sightline.datasets.toy import write_toy

SHARDS, CHUNK, BATCH = 10, 500, 50
CHECKED = 200  # images that are also predicted one by one
FEWEST = 10  # parts of the smaller collection, at least
WORKERS = (1, 2, 4)


# ---- the collection --------------------------------------------------------------------------------------------------


def make_collection(folder: Path, count: int, side: int) -> tuple[Path, list[Path], int]:
    """A run of the embedded backbone, `count` images in tar shards, and how many of their contents are distinct."""
    toy = write_toy(folder / "toy", train=64, val=32, test=64, size=side)
    settings = {"backbone": "sightline-nano", "size": side, "epochs": 1, "batch": 32, "workers": 0, "device": "cpu"}
    run = sightline.train(Erm(data=toy, out=folder / "run", **settings))
    bases = [np.asarray(Image.open(path).convert("RGB")) for path in sorted((toy / "test").rglob("*.png"))]
    digests, shards = set(), []
    for number in range(SHARDS):
        shards.append(folder / f"images-{number:03d}.tar")
        with tarfile.open(shards[-1], "w") as archive:
            for i in range(number * count // SHARDS, (number + 1) * count // SHARDS):
                content = distinct_image(bases, i)
                digests.add(hashlib.sha256(content).digest())
                info = tarfile.TarInfo(f"{i:08d}.png")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return run, shards, len(digests)


def distinct_image(bases: list[np.ndarray], number: int) -> bytes:
    """A toy image moved and brightened, with its number in the lowest bits of the first pixels."""
    side = len(bases[0])
    moved = np.roll(bases[number % len(bases)], (number // len(bases) % side, number // 7 % side), (0, 1))
    pixels = np.minimum(moved.astype(np.int64) + number % 31, 255).astype(np.uint8)
    bits = np.unpackbits(np.array([number], ">u4").view(np.uint8))
    pixels[0, : len(bits), 0] = pixels[0, : len(bits), 0] & 254 | bits
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class Limit:
    """One process with batches that are there already: images per second, and CPU milliseconds per image."""

    score: Scorer
    rounds: int = 20

    def __call__(self) -> tuple[float, float]:
        """Medians of some rounds."""
        images = torch.randint(0, 256, (BATCH, 3, *self.score.model.expects.size), dtype=torch.uint8)
        rates, costs = [], []
        for _ in range(self.rounds):
            began, spent = time.perf_counter(), time.process_time()
            self.score(images)
            rates.append(BATCH / (time.perf_counter() - began))
            costs.append(1000 * (time.process_time() - spent) / BATCH)
        return statistics.median(rates), statistics.median(costs)


def parts_in(out: Path) -> list[Path]:
    return list(out.glob("part-*.parquet"))


def steady_rate(out: Path) -> float:
    """Images per second between the first and the last part."""
    times = sorted(path.stat().st_mtime for path in parts_in(out))
    return (len(times) - 1) * CHUNK / (times[-1] - times[0])


def measure(process: psutil.Process) -> tuple[float, float]:
    """MiB, those that several processes share divided among them, and CPU seconds so far; 0 if it has ended."""
    try:
        times = process.cpu_times()
        return process.memory_full_info().pss / 2**20, times.user + times.system
    except psutil.Error:
        return 0.0, 0.0


Watch = Callable[[subprocess.Popen, int], object]  # given the command and the number of parts that are there


def run_command(command: Predict, watch: Watch) -> int:
    """The exit code of `sightline predict`; `watch` is called all the while."""
    names = ("out", "chunk", "batch", "workers", "device", "engine")
    flags = [word for name in names for word in (f"--{name}", str(getattr(command, name)))]
    words = [sys.executable, "-m", "sightline", "predict", str(command.run), *map(str, command.images), *flags]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        watch(process, len(parts_in(Path(str(command.out)))))
        time.sleep(0.1)
    return process.returncode


@dataclass
class Usage:
    """Memory and CPU time over the run: of the command, and of its workers together."""

    parts: int
    ray: bool
    points: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, process: subprocess.Popen, done: int) -> None:
        if not done or done < len(self.points) * self.parts / 20:
            return
        workers = ray_workers() if self.ray else psutil.Process(process.pid).children(recursive=True)
        each = [measure(one) for one in (psutil.Process(process.pid), *workers)]
        if len(each) == 1 or (0.0, 0.0) in each:  # some have ended
            return
        found = {"command": each[0], "workers": np.sum(each[1:], axis=0)}
        memory, cpu = ({name: round(float(one[k]), 1) for name, one in found.items()} for k in (0, 1))
        self.points.append({"parts": done, "memory_mib": memory, "cpu_seconds": cpu})

    def cpu_per_image(self) -> dict[str, float]:
        """Milliseconds, between the first and the last point."""
        first, last = self.points[0], self.points[-1]
        images = (last["parts"] - first["parts"]) * CHUNK
        return {k: 1000 * (last["cpu_seconds"][k] - first["cpu_seconds"][k]) / images for k in ("command", "workers")}


def undisturbed(command: Predict, limit: Limit, parts: int) -> dict[str, Any]:
    usage = Usage(parts, command.engine == "ray")
    before, began = limit(), time.perf_counter()
    code = run_command(command, usage)
    seconds = time.perf_counter() - began
    assert code == 0, "an undisturbed run succeeds"
    (limits, model_cpu), rate = zip(before, limit(), strict=True), steady_rate(Path(str(command.out)))
    cpu = usage.cpu_per_image()
    holders = cpu["workers" if usage.ray else "command"]
    return {
        "workers": command.workers, "images_per_second": rate, "limit_before_and_after": limits,
        "share_of_limit": rate / statistics.mean(limits),
        "share_of_limit_lowest_highest": [rate / max(limits), rate / min(limits)],
        "cpu_ms_per_image": {"model_before_and_after": model_cpu, **cpu},
        "cpu_share_of_limit": statistics.mean(model_cpu) / holders,
        "seconds_with_start": round(seconds, 1), **({"usage": usage.points} if parts >= 100 else {}),
    }  # fmt: skip


# ---- killed on the way -----------------------------------------------------------------------------------------------


def ray_workers() -> list[psutil.Process]:
    """The copies of the model on the cluster that this process has started."""
    return [one for one in psutil.Process().children(recursive=True) if "MapWorker" in " ".join(cmdline(one))]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def killed_twice(command: Predict, parts: int, worker_shares: tuple[float, ...] = ()) -> dict[str, Any]:
    """The command is killed after 1/3 and 2/3 of the parts, Ray's workers where asked for; then started again."""
    out, events = Path(str(command.out)), []
    shares = iter(worker_shares)
    next_worker = next(shares, 2.0)
    for share in (1 / 3, 2 / 3, 2.0):
        written = {path.name: path.stat().st_mtime_ns for path in parts_in(out)}

        def watch(process: subprocess.Popen, done: int, share: float = share) -> None:
            nonlocal next_worker
            if done >= share * parts:
                process.kill()
                process.wait()
                events.append({"killed": "command", "parts": done})
            elif done >= next_worker * parts and (found := ray_workers()):
                found[0].kill()
                events.append({"killed": "worker", "parts": done})
                next_worker = next(shares, 2.0)

        code = run_command(command, watch)
        assert (code == -9) == (share < 1), f"exit code {code}"
        kept = [name for name, at in written.items() if (out / name).stat().st_mtime_ns == at]
        assert len(kept) == len(written), "finished parts are not written again"
    return {"workers": command.workers, "events": events, "starts": 3}


@dataclass(frozen=True)
class Work:
    """The collection, and a smaller one."""

    whole: Predict
    few: Predict
    folder: Path
    limit: Limit

    def measure(self, engine: str, parts: int, few_parts: int) -> dict[str, Any]:
        whole = replace(self.whole, engine=engine, workers=2)
        one = undisturbed(replace(whole, out=self.folder / f"{engine}-2"), self.limit, parts)
        shares = (1 / 5, 1 / 2) if engine == "ray" else ()
        killed = killed_twice(replace(whole, out=self.folder / f"{engine}-killed"), parts, shares)
        curve = []
        for workers in WORKERS:
            out = self.folder / f"few-{engine}-{workers}"
            curve.append(undisturbed(replace(self.few, engine=engine, workers=workers, out=out), self.limit, few_parts))
        return {"undisturbed": one, "killed": killed, "curve": curve}


# ---- what must be equal ----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_in(shard: Path) -> list[str]:
    with tarfile.open(shard) as archive:
        return archive.getnames()


def compare(work: Work, shards: list[Path]) -> dict[str, Any]:
    """Files byte by byte, and the rows against the names in the shards and against single predictions."""
    equal = {}
    for kind in ("few-", "local", "ray"):
        first, *others = sorted(path for path in work.folder.iterdir() if path.name.startswith(kind))
        if kind != "few-":
            first, others = work.folder / "local-2", [one for one in (first, *others) if one.name != "local-2"]
        reference = contents(first)
        equal |= {f"{first.name} = {other.name}": contents(other) == reference for other in others}
    rows = [row for table in read_tables(str(work.folder / "ray-killed")) for row in table.to_pylist()]
    names = [f"{shard}/{name}" for shard in shards for name in names_in(shard)]
    model, items = sightline.load(work.whole.run), list_items(shards)
    differences = []
    for i in range(0, len(rows), max(1, len(rows) // CHECKED)):
        single = model.predict(read_item(items[i]))
        differences.append(float(np.abs(single.probabilities[0].numpy() - rows[i]["probabilities"]).max()))
    return {
        "files": equal,
        "rows": len(rows),
        "distinct_images_in_rows": len({row["image"] for row in rows}),
        "rows_are_the_members_of_the_shards_in_order": [row["image"] for row in rows] == names,
        "rows_with_an_error": sum(row["error"] is not None for row in rows),
        "predicted_one_by_one": len(differences),
        "largest_difference_of_a_probability": max(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000, help=f"images; a multiple of {SHARDS * CHUNK:,}")
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--folder", type=Path, default=Path("runs/batch"), help="is emptied first, and removed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batch_cpu.json")
    options = parser.parse_args()
    import ray

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's name); by default 15: behind all other work
    torch.set_num_threads(1)
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    run, shards, distinct = make_collection(folder, options.images, options.side)
    limit = Limit(Scorer(sightline.load(run)))
    settings: dict[str, Any] = {"chunk": CHUNK, "batch": BATCH, "device": "cpu"}
    parts, in_shard = options.images // CHUNK, options.images // SHARDS // CHUNK
    some = shards[: -(-FEWEST // in_shard)]
    few = len(some) * in_shard
    work = Work(Predict(run, tuple(shards), **settings), Predict(run, tuple(some), **settings), folder, limit)
    engines = {"local": work.measure("local", parts, few)}
    cluster = ray.init(num_cpus=max(WORKERS), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]
    engines["ray"] = work.measure("ray", parts, few)
    ray.shutdown()
    result = {
        "command": f"python benchmarks/batch.py --images {options.images} --side {options.side}",
        "images": options.images, "distinct_contents": distinct, "side": options.side, "parts": parts,
        "images_of_the_curve": few * CHUNK, "torch": torch.__version__, "ray_version": ray.__version__,
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "shared_with_other_work": True},
        **engines, "equal": compare(work, shards),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    assert all(result["equal"]["files"].values()), result["equal"]["files"]
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
