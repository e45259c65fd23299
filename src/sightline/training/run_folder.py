"""The run folder, which records everything about a run.

lock                while a training is running
run.json            configuration, fingerprint of the data, versions, selection rule
log.jsonl           a line per epoch
best.safetensors    the checkpoint selected on the validation data
last.safetensors    the training state, to resume from
predictions/        predictions per image, as CSV
metrics.json        metrics of these predictions
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..config import Train
from ..config.schema import check_run_facts, read_json
from ..config.stored import FORMAT, renamed_facts, renamed_keys, stored_config
from ..console.checksums import file_sha256
from ..console.files import append_line, cannot_write, remove_all_leftovers, save_text
from ..data.fingerprints import content_fingerprint, fingerprint
from ..data.rows import SPLITS, Rows, group_table
from ..errors import UserError
from ..metrics.estimates import read_metrics
from ..vit.checksums import stored_checksum
from ..vit.model import ViTConfig
from .run_lock import FILE as LOCK
from .run_lock import is_locked_here, lock_run, unlock_run

PACKAGES = ("torch", "accelerate", "safetensors", "numpy", "scikit-learn", "pillow")

# Settings that do not change the result, so that they may differ when a run is resumed.
RESUME = "earlier checkpoints are intact: free space or choose another folder, then continue with --resume"
BEGUN = {"run.json", "log.jsonl", "cache", "tensorboard", "wandb", LOCK}  # what a run has before it has weights
OF_THE_SCREEN = frozenset({"quiet", "json", "details"})
OF_THE_MACHINE = frozenset({"workers", "cache", "device"})
NEUTRAL = (
    OF_THE_SCREEN
    | OF_THE_MACHINE
    | {"resume", "allow_copies", "out", "data", "save_minutes", "tracker", "tensorboard", "fsdp", "baseline"}
)


OPEN = {"precision": "auto", "grad_accum": None}  # left to the machine: what it chose is recorded with the run


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
    def has_checksums(self) -> bool:
        """Whether its weights were written with checksums, as those of earlier versions were not."""
        return bool(self.facts.get("checksums"))

    @property
    def log_file(self) -> Path:
        return self.folder / "log.jsonl"

    def log(self, line: Mapping[str, Any]) -> None:
        append_line(self.log_file, json.dumps(line), remedy=RESUME)

    def cut_log(self, lines: int) -> None:
        """Remove what was logged after the checkpoint that training resumes from."""
        if self.log_file.exists():
            kept = self.log_file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            save_text(self.log_file, "".join(kept), remedy=RESUME)

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        text = json.dumps(self.facts, indent=1, ensure_ascii=False, default=str)
        save_text(self.folder / "run.json", f"{text}\n", remedy=RESUME)


def begin_run(config: Train, rows: Rows) -> Run:
    """A new run folder, or the existing one with --resume, locked. For the main process; the others read it
    afterwards."""
    folder, data_fingerprint = config.folder, fingerprint(rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error, "choose another folder") from error
    lock_run(folder)
    try:
        return resume_or_create(config, rows, data_fingerprint)
    except UserError:
        unlock_run(folder)
        raise


def resume_or_create(config: Train, rows: Rows, data_fingerprint: str) -> Run:
    folder = config.folder
    fresh = is_fresh(folder)
    if not fresh and not config.resume:
        raise UserError(f"{folder}: {why_not_new(folder, config)}")
    for place in (folder, folder / "predictions"):
        remove_all_leftovers(place)
    if not fresh:
        run = read_run(folder)
        check_same_run(run, config, data_fingerprint)
        check_same_content(run, rows)
        note_versions(run)
        return run
    run = Run(folder, {})
    source = {"path": str(config.data.expanduser().resolve()), "layout": config.layout, "fingerprint": data_fingerprint}
    source["content"] = content_fingerprint(rows)
    run.note(
        format=FORMAT,
        checksums=True,
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
    """An empty folder, or a run without any weights: nothing to lose."""
    inside = {path.name for path in folder.iterdir() if path.suffix != ".partial"}
    return inside <= BEGUN or ("run.json" in inside and not any(name.endswith(".safetensors") for name in inside))


def why_not_new(folder: Path, config: Train) -> str:
    """What is in the folder of a new run, and what to do about it."""
    try:
        facts = read_run(folder).facts
        if facts["method"] != config.method:
            return f"contains a run of another method ({facts['method']}); choose another --out"
        if different := different_settings(facts["config"], config):
            return f"contains a run with other settings ({different}); choose another --out"
        finished = "finished " if facts.get("state") == "finished" else ""
    except (UserError, LookupError, TypeError):
        return "contains other files, or a damaged run; choose another --out"
    return f"contains a {finished}run with the same settings; continue it with --resume, or choose another --out"


@contextlib.contextmanager
def run_ending(folder: Path) -> Generator[None]:
    """Unlock the folder in the end; a run that was refused before it had any weights leaves nothing behind."""
    if is_locked_here(folder):  # by another training in this process, which goes on
        yield
        return
    try:
        yield
    except UserError:
        if unlock_run(folder) and folder.is_dir() and is_fresh(folder):
            for name in ("run.json", "log.jsonl"):
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files are in it
                folder.rmdir()
        raise
    finally:
        unlock_run(folder)


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
    if changes := different_settings(run.facts["config"], config):
        raise UserError(f"{run.folder}: began with other settings ({changes}); use those, or start a new run")


def check_same_content(run: Run, rows: Rows) -> None:
    """Also files that changed and kept their size; older runs do not know what was in theirs."""
    if not has_same_content(run, rows):
        raise UserError(
            f"{run.folder}: images or masks have changed since this run began, though not in size; restore them, or "
            "start a new run with another --out"
        )


def has_same_content(run: Run, rows: Rows) -> bool:
    known = run.facts["data"].get("content")
    return known is None or known == content_fingerprint(rows)


def different_settings(stored: Mapping[str, Any], config: Train) -> str:
    """The first settings that differ and that change the result; "" if none do."""
    before, now = (
        {name: value for name, value in json.loads(json.dumps(asdict(c), default=str)).items() if name not in NEUTRAL}
        for c in (stored_config(type(config), stored), config)
    )
    left_open = {name for name, value in OPEN.items() if value in (before.get(name), now.get(name))}
    different = sorted(k for k in (before.keys() | now.keys()) - left_open if before.get(k) != now.get(k))
    return ", ".join(f"{k}: {before.get(k)} then, {now.get(k)} now" for k in different[:3])


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    path = folder / "run.json"
    try:
        facts = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: not a run folder (no run.json); `sightline train` makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or train again") from error
    return Run(folder, in_current_format(check_run_facts(facts, path), path))


def in_current_format(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """The facts of an older run, with the present names of its settings."""
    made_in = facts.get("format", 1)
    if made_in > FORMAT:
        raise UserError(f"{path}: made by a later version of Sightline (format {made_in}, not {FORMAT}); update it")
    if made_in == 1 and "config" in facts:
        facts["config"] = renamed_keys(facts.get("method", ""), facts["config"])
    if made_in < 3:
        facts = renamed_facts(facts)
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


def digests_of(run: Run, folder: Path) -> dict[str, Any]:
    """What binds results to the weights and predictions that they are of; part of metrics.json."""
    files = sorted((folder / "predictions").glob("*.csv"))
    return {
        "weights_sha256": stored_checksum(run.best) if run.best.exists() else None,
        "predictions_sha256": {file.stem: file_sha256(file) for file in files},
    }


def of_these_weights(metrics: Mapping[str, Any], run: Run) -> bool:
    """Whether results are of the run's present weights, as far as they say."""
    known, best = metrics.get("weights_sha256"), run.best
    best = best if best.exists() else run.folder.parent / best.name  # results on other data, inside the run
    return known is None or not best.exists() or stored_checksum(best) == known


def check_results(run: Run, folder: Path) -> None:
    """An error if metrics.json is not of the run's weights, or the predictions are not those that it is about."""
    path = folder / "metrics.json"
    if not path.is_file():
        return
    metrics = read_metrics(path)
    again = f"evaluate again: `sightline evaluate {run.folder}"
    if not of_these_weights(metrics, run):
        raise UserError(f"{path}: is of other weights than {run.best.name}; {again}`")
    for split, digest in metrics.get("predictions_sha256", {}).items():
        file = folder / "predictions" / f"{split}.csv"
        if file.is_file() and file_sha256(file) != digest:
            raise UserError(f"{path}: is not about the predictions in {file}; {again} --split {split}`")


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
