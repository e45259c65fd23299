"""What trained models are worth: on their own data, on other data, beside each other."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import Compare, Evaluate
from .data.rows import Rows, fingerprint, read_rows
from .datasets.imagenet import IMAGENET9_CLASSES, imagenet_classes, imagenet_to_imagenet9
from .errors import UserError
from .interventions.apply import load_corrected
from .load import Model
from .metrics.cost import cost_on
from .metrics.estimates import Metrics, read_metrics
from .metrics.groups import evaluate
from .metrics.inference import answer, make_accelerator
from .metrics.predictions import Answers
from .training.checkpoint import save_text
from .training.run_folder import NEUTRAL, Run, read_run, train_counts

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .compare import Comparison


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The data that a run is measured on."""

    rows: Rows
    path: Path
    fingerprint: str
    own: bool  # those that it was trained on


def assess(command: Evaluate) -> Path:
    """Answers and metrics of a run on a split of its own data, or of others; the folder they are in."""
    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    asked = data_asked_for(command, model.run)
    nine = imagenet9_map(model, asked.rows)
    rows = with_classes_of(model, asked.rows, asked.path) if nine is None else in_a_thousand(asked.rows, nine, model)
    indices = rows.where(command.split)
    if not len(indices):
        raise UserError(f"{asked.path}: no pictures in the split {command.split!r}; choose another --split")
    folder = folder_for(command, model.run, asked)
    content = metrics_before(folder, model.run, asked)
    answers = answer(
        model.method, rows, indices, model.expects, accelerator,
        batch=command.batch, workers=command.workers, cache=command.cache,
    )  # fmt: skip
    if nine is not None:
        answers = in_nine(answers, nine)
    if accelerator.is_main_process:
        answers.save_csv(folder / "predictions" / f"{command.split}.csv")
        content["splits"][command.split] = measure(answers, model.run).to_dict()
        spent = cost_on(model.method, rows, indices, model.expects, accelerator.device)
        content["cost"] = content.get("cost", {}) | {command.split: asdict(spent)}
        save_plainly(folder / "metrics.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    accelerator.wait_for_everyone()
    return folder


def opened(folder: Path, device: str, *, intervention: bool = False) -> tuple[Accelerator, Model]:
    """A trained model, and where to measure it: as exactly as it was trained; or with what was kept to correct it."""
    accelerator = make_accelerator(device, read_run(folder).facts.get("config", {}).get("precision", "fp32"))
    return accelerator, load_corrected(folder, str(accelerator.device), intervention, aloud=accelerator.is_main_process)


def data_asked_for(command: Evaluate, run: Run) -> Asked:
    """The run's own data are known by their fingerprint, wherever they lie now; they keep the run's splits."""
    data = run.facts["data"]
    seed = run.facts["config"].get("split_seed", run.facts["seed"])
    if command.data is None:
        path = Path(data["path"])
        if not path.exists():
            raise UserError(
                f"{path}: the data of this run are no longer there; say where they are, after the run: "
                f"{command.run} DATA"
            )
        rows = read_rows(path, layout=data["layout"], seed=seed)
        found = fingerprint(rows)
        if found != data["fingerprint"]:
            raise UserError(
                f"{path}: the data have changed since this run was trained (fingerprint {found[:12]} instead of "
                f"{data['fingerprint'][:12]}); restore them, or give them explicitly, as other data, after the "
                f"run: {command.run} {path}"
            )
        return Asked(rows, path, found, own=True)
    if command.layout in (None, data["layout"]):
        try:
            rows = read_rows(command.data, layout=data["layout"], seed=seed)
        except UserError:
            rows = None  # so they are others
        if rows is not None and fingerprint(rows) == data["fingerprint"]:
            return Asked(rows, command.data, data["fingerprint"], own=True)
    rows = read_rows(command.data, layout=command.layout, seed=seed, whole=True)
    found = fingerprint(rows)
    if found == data["fingerprint"]:  # the same by another name, such as metashift-animals:0
        return Asked(rows, command.data, found, own=True)
    if command.data.resolve() == Path(data["path"]).resolve():
        note = "these are the data of the run, but changed: it may have been trained on some of these pictures"
        rows = replace(rows, notes=(*rows.notes, note))
    return Asked(rows, command.data, found, own=False)


def folder_for(command: Evaluate, run: Run, asked: Asked) -> Path:
    """Made before the work, so that it is not done in vain."""
    option = (command.layout or "").partition(":")[2]
    changed = run.facts.get("intervention", {}).get("folder")
    other = () if asked.own else ("on", asked.path.resolve().stem, option, asked.fingerprint[:8])
    folder = command.out or run.folder / "-".join(filter(None, (*other, changed)))
    if (changed or not asked.own) and folder.resolve() == run.folder.resolve():
        raise UserError(f"{folder}: is for the run's own data, as it was trained; choose another --out")
    make_folder(folder / "predictions")
    return folder


def metrics_before(folder: Path, run: Run, asked: Asked) -> dict[str, Any]:
    """What metrics.json says already of other splits, and of how the weights were selected."""
    path, own = folder / "metrics.json", run.folder / "metrics.json"
    selection = run.facts.get("selection") or {}
    content: dict[str, Any] = {"selected_by": selection.get("metric"), "selected_on": selection.get("on")}
    if own.exists():
        content |= {name: value for name, value in read_metrics(own).items() if name.startswith("selected_")}
    if folder.resolve() != run.folder.resolve():
        notes = list(asked.rows.notes)
        content["data"] = {"name": asked.rows.name, "fingerprint": asked.fingerprint, "own": asked.own, "notes": notes}
    before = read_metrics(path) if path.exists() else {"splits": {}}
    refuse_other_data(path, before.get("data", {}).get("fingerprint", asked.fingerprint), asked)
    changed = run.facts.get("intervention")
    before = before if same_change(before.get("intervention"), changed) else {"splits": {}}
    return before | content | ({"intervention": changed} if changed else {})


def same_change(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two interventions do the same to a model, whatever its parts are called."""
    said = [[(each or {}).get(name) for name in ("drop", "force", "quantile", "thresholds")] for each in (one, other)]
    return said[0] == said[1]


def refuse_other_data(path: Path, known: str, asked: Asked) -> None:
    if known != asked.fingerprint:
        raise UserError(f"{path}: is about other data (fingerprint {known[:12]}); choose another --out")


def measure(answers: Answers, run: Run) -> Metrics:
    """With the counts of training, where its groups are these."""
    counts = train_counts(run)
    if counts is None or not answers.group_names:
        return evaluate(answers)
    if set(answers.group_names) <= set(counts):
        return evaluate(answers, train_group_counts=counts)
    other = next(name for name in answers.group_names if name not in counts)
    metrics = evaluate(answers)
    note = f"these are other groups than in training, which had no {other!r}: its counts say nothing about them"
    return replace(metrics, warnings=(*metrics.warnings, note))


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another place") from error


def save_plainly(path: Path, text: str) -> None:
    """There is nothing to resume, whatever checkpoints would say."""
    try:
        save_text(path, text)
    except UserError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
        raise UserError(f"{path}: cannot be written ({reason})") from error


def with_classes_of(model: Model, rows: Rows, path: Path) -> Rows:
    """Other data may have fewer classes, or in another order; none that the model does not know."""
    there = {rows.classes[label] for label in np.unique(rows.labels)}
    unknown = sorted(there - set(model.classes))
    if unknown and rows.name == "imagenet-segmentation":
        raise UserError(f"{path}: has pictures of the class {unknown[0]!r}, so it is for measuring masks, not answers")
    if unknown:
        knows = ", ".join(model.classes[:10])
        raise UserError(f"{path}: the model does not know the class {unknown[0]!r}; it knows {knows}")
    place = np.array([model.classes.index(name) if name in there else -1 for name in rows.classes], dtype=np.int64)
    return replace(rows, classes=model.classes, labels=place[rows.labels])


def imagenet9_map(model: Model, rows: Rows) -> np.ndarray | None:
    """Which of the nine each class counts as, or -1, where a model of ImageNet's classes is asked about ImageNet-9."""
    thousand = tuple(imagenet_classes().values())
    asked = rows.classes == IMAGENET9_CLASSES and model.classes == thousand
    return imagenet_to_imagenet9(rows.root) if asked else None


def in_a_thousand(rows: Rows, nine: np.ndarray, model: Model) -> Rows:
    """With any ImageNet class that counts as the label, until the answers are `in_nine`."""
    some = np.array([np.flatnonzero(nine == label)[0] for label in range(len(rows.classes))])
    return replace(rows, classes=model.classes, labels=some[rows.labels])


def in_nine(answers: Answers, nine: np.ndarray) -> Answers:
    """The answer among 1,000 classes, then mapped; one that is none of the nine is wrong (Xiao et al. 2021)."""
    members = nine[:, None] == np.arange(len(IMAGENET9_CLASSES))
    return replace(
        answers,
        labels=nine[answers.labels],
        probabilities=answers.probabilities @ members.astype(np.float32),
        predicted=nine[answers.predicted],
        classes=IMAGENET9_CLASSES,
    )


def as_csv(columns: Sequence[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare_runs(command: Compare) -> Comparison:
    """Every method against the first; runs that differ only in their seed are one method."""
    from .compare import compare

    if len(command.runs) < 2:
        raise UserError("compare needs at least two runs")
    methods: dict[str, list[Run]] = {}
    for folder in command.runs:
        run = run_in(folder)
        methods.setdefault(settings_of(run), []).append(run)
    for runs in methods.values():
        refuse_repetition(runs)
    if len(methods) < 2:
        raise UserError("these runs differ only in their seed: name a run of another method, to compare them with")
    names = display_names(list(methods.values()))
    named = {
        name: [answers_of(run, command.split) for run in runs]
        for name, runs in zip(names, methods.values(), strict=True)
    }
    counts = [train_counts(run) for runs in methods.values() for run in runs]
    if all(count == counts[0] for count in counts):
        return compare(named, train_group_counts=counts[0])
    comparison = compare(named)
    note = "the runs were trained on different numbers of pictures per group: no adjusted average, no minority groups"
    return replace(comparison, warnings=(*comparison.warnings, note))


def run_in(folder: Path) -> Run:
    """A run; or what it answered about other data, in the folder that `evaluate` made for them inside it."""
    above = folder.resolve().parent
    if (folder / "run.json").exists() or not ((folder / "metrics.json").exists() and (above / "run.json").exists()):
        return read_run(folder)
    facts, content = read_run(above).facts, read_metrics(folder / "metrics.json")
    own = content.get("data", {}).get("own")
    data = facts["data"] | ({} if own else {"group_names": []})  # other data's groups are not those of training
    return Run(folder, facts | {"data": data, "intervention": content.get("intervention")})


def settings_of(run: Run) -> str:
    """All that may change what is learnt, but for the seed. The splits are part of the data's fingerprint."""
    ignored = NEUTRAL | {"seed", "split_seed"}
    try:
        settings = {name: value for name, value in run.facts["config"].items() if name not in ignored}
        changed = (run.facts.get("intervention") or {}).get("kind")
        return json.dumps([run.facts["method"], settings, run.facts["data"]["fingerprint"], changed], sort_keys=True)
    except KeyError as error:
        raise UserError(f"{run.folder / 'run.json'}: says nothing about {error}; train this run again") from None


def refuse_repetition(runs: Sequence[Run]) -> None:
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.facts["seed"], run)
        if other is not run:
            raise UserError(
                f"{other.folder} and {run.folder}: the same method with the same settings, data and seed "
                f"({run.facts['seed']}), which would count as two seeds; leave one out"
            )


def display_names(methods: Sequence[Sequence[Run]]) -> list[str]:
    """The first run's folder, with as many folders above it as tell the methods apart."""
    paths = [runs[0].folder.resolve() for runs in methods]
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    names = [Path(*path.parts[-parts:]).as_posix() for path in paths]
    more = ["" if len(runs) == 1 else f" and {len(runs) - 1} more seed{'s' * (len(runs) > 2)}" for runs in methods]
    return [f"{name}{rest}" for name, rest in zip(names, more, strict=True)]


def answers_of(run: Run, split: str) -> Answers:
    path = run.folder / "predictions" / f"{split}.csv"
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with `sightline evaluate {run.folder} --split {split}`")
    return Answers.load_csv(path, split=split, group_names=tuple(run.facts["data"]["group_names"]))
