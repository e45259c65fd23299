"""Waterbirds rebuilt (WB-R): every method with the same backbone, every group with its interval, and where it looked.

    sightline data waterbirds --cub PACKS --scenes PACKS --out waterbirds
    python benchmarks/waterbirds.py waterbirds --backbone vit_ti16_augreg_in1k.safetensors --out wbr_ti.json

One run folder per row and seed, several trained side by side, skipped when finished: call it again to go on. Weights
are selected on validation data by class-balanced accuracy, without group labels. Rows that are not finished are listed
as missing.
"""

from __future__ import annotations

import json
import shlex
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from record import record
from sightline import config as commands

BRIEF = "--epochs 14 --lr 5e-5"  # whole pictures and given masks: as the project's own reference figures were made
ROWS: dict[str, str] = {
    "probe": "probe",
    "ERM": f"erm {BRIEF}",
    "late mask, true": f"late-mask {BRIEF}",
    "early mask, true": f"early-mask {BRIEF}",
    "early mask, true, pixels": f"early-mask {BRIEF} --pixels --at-least 0.1",
    "early mask, U2-Net (supervised)": f"early-mask {BRIEF} --masks u2net:U2NET",
    "early mask, FOUND": f"early-mask {BRIEF} --masks found:SELF",
    "early mask, TokenCut": f"early-mask {BRIEF} --masks tokencut:SELF",
    "PDiscoFormer K=4": "pdiscoformer --parts 4",
    "PDiscoFormer K=8": "pdiscoformer --parts 8",
    "iFAM K=1": "ifam --parts 1",
    "iFAM K=4": "ifam --parts 4",
    "iFAM K=8": "ifam --parts 8",
    "iFAM K=1, no mask gradient": "ifam --parts 1 --mask-gradient False",
    "iFAM K=4, no mask gradient": "ifam --parts 4 --mask-gradient False",
    "iFAM K=8, no mask gradient": "ifam --parts 8 --mask-gradient False",
    "iFAM K=1, published": "ifam --parts 1 --preset published",
    "iFAM K=4, published": "ifam --parts 4 --preset published",
    "iFAM K=8, published": "ifam --parts 8 --preset published",
}
HEADLINE = (
    "ERM",
    "late mask, true",
    "early mask, true",
    "PDiscoFormer K=4",
    "iFAM K=1",
    "iFAM K=4",
    "iFAM K=4, published",
)


@dataclass(frozen=True)
class Waterbirds:
    data: Positional[Path]
    backbone: str
    runs: Path = Path("runs/waterbirds")
    only: tuple[str, ...] = ()
    """These rows. Default: all."""
    rows: Path | None = None
    """Other rows than those of this file: JSON, name -> arguments of `sightline train`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The first one for every row, the others for the headline rows."""
    parallel: int = 6
    self_supervised: str = ""
    """The backbone behind FOUND and TokenCut."""
    u2net: str = ""
    """U2-Net-P as an ONNX file."""
    device: str = "auto"
    precision: str = "bf16"
    minutes: float = 1e9
    """Begin no run after so long."""
    splits: tuple[str, ...] = ("val", "test")
    """Where to look at the sight; to try things out: val."""
    out: Path | None = None


def table_of_rows(config: Waterbirds) -> dict[str, str]:
    rows = ROWS if config.rows is None else json.loads(config.rows.read_text())
    return {name: line for name, line in rows.items() if not config.only or name in config.only}


def seeds_of(row: str, config: Waterbirds) -> tuple[int, ...]:
    """A probe is the same for every seed."""
    return config.seeds if row in HEADLINE or config.rows is not None else config.seeds[:1]


def folder_of(config: Waterbirds, row: str, seed: int) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in row.lower())
    return config.runs / f"{name}-{seed}"


def command_of(config: Waterbirds, row: str, seed: int) -> commands.Train:
    """What a user would type, parsed as the command line does it."""
    method, *flags = shlex.split(table_of_rows(config)[row])
    kinds: dict[str, Any] = {kind.method: kind for kind in all_methods()}
    given = [
        str(config.data), *flags, "--backbone", config.backbone, "--out", str(folder_of(config, row, seed)),
        "--seed", str(seed), "--device", config.device, "--precision", config.precision,
        "--cache", str(config.runs / "cache"), "--resume",
    ]  # fmt: skip
    swap = {"SELF": config.self_supervised, "U2NET": config.u2net}
    for word, value in swap.items():
        given = [flag.replace(word, value) for flag in given]
    return tyro.cli(kinds[method], args=given)


def all_methods() -> list[type[commands.Train]]:
    return [c for c in vars(commands).values() if isinstance(c, type) and issubclass(c, commands.Train) and c.method]


def one(config: Waterbirds, row: str, seed: int) -> dict[str, Any]:
    """Train, and see where it looks. Finished runs are not trained again."""
    from sightline.localize import localize_run
    from sightline.runs import read_run
    from sightline.train import train

    began, folder = time.perf_counter(), folder_of(config, row, seed)
    command = command_of(config, row, seed)
    if not (folder / "metrics.json").exists():
        train(command)
    if command.method not in ("erm", "probe"):
        for split in config.splits:
            localize_run(commands.Localize(folder, split=split, device=config.device))  # ty: ignore[invalid-argument-type]
    return {
        "row": row,
        "seed": seed,
        "seconds": round(time.perf_counter() - began),
        "speed": read_run(folder).facts.get("speed"),
    }


