"""Robustness suites: a model of ImageNet's 1,000 classes on those of the published test sets that are on disk.

Accuracy is over all 1,000 classes, as RobustViT counts, and beside it over the classes of each set alone, as the
authors of ImageNet-A, -R and ObjectNet count. The two are not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.rows import Rows, read_rows
from ..datasets.imagenet import SI_SCORE_FOLDERS, imagenet_classes, objectnet_labels
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, map_batches, sight_for_prediction
from ..metrics.intervals import proportion
from .class_changes import LabelledPredictions, read_pair
from .estimates import bootstrap_mean

if TYPE_CHECKING:
    from rich.table import Table

    from ..config import Suite

PredictionPair = tuple[LabelledPredictions, LabelledPredictions]
TOP = 5
IMAGENET_CLASSES = 1000
SI_SCORE = ("si-score", "si_score", "SI-Score", "")
# Each layout with the folder names under which it is found.
SETS: dict[str, tuple[str, ...]] = {
    "imagenet-v2": (
        "imagenet-v2", "imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency", "imagenetv2",
    ),
    "imagenet-a": ("imagenet-a",),
    "imagenet-r": ("imagenet-r",),
    "imagenet-sketch": ("imagenet-sketch", "sketch"),
    "objectnet": ("objectnet", "objectnet-1.0"),
    **{
        f"si-score-{change}": (f"si-score-{change}", *(f"{home}/{name}" for home in SI_SCORE for name in names))
        for change, names in SI_SCORE_FOLDERS.items()
    },
}  # fmt: skip
FIGURES = {
    "top1": "top-1 of 1,000",
    "top5": "top-5 of 1,000",
    "own_top1": "top-1 of the set's classes",
    "own_top5": "top-5 of the set's classes",
}


@dataclass(frozen=True)
class SetResult:
    """The accuracies on one test set."""

    n: int
    classes: int
    figures: dict[str, Estimate]  # of FIGURES; over its own classes only if it does not have all 1,000
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SuiteResults:
    suite: str
    sets: dict[str, SetResult]
    missing: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        found = [f"{name}: {note}" for name, one in self.sets.items() for note in one.notes]
        return found + ([f"not found: {', '.join(self.missing)}"] if self.missing else [])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        from rich.table import Table

        table = Table("", "n", "classes", *FIGURES.values(), box=None, pad_edge=False, caption="95 % Wilson intervals.")
        table.caption_justify = "left"
        for name, one in self.sets.items():
            cells = [f"{e.value_text} {e.interval}" if (e := one.figures.get(k)) else "same" for k in FIGURES]
            table.add_row(name, f"{one.n:,}", f"{one.classes:,}", *(cell.replace("[", r"\[") for cell in cells))
        return table


def find_sets(folder: Path) -> dict[str, Path]:
    """The folders of the test sets that are on disk, by layout."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; it should contain {', '.join(SETS)}")
    found = {}
    for name, subfolders in SETS.items():
        if path := next((folder / sub for sub in subfolders if (folder / sub).is_dir()), None):
            found[name] = path
    if not found:
        raise UserError(f"{folder}: contains none of the suite's sets: {', '.join(SETS)}")
    return found


def run_suite(command: Suite) -> tuple[SuiteResults, Path]:
    """Evaluate a trained model on every set that is on disk; the results, and the folder they are written to."""
    from ..console.files import make_folder, write_json
    from ..load import open_model

    assert command.suite is not None
    if command.suite_folder is None:
        raise UserError(f"--suite {command.suite}: needs the folder of the test sets, --suite-folder")
    if command.data is not None or command.layout is not None:
        raise UserError(f"--suite {command.suite}: brings its own data; omit {command.data or '--layout'}")
    folders = find_sets(command.suite_folder)
    accelerator, model = open_model(command.run, command.device, intervention=command.intervention)
    if model.classes != tuple(imagenet_classes().values()):
        raise UserError(
            f"{command.run}: has {len(model.classes):,} classes; {command.suite} needs a model of ImageNet's 1,000"
        )
    folder = command.out or model.run.folder / command.suite
    make_folder(folder)
    sets = {}
    for name, path in folders.items():
        rows = read_rows(path, layout=name, all_test=True)
        accepted = accepted_labels(objectnet_labels(rows.root)) if name == "objectnet" else {}
        own = sorted({*rows.labels.tolist()}.union(*accepted.values()))
        best = top_predictions(model, rows, own, accelerator, command)
        sets[name] = evaluate_set(rows, best, accepted)
        if accelerator.is_main_process:
            save_predictions(folder / f"{name}.csv", rows, best)
    found = SuiteResults(command.suite, sets, tuple(name for name in SETS if name not in folders))
    if accelerator.is_main_process:
        write_json(folder / "suite.json", found.to_dict())
    accelerator.wait_for_everyone()
    return found, folder


