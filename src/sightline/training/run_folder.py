"""The run folder, which remembers everything: what was asked, on which data, with which versions, and what came of it.

run.json            the configuration, the data's fingerprint, versions, the rule of selection
log.jsonl           a line per epoch
best.safetensors    the weights that the validation data chose
last.safetensors    everything needed to go on
predictions/        answers per image, as CSV
metrics.json        what they are worth
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..config import Train
from ..config.stored import FORMAT, renamed_keys, stored_config
from ..console.files import cannot_write, remove_leftovers, save_text
from ..data.rows import SPLITS, Rows, fingerprint, group_table
from ..errors import UserError
from ..vit.model import ViTConfig

PACKAGES = ("torch", "accelerate", "safetensors", "numpy", "scikit-learn", "pillow")

# Settings that may differ without changing the result.
NEUTRAL = frozenset({"resume", "out", "data", "workers", "cache", "device", "save_minutes", "tensorboard"})


@dataclass(frozen=True)
class Run:
    folder: Path
    facts: dict[str, Any]

    @property
    def best(self) -> Path:
        return self.folder / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.folder / "last.safetensors"

    @property
    def log_file(self) -> Path:
        return self.folder / "log.jsonl"

    def log(self, line: Mapping[str, Any]) -> None:
        try:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise cannot_write(self.log_file, error) from error

    def cut_log(self, lines: int) -> None:
        """Forget what was logged after the checkpoint that training goes on from."""
        if self.log_file.exists():
            kept = self.log_file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            save_text(self.log_file, "".join(kept))

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        save_text(self.folder / "run.json", json.dumps(self.facts, indent=1, ensure_ascii=False, default=str) + "\n")


def begin(config: Train, rows: Rows) -> Run:
    """A new run folder, or the old one to go on with. For one process only: the others read it afterwards."""
    folder = config.folder
    print_of_data = fingerprint(rows)
    fresh = is_fresh(folder)
    if config.resume and not fresh and (folder / "run.json").is_file():
        run = read_run(folder)
        check_other(run, config, print_of_data)
        remove_leftovers(folder)
        note_versions(run)
        return run
    if not fresh:
        raise UserError(f"{folder}: there is a run already; go on with --resume, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    remove_leftovers(folder)
    run = Run(folder, {})
    run.note(
        format=FORMAT,
        method=config.method,
        config=asdict(config),
        data=about(rows)
        | {"path": str(config.data.expanduser().resolve()), "layout": config.layout, "fingerprint": print_of_data},
        versions=versions(),
        seed=config.seed,
        selection={"metric": config.selects, "on": "val" if config.selects else None},
        state="begun",
    )
    return run


def is_fresh(folder: Path) -> bool:
    """No folder, an empty one, or a run that ended before it had saved any weights: nothing to lose."""
    if not folder.exists():
        return True
    inside = [p for p in folder.iterdir() if p.suffix != ".partial"] if folder.is_dir() else [folder]
    return not inside or ((folder / "run.json").is_file() and not any(p.suffix == ".safetensors" for p in inside))


def note_versions(run: Run) -> None:
    """Other versions than before do not forbid to go on, but then the bits may differ: it is written down."""
    later = run.facts.get("resumed_with", [])
    if versions() != (later[-1] if later else run.facts["versions"]):
        run.note(resumed_with=[*later, versions()])


def check_other(run: Run, config: Train, print_of_data: str) -> None:
    """Going on means: the same question, to the same data."""
    if run.facts["data"]["fingerprint"] != print_of_data:
        raise UserError(
            f"{run.folder}: the data have changed since this run began (fingerprint {print_of_data[:12]} instead of "
            f"{run.facts['data']['fingerprint'][:12]}); restore them, or begin a new run with another --out"
        )
    before, now = (
        {name: value for name, value in json.loads(json.dumps(asdict(one), default=str)).items() if name not in NEUTRAL}
        for one in (stored_config(type(config), run.facts["config"]), config)
    )
    if wrong := sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
        changes = ", ".join(f"{k}: {before.get(k)} became {now.get(k)}" for k in wrong[:3])
        raise UserError(f"{run.folder}: begun with other settings ({changes}); use those, or begin a new run")


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a run folder (no run.json); `sightline train` makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return Run(folder, in_this_format(facts, path))


def in_this_format(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """What an older run says of itself, by the names of today."""
    made_in = facts.get("format", 1)
    if made_in > FORMAT:
        raise UserError(f"{path}: made by a later version of Sightline (format {made_in}, not {FORMAT}); update it")
    if made_in == 1 and "config" in facts:
        facts["config"] = renamed_keys(facts.get("method", ""), facts["config"])
    return facts | {"format": FORMAT}


def about(rows: Rows) -> dict[str, Any]:
    numbers, names = rows.cells
    table = group_table(rows)
    return {
        "name": rows.name,
        "classes": list(rows.classes),
        "group_names": list(rows.group_names),
        "counts": {split: dict(zip(names, map(int, table[i]), strict=True)) for i, split in enumerate(SPLITS)},
        "notes": list(rows.notes),
        "images": int(np.size(numbers)),
    }


def train_counts(run: Run) -> dict[str, int] | None:
    """How many training pictures each group has, whichever of them a method learns from."""
    data = run.facts["data"]
    return data["counts"]["train"] if data["group_names"] else None


def versions() -> dict[str, str]:
    found = {"sightline": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["device"] = torch.cuda.get_device_name()
    return found


def config_of(run: Run) -> ViTConfig:
    from ..vit.weights import config_from_json

    return config_from_json(json.dumps(run.facts["vit"]), run.folder / "run.json")
