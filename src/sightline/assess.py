"""What trained models are worth: on their own data, on other data, beside each other."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from .answers import Answers
from .audit.maps import as_seen, to_pictures
from .checkpoint import save_text
from .config import Compare, Evaluate, Predict
from .data.images import find_images, read_image, to_tensor
from .data.rows import Rows, read_rows
from .errors import UserError
from .evaluate import evaluate
from .load import Model, load
from .predict import answer
from .runs import Run, read_run

if TYPE_CHECKING:
    from .compare import Comparison


def assess(command: Evaluate) -> Path:
    """Answers and metrics of a run on a split of its own data, or of others; the folder they are in."""
    accelerator = Accelerator(cpu=command.device == "cpu")
    model = load(command.run, str(accelerator.device))
    facts = model.run.facts
    own = command.data is None
    path = Path(facts["data"]["path"]) if command.data is None else command.data
    rows = read_rows(path, layout=facts["data"]["layout"] if own else command.layout, seed=facts["seed"], whole=not own)
    rows = with_classes_of(model, rows, path)
    indices = rows.where(command.split)
    if not len(indices):
        raise UserError(f"{path}: no pictures in the split {command.split!r}; choose another --split")
    answers = answer(
        model.method, rows, indices, model.expects, accelerator, batch=command.batch, workers=command.workers
    )
    folder = command.out or (model.run.folder if own else model.run.folder / f"on-{path.stem}")
    counts = facts["data"]["counts"]["train"] if rows.groups is not None and facts["data"]["group_names"] else None
    metrics = evaluate(answers, train_group_counts=counts)
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    answers.save_csv(folder / "predictions" / f"{command.split}.csv")
    note_metrics(folder, command.split, metrics.to_dict(), facts["selection"])
    return folder


def note_metrics(folder: Path, split: str, metrics: dict[str, Any], selection: dict[str, str]) -> None:
    """Beside those of other splits that are there already."""
    path = folder / "metrics.json"
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["splits"] if path.exists() else {}
    rule = {"selected_by": selection["metric"], "selected_on": selection["on"]}
    save_text(path, json.dumps(rule | {"splits": before | {split: metrics}}, indent=1, ensure_ascii=False) + "\n")


def with_classes_of(model: Model, rows: Rows, path: Path) -> Rows:
    """Other data may have fewer classes, or in another order; none that the model does not know."""
    unknown = sorted(set(rows.classes) - set(model.classes))
    if unknown:
        knows = ", ".join(model.classes[:10])
        raise UserError(f"{path}: the model does not know the class {unknown[0]!r}; it knows {knows}")
    place = np.array([model.classes.index(name) for name in rows.classes], dtype=np.int64)
    return replace(rows, classes=model.classes, labels=place[rows.labels])


def predict_pictures(command: Predict) -> None:
    """A line per picture: the answer and the probability of every class."""
    device = Accelerator(cpu=command.device == "cpu").device
    model = load(command.run, str(device))
    paths = find_images(command.images)
    lines: list[dict[str, Any]] = []
    for start in range(0, len(paths), command.batch):
        some = paths[start : start + command.batch]
        pictures = [read_image(path) for path in some]
        prediction = model.predict(list(pictures))
        for path, shares in zip(some, prediction.probabilities.cpu().tolist(), strict=True):
            best = int(np.argmax(shares))
            lines.append(
                {"image": str(path), "predicted": model.classes[best]} | dict(zip(model.classes, shares, strict=True))
            )
        if command.overlay is not None:
            images = torch.stack([to_tensor(picture, model.expects) for picture in pictures]).to(device)
            draw_overlays(command.overlay, some, images, prediction)
    text = json.dumps(lines, indent=1) + "\n" if command.out and command.out.suffix == ".json" else as_csv(lines)
    if command.out is None:
        sys.stdout.write(text)
    else:
        save_text(command.out, text)


def draw_overlays(folder: Path, paths: list[Path], images, prediction) -> None:
    if prediction.sight.coverage(images.shape[-2:]).min() == 1:
        raise UserError("--overlay: this method sees the whole picture, so there is nothing to draw")
    folder.mkdir(parents=True, exist_ok=True)
    for path, picture in zip(paths, to_pictures(as_seen(images, prediction.sight)), strict=True):
        picture.save(folder / f"{path.stem}.png")


def as_csv(lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def compare_runs(command: Compare) -> Comparison:
    from .compare import compare

    if len(command.runs) < 2:
        raise UserError("compare needs at least two runs")
    named: dict[str, list[Answers]] = {}
    for folder in command.runs:
        run = read_run(folder)
        path = run.folder / "predictions" / f"{command.split}.csv"
        if not path.exists():
            raise UserError(f"{path}: no such file; make it with `sightline evaluate {folder} --split {command.split}`")
        answers = Answers.load_csv(path, split=command.split, group_names=tuple(run.facts["data"]["group_names"]))
        named.setdefault(name_without_seed(run, command.runs), []).append(answers)
    return compare(named)


def name_without_seed(run: Run, folders: tuple[Path, ...]) -> str:
    """Runs that differ only in their seed are one method."""
    ignored = {"seed", "out", "resume", "workers", "cache", "device"}

    def settings(facts: dict[str, Any]) -> dict[str, Any]:
        return {"method": facts["method"]} | {k: v for k, v in facts["config"].items() if k not in ignored}

    twins = [Path(f).name for f in folders if settings(read_run(f).facts) == settings(run.facts)]
    return twins[0] if len(twins) == 1 else f"{twins[0]} and {len(twins) - 1} more seeds"