def accepted_labels(labels_by_object: Mapping[str, Sequence[int]]) -> dict[int, set[int]]:
    """For objects with several ImageNet classes: all accepted labels, by the first."""
    found: dict[int, set[int]] = {}
    for labels in labels_by_object.values():
        found.setdefault(labels[0], set()).update(labels)
    return found


def top_predictions(model: Any, rows: Rows, classes: Sequence[int], accelerator: Any, command: Suite) -> np.ndarray:
    """int64 [n, 2, 5]: the top 5 of all classes, and of the set's own `classes` (-1 where it has fewer)."""
    own = torch.tensor(classes, device=accelerator.device)

    def best(images: Tensor, masks: Tensor | None) -> Tensor:
        logits = model.method.judge(images, sight_for_prediction(model.method, images, masks)).logits.float()
        among = own[logits[:, own].topk(min(TOP, len(own)), dim=1).indices]
        among = torch.nn.functional.pad(among, (0, TOP - among.shape[1]), value=-1)
        return torch.stack([logits.topk(TOP, dim=1).indices, among], dim=1)

    if model.method.needs_masks:
        raise UserError("this method takes masks as input, and the test sets have none")
    indices = np.arange(len(rows))
    batches = inference_batches(
        rows, indices, model.expects, accelerator, batch=command.batch, workers=command.workers, cache=command.cache
    )
    with closing(batches):
        return map_batches(best, batches, accelerator).astype(np.int64)


def evaluate_set(rows: Rows, best: np.ndarray, accepted: Mapping[int, set[int]]) -> SetResult:
    """Over 1,000 classes only the label counts, as in RobustViT; over the set's own, all that ObjectNet accepts."""
    classes = len(np.unique(rows.labels))
    correct = best[:, 0] == rows.labels[:, None]
    figures = {"top1": proportion(correct[:, 0]), "top5": proportion(correct.any(axis=1))}
    if classes < IMAGENET_CLASSES:
        allowed = [accepted.get(int(label), {int(label)}) for label in rows.labels]
        pairs = zip(best[:, 1], allowed, strict=True)
        own = np.array([[int(predicted) in labels for predicted in top] for top, labels in pairs])
        figures |= {"own_top1": proportion(own[:, 0]), "own_top5": proportion(np.any(own, axis=1))}
    return SetResult(len(rows), classes, figures, rows.notes)


def save_predictions(path: Path, rows: Rows, best: np.ndarray) -> None:
    """Without the 1,000 probabilities of each image, which nothing here needs."""
    from ..console.files import as_csv, write

    columns = ["image", "label", "predicted", "top5", "predicted_of_its_classes"]
    lines = []
    for i, (every, own) in enumerate(best):
        top5 = int((every == rows.labels[i]).any())
        values = [rows.images[i], *(rows.classes[k] for k in (rows.labels[i], every[0])), top5, rows.classes[own[0]]]
        lines.append(dict(zip(columns, values, strict=True)))
    write(path, as_csv(columns, lines))


# ---- two runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuiteComparison:
    """Top-1 accuracy on every set before and after, on the same images."""

    rows: tuple[tuple[str, Estimate, Estimate, Estimate], ...]

    def table(self, names: Sequence[str]) -> Table:
        from rich.markup import escape
        from rich.table import Table

        from ..metrics.comparison import verdict

        table = Table("", *map(escape, names), "difference", "", "n", box=None, pad_edge=False)
        for name, before, after, gain in self.rows:
            cells = [f"{e.value_text} {e.interval}".replace("[", r"\[") for e in (before, after, gain)]
            table.add_row(escape(name), *cells, verdict(gain), f"{gain.n:,}")
        return table

    def to_dict(self) -> dict[str, Any]:
        names = ("before", "after", "gain")
        return {name: dict(zip(names, map(asdict, some), strict=True)) for name, *some in self.rows}


def predictions_folder(run: Path, suite: str) -> Path:
    """The folder of a run's suite results, or `run` itself if it is a folder written with `--out`."""
    for folder in (run / suite, run):
        if (folder / "suite.json").exists():
            return folder
    raise UserError(f"{run / suite}: no predictions; create them with `sightline evaluate {run} --suite {suite} …`")


def compare_suites(before: Path, after: Path, suite: str) -> tuple[SuiteComparison, dict[str, PredictionPair]]:
    first, second = (predictions_folder(run, suite) for run in (before, after))
    files = [(path, second / path.name) for path in sorted(first.glob("*.csv"))]
    pairs = {path.stem: read_pair(path, other) for path, other in files if other.exists()}
    if not pairs:
        raise UserError(f"{before} and {after}: no set of {suite} that both were evaluated on")
    rows = []
    for name, (one, other) in pairs.items():
        gain = bootstrap_mean(other.correct.astype(float), one.correct.astype(float))
        rows.append((name, proportion(one.correct), proportion(other.correct), gain))
    return SuiteComparison(tuple(rows)), pairs
