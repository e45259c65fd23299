"""The run folder, which records everything about a run.

run.json            configuration, fingerprint of the data, versions, selection rule
log.jsonl           a line per epoch
best.safetensors    the checkpoint selected on the validation data
last.safetensors    the training state, to resume from
predictions/        predictions per image, as CSV
metrics.json        metrics of these predictions
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
from ..data.fingerprints import fingerprint
from ..data.rows import SPLITS, Rows, group_table
from ..errors import UserError
from ..vit.model import ViTConfig

PACKAGES = ("torch", "accelerate", "safetensors", "numpy", "scikit-learn", "pillow")

# Settings that do not change the result, so that they may differ when a run is resumed.
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
        """Remove what was logged after the checkpoint that training resumes from."""
        if self.log_file.exists():
            kept = self.log_file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            save_text(self.log_file, "".join(kept))

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        save_text(self.folder / "run.json", json.dumps(self.facts, indent=1, ensure_ascii=False, default=str) + "\n")


def begin_run(config: Train, rows: Rows) -> Run:
    """A new run folder, or the existing one with --resume. For the main process; the others read it afterwards."""
    folder, data_fingerprint = config.folder, fingerprint(rows)
    fresh = is_fresh(folder)
    if config.resume and not fresh and (folder / "run.json").is_file():
        run = read_run(folder)
        check_same_run(run, config, data_fingerprint)
        remove_leftovers(folder)
        note_versions(run)
        return run
    if not fresh:
        raise UserError(f"{folder}: contains a run; continue it with --resume, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    remove_leftovers(folder)
    run = Run(folder, {})
    source = {"path": str(config.data.expanduser().resolve()), "layout": config.layout, "fingerprint": data_fingerprint}
    run.note(
        format=FORMAT,
        method=config.method,
        config=asdict(config),
        data=describe_rows(rows) | source,
        versions=versions(),
        seed=config.seed,
        selection={"metric": config.selects, "on": config.select_on if config.selects else None},
        state="begun",
    )
    return run


def is_fresh(folder: Path) -> bool:
    """No folder, an empty one, or a run without any weights: nothing to lose."""
    if not folder.exists():
        return True
    inside = [p for p in folder.iterdir() if p.suffix != ".partial"] if folder.is_dir() else [folder]
    return not inside or ((folder / "run.json").is_file() and not any(p.suffix == ".safetensors" for p in inside))


def note_versions(run: Run) -> None:
    """A run may be resumed with other versions, but results may then differ in the last bits: they are recorded."""
    later = run.facts.get("resumed_with", [])
    if versions() != (later[-1] if later else run.facts["versions"]):
        run.note(resumed_with=[*later, versions()])


def check_same_run(run: Run, config: Train, data_fingerprint: str) -> None:
    """A run is resumed with the same settings on the same data."""
    if run.facts["data"]["fingerprint"] != data_fingerprint:
        raise UserError(
            f"{run.folder}: the data have changed since this run began (fingerprint {data_fingerprint[:12]} instead of "
            f"{run.facts['data']['fingerprint'][:12]}); restore them, or start a new run with another --out"
        )
    before, now = (
        {name: value for name, value in json.loads(json.dumps(asdict(c), default=str)).items() if name not in NEUTRAL}
        for c in (stored_config(type(config), run.facts["config"]), config)
    )
    if different := sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
        changes = ", ".join(f"{k}: {before.get(k)} then, {now.get(k)} now" for k in different[:3])
        raise UserError(f"{run.folder}: began with other settings ({changes}); use those, or start a new run")


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a run folder (no run.json); `sightline train` makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or train again") from error
    return Run(folder, in_current_format(facts, path))


def in_current_format(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """The facts of an older run, with the present names of its settings."""
    made_in = facts.get("format", 1)
    if made_in > FORMAT:
        raise UserError(f"{path}: made by a later version of Sightline (format {made_in}, not {FORMAT}); update it")
    if made_in == 1 and "config" in facts:
        facts["config"] = renamed_keys(facts.get("method", ""), facts["config"])
    return facts | {"format": FORMAT}


def describe_rows(rows: Rows) -> dict[str, Any]:
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
    """The number of training images per group, whichever of them a method uses."""
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


def vit_config_of(run: Run) -> ViTConfig:
    from ..vit.weights import config_from_json

    return config_from_json(json.dumps(run.facts["vit"]), run.folder / "run.json")
