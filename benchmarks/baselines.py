"""The baselines on a data set with a shortcut: frozen probe (plain, tuned) and ERM, every group with its interval.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds
    python benchmarks/baselines.py waterbirds --backbone vit_ti16_augreg_in1k.safetensors --out wbr_baselines.json

One run folder per row and seed, trained side by side, skipped when finished. Weights are selected on validation data by
class-balanced accuracy, without group labels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from record import record
from sightline.answers import Answers
from sightline.evaluate import across_seeds
from sightline.runs import read_run

ROWS: dict[str, list[str]] = {
    "probe, plain": ["probe", "--plain"],
    "probe, tuned": ["probe"],
    "ERM": ["erm", "--epochs", "14", "--lr", "5e-5"],
    "ERM, balanced classes": ["erm", "--epochs", "14", "--lr", "5e-5", "--balance", "classes"],
}


@dataclass(frozen=True)
class Baselines:
    data: Positional[Path]
    backbone: str
    runs: Path = Path("runs/baselines")
    seeds: tuple[int, ...] = (0, 1, 2)
    parallel: int = 4
    device: str = "auto"
    precision: str = "fp32"
    out: Path | None = None


def train(config: Baselines, row: str, seed: int) -> Path:
    folder = config.runs / f"{row.replace(', ', '-').replace(' ', '-').lower()}-{seed}"
    if not finished(folder, config):
        command = [
            sys.executable, "-m", "sightline", "train", ROWS[row][0], str(config.data), *ROWS[row][1:],
            "--backbone", config.backbone, "--out", str(folder), "--seed", str(seed), "--device", config.device,
            "--cache", str(config.runs / "cache"), "--precision", config.precision, "--resume",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr[-3000:]}")
    print(json.dumps({"row": row, "seed": seed, "speed": read_run(folder).facts.get("speed")}), flush=True)
    return folder


def finished(folder: Path, config: Baselines) -> bool:
    """With this backbone; another one's run is refused by --resume."""
    if not (folder / "metrics.json").exists():
        return False
    facts = read_run(folder).facts
    return facts["state"] == "finished" and facts["config"]["backbone"] == config.backbone


def seeds_of(row: str, config: Baselines) -> tuple[int, ...]:
    """A probe is the same for every seed."""
    return config.seeds[:1] if row.startswith("probe") else config.seeds


def main() -> None:
    config = tyro.cli(Baselines, description=__doc__)
    jobs = [(row, seed) for row in ROWS for seed in seeds_of(row, config)]
    train(config, *jobs[0])  # alone: it makes the cache that the others share
    with ThreadPoolExecutor(config.parallel) as pool:
        folders = dict(zip(jobs, pool.map(lambda job: train(config, *job), jobs), strict=True))
    rows, table = [], Table("", "mean of groups", "worst group", "", "all groups", box=None, pad_edge=False)
    for row in ROWS:
        mine = [folders[row, seed] for seed in seeds_of(row, config)]
        facts = read_run(mine[0]).facts
        answers = [
            Answers.load_csv(f / "predictions" / "test.csv", group_names=facts["data"]["group_names"]) for f in mine
        ]
        metrics = across_seeds(answers, train_group_counts=facts["data"]["counts"]["train"])
        worst = metrics.worst_group
        groups = "  ".join(f"{name} {estimate.value:.1%}" for name, estimate in metrics.groups.items())
        table.add_row(row, str(metrics.mean_of_groups), str(worst), worst.of or "", groups)
        speeds = [read_run(folder).facts.get("speed") for folder in mine]
        rows.append({"row": row, "seeds": list(seeds_of(row, config)), "metrics": metrics.to_dict(), "speed": speeds})
    Console(highlight=False, width=200).print(table)
    if config.out:
        device = "cuda" if "cuda" in facts["versions"] and config.device != "cpu" else "cpu"
        data = {name: value for name, value in facts["data"].items() if name != "path"}
        record(config.out, device, {"selected_by": "balanced on val", "data": data, "rows": rows})


if __name__ == "__main__":
    main()
