"""Training on two nodes that are interrupted: `python benchmarks/nodes.py [--out FILE]`, as root.

Each node is a network namespace of this machine with a launcher of its own; they see nothing but each other, and the
disk. A run is trained undisturbed, and once more while it is interrupted three times: SIGTERM to the second node alone,
SIGTERM to both, and the second node lost (kill -9). After each, the same command is started again, as SLURM requeues a
job. Weights, log, predictions and metrics must be the same bytes.

Then a ViT-L is trained for some steps by two processes, with and without --fsdp: losses and memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from sightline.datasets.toy import write_toy
from sightline.training.checkpoint import load_tensors

NODES, ADDRESS, PORT = ("slnode0", "slnode1"), "10.77.1.", 29511
COMPARED = ("best.safetensors", "last.safetensors", "log.jsonl", "predictions/test.csv", "metrics.json")
INTERRUPTIONS = (
    ("SIGTERM to the second node", (1,), signal.SIGTERM),
    ("SIGTERM to both nodes", (0, 1), signal.SIGTERM),
    ("the second node lost (kill -9)", (1,), signal.SIGKILL),
)
METHODS = {"erm": (), "ifam": ("--parts", "2", "--selector-size", "64")}
SETTINGS = ("--backbone", "sightline-nano", "--size", "64", "--batch", "32", "--workers", "1", "--device", "cpu",
            "--deterministic", "--save-minutes", "0.05", "--resume")  # fmt: skip
LARGE = ("--backbone", "random:mae-l16", "--size", "64", "--epochs", "2", "--batch", "8", "--workers", "0",
         "--device", "cpu", "--lr", "1e-5")  # fmt: skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def two_nodes() -> Generator[None]:
    for name in NODES:
        ip("netns", "add", name)
    try:
        ip("link", "add", NODES[0], "netns", NODES[0], "type", "veth", "peer", NODES[1], "netns", NODES[1])
        for k, name in enumerate(NODES):
            ip("-n", name, "addr", "add", f"{ADDRESS}{k + 1}/24", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NODES:
            ip("netns", "del", name)


def start(rank: int, arguments: list[str], log: Path) -> subprocess.Popen:
    """The launcher of one node, in a session of its own."""
    launcher = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(rank)]
    launcher += ["--master_addr", f"{ADDRESS}1", "--master_port", str(PORT)]
    words = ["ip", "netns", "exec", NODES[rank], sys.executable, "-m", *launcher, "-m", "sightline", *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": NODES[rank], "OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        return subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)


def epochs_done(run: Path) -> int:
    file = run / "log.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@dataclass
class Job:
    """A run on both nodes, started again with the same command until it is finished."""

    arguments: list[str]
    run: Path
    log: Path

    def until_finished(self, epochs: int, interruptions: tuple = ()) -> list[dict[str, Any]]:
        events = []
        for number, (name, ranks, sent) in enumerate(interruptions):
            launchers = [start(rank, self.arguments, self.log) for rank in (0, 1)]
            wanted = (number + 1) * epochs // (len(interruptions) + 1)
            while epochs_done(self.run) < wanted:
                assert all(one.poll() is None for one in launchers), f"see {self.log}"
                time.sleep(0.05)
            time.sleep(0.3 * (number + 1))  # somewhere in the next epoch
            for rank in ranks:
                send(launchers[rank], sent)
            codes = [one.wait(300) for one in launchers]
            events.append({"interrupted": name, "exit_codes_of_the_launchers": codes} | self.position())
        launchers = [start(rank, self.arguments, self.log) for rank in (0, 1)]
        codes = [one.wait(1800) for one in launchers]
        assert codes == [0, 0], f"see {self.log}"
        return events

    def position(self) -> dict[str, int]:
        """Of the checkpoint that the next start continues from."""
        _, facts = load_tensors(self.run / "last.safetensors")
        return {"epochs_done": facts["epoch"], "steps_of_the_next": facts["step"]}


def send(launcher: subprocess.Popen, sent: signal.Signals) -> None:
    """To the launcher, which passes SIGTERM on; a lost node loses all of its processes."""
    if sent == signal.SIGTERM:
        launcher.send_signal(sent)
        return
    for process in [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]:
        with suppress(psutil.Error):
            process.kill()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def interrupted(method: str, toy: Path, folder: Path, epochs: int) -> dict[str, Any]:
    runs, events = {}, []
    for name, interruptions in (("undisturbed", ()), ("interrupted", INTERRUPTIONS)):
        runs[name] = folder / f"{method}-{name}"
        arguments = ["train", method, str(toy), "--out", str(runs[name]), "--epochs", str(epochs)]
        job = Job([*arguments, *SETTINGS, *METHODS[method]], runs[name], folder / f"{method}-{name}.log")
        events += job.until_finished(epochs, interruptions)
    digests = {name: [sha256(run / name) for run in runs.values()] for name in COMPARED}
    return {
        "method": method, "epochs": epochs, "events": events,
        "equal": {name: first == second for name, (first, second) in digests.items()},
        "sha256_of_the_weights": digests["best.safetensors"],
    }  # fmt: skip


# ---- a large model, divided ------------------------------------------------------------------------------------------


def large(toy: Path, folder: Path, fsdp: bool) -> dict[str, Any]:
    """ViT-L, trained by two processes; the memory of each is the largest before the first checkpoint, and of all."""
    run = folder / f"large-{fsdp}"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "sightline"]
    words += ["train", "erm", str(toy), "--out", str(run), *LARGE, *(("--fsdp",) if fsdp else ())]
    launcher = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    peaks: dict[str, dict[int, float]] = {"before_the_first_checkpoint": {}, "of_all": {}}
    while launcher.poll() is None:
        for process in psutil.Process(launcher.pid).children():
            with suppress(psutil.Error):
                used = process.memory_info().rss / 2**20
                for name, known in peaks.items():
                    if name == "of_all" or not epochs_done(run):
                        known[process.pid] = max(known.get(process.pid, 0), used)
        time.sleep(0.05)
    assert launcher.returncode == 0, "it was not disturbed"
    losses = [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()]
    weights, _ = load_tensors(run / "last.safetensors")
    parameters = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("model."))
    shutil.rmtree(run)
    return {
        "fsdp": fsdp, "losses": losses, "parameters": parameters,
        "peak_mib_of_each_process": {name: [round(peak) for peak in known.values()] for name, known in peaks.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="of the interrupted runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/nodes"), help="is emptied first, and removed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "nodes_cpu.json")
    options = parser.parse_args()
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    toy = write_toy(folder / "toy", train=256, val=64, test=64, size=64)
    few = write_toy(folder / "few", train=16, val=8, test=8, size=64)
    with two_nodes():
        runs = [interrupted(method, toy, folder, options.epochs) for method in METHODS]
    result = {
        "command": "python benchmarks/nodes.py", "torch": torch.__version__,
        "nodes": "two network namespaces of one machine, joined by a virtual cable; gloo; one process each",
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "shared_with_other_work": True},
        "settings": " ".join(SETTINGS), "runs": runs, "settings_of_the_large_model": " ".join(LARGE),
        "large": [large(few, folder, fsdp) for fsdp in (False, True)],
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    assert all(all(run["equal"].values()) for run in runs), [run["equal"] for run in runs]
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