def train_all(config: Waterbirds, jobs: list[tuple[str, int]]) -> None:
    """Several at once: small models leave a GPU idle. The first run alone makes the cache that the others share."""
    began, lines = time.perf_counter(), table_of_rows(config)
    todo = [job for job in jobs if not finished(folder_of(config, *job), config)]
    todo.sort(key=lambda job: lines[job[0]].split()[0] == "probe")  # last: it does not see what training sees
    with ProcessPoolExecutor(config.parallel, mp_context=get_context("spawn")) as pool:
        for some in (todo[:1], todo[1:]):
            coming = {pool.submit(timely, config, began, *job): job for job in some}
            for future in as_completed(coming):
                try:
                    print(json.dumps(future.result()), flush=True)
                except Exception as error:  # one row must not take the others with it; it is listed as missing
                    print(json.dumps({"row": coming[future], "failed": f"{type(error).__name__}: {error}"}), flush=True)


def timely(config: Waterbirds, began: float, row: str, seed: int) -> dict[str, Any]:
    if time.perf_counter() - began > 60 * config.minutes:
        return {"row": row, "seed": seed, "skipped": "no time left"}
    return one(config, row, seed)


def finished(folder: Path, config: Waterbirds) -> bool:
    if not (folder / "metrics.json").exists():
        return False
    looked = folder / "localization.json"
    facts = json.loads((folder / "run.json").read_text())
    there = json.loads(looked.read_text())["splits"] if looked.exists() else {}
    return facts["method"] in ("erm", "probe") or all(split in there for split in config.splits)


def result_of(config: Waterbirds, row: str) -> dict[str, Any] | None:
    """The figures of a row over its finished seeds."""
    from sightline.answers import Answers
    from sightline.evaluate import across_seeds
    from sightline.runs import read_run

    seeds = [seed for seed in seeds_of(row, config) if finished(folder_of(config, row, seed), config)]
    if not seeds:
        return None
    folders = [folder_of(config, row, seed) for seed in seeds]
    facts = read_run(folders[0]).facts
    found: dict[str, Any] = {"row": row, "command": table_of_rows(config)[row], "seeds": seeds, "metrics": {}}
    for split in config.splits:
        answers = [
            Answers.load_csv(f / "predictions" / f"{split}.csv", group_names=facts["data"]["group_names"])
            for f in folders
        ]
        found["metrics"][split] = across_seeds(answers, train_group_counts=facts["data"]["counts"]["train"]).to_dict()
    looked = [f / "localization.json" for f in folders]
    if all(path.exists() for path in looked):
        found["sight"] = [json.loads(path.read_text())["splits"] for path in looked]
    found["speed"] = [read_run(folder).facts.get("speed") for folder in folders]
    return found


def show(config: Waterbirds, results: list[dict[str, Any]]) -> None:
    from sightline.metrics import Metrics

    split = config.splits[-1]
    table = Table("", "seeds", "mean of groups", "worst group", "", "grid IoU", "coverage", box=None, pad_edge=False)
    for found in results:
        metrics = Metrics.from_dict(found["metrics"][split])
        figures = [sight[split]["figures"] for sight in found.get("sight", [])]
        looked = [
            f"{sum(one[name]['value'] for one in figures) / len(figures):.3f}" if figures and name in figures[0] else ""
            for name in ("grid_iou", "coverage")
        ]
        worst = metrics.worst_group
        table.add_row(
            found["row"], str(len(found["seeds"])), str(metrics.mean_of_groups), str(worst), worst.of or "", *looked
        )
    Console(highlight=False, width=180).print(f"On the {split} data:", table)


def main() -> None:
    config = tyro.cli(Waterbirds, description=__doc__)
    rows = table_of_rows(config)
    jobs = [
        (row, seed)
        for number in range(len(config.seeds))
        for row in rows
        for seed in seeds_of(row, config)[number : number + 1]
    ]
    train_all(config, jobs)
    results = [found for row in rows if (found := result_of(config, row)) is not None]
    done = [job for job in jobs if finished(folder_of(config, *job), config)]
    missing = [f"{row}, seed {seed}" for row, seed in jobs if (row, seed) not in done]
    show(config, results)
    if missing:
        print("missing:", "; ".join(missing))
    if config.out and done:
        facts = json.loads((folder_of(config, *done[0]) / "run.json").read_text())
        data = {name: value for name, value in facts["data"].items() if name != "path"}
        content = {
            "selected_by": "balanced on val",
            "backbone": facts["backbone"],
            "data": data,
            "rows": results,
            "missing": missing,
        }
        device = "cuda" if "cuda" in facts["versions"] and config.device != "cpu" else "cpu"
        record(config.out, device, content)


if __name__ == "__main__":
    main()
