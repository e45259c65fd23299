"""Robustness on published test sets: a model of ImageNet's 1,000 classes, on as many of the sets as there are.

Any of 1,000 answers may be given, as RobustViT counts; beside it, among the classes of each set alone, as the authors
of ImageNet-A, -R and ObjectNet do. The two are not comparable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.rows import Rows, read_rows
from ..datasets.imagenet import SI_SCORE_FOLDERS, imagenet_classes, objectnet_answers
from ..errors import UserError
from ..metrics.estimates import Estimate
from ..metrics.inference import inference_batches, map_batches, sight_for_prediction
from ..metrics.intervals import wilson

if TYPE_CHECKING:
    from rich.table import Table

    from ..config import Suite
    from .class_changes import Seen

TOP = 5
WHOLE = 1000
SI_SCORE = ("si-score", "si_score", "SI-Score", "")
# Each layout with the folders that it is found in.
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
    "own_top1": "top-1 of its classes",
    "own_top5": "top-5 of its classes",
}


@dataclass(frozen=True)
class Shifted:
    """One set."""

    n: int
    classes: int
    figures: dict[str, Estimate]  # of FIGURES; those of its own classes where it has not all of them
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suited:
    suite: str
    sets: dict[str, Shifted]
    missing: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        found = [f"{name}: {note}" for name, one in self.sets.items() for note in one.notes]
        return found + ([f"not there: {', '.join(self.missing)}"] if self.missing else [])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        from rich.table import Table

        table = Table("", "n", "classes", *FIGURES.values(), box=None, pad_edge=False, caption="Wilson's intervals.")
        table.caption_justify = "left"
        for name, one in self.sets.items():
            cells = [f"{e.figure} {e.interval}" if (e := one.figures.get(k)) else "as before" for k in FIGURES]
            table.add_row(name, f"{one.n:,}", f"{one.classes:,}", *(cell.replace("[", r"\[") for cell in cells))
        return table


def sets_in(folder: Path) -> dict[str, Path]:
    """Those of the suite that are there, by layout."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; it should hold {', '.join(SETS)}")
    found = {}
    for name, places in SETS.items():
        if there := next((folder / place for place in places if (folder / place).is_dir()), None):
            found[name] = there
    if not found:
        raise UserError(f"{folder}: none of the suite's sets is there: {', '.join(SETS)}")
    return found


def run_suite(command: Suite) -> tuple[Suited, Path]:
    """A trained model on every set that is there, and the folder with what came of it."""
    from ..console.files import make_folder, write
    from ..load import opened

    assert command.suite is not None
    if command.suite_folder is None:
        raise UserError(f"--suite {command.suite}: say where the sets are, with --suite-folder")
    if command.data is not None or command.layout is not None:
        raise UserError(f"--suite {command.suite}: has its own data; leave out {command.data or '--layout'}")
    there = sets_in(command.suite_folder)
    accelerator, model = opened(command.run, command.device, intervention=command.intervention)
    if model.classes != tuple(imagenet_classes().values()):
        raise UserError(
            f"{command.run}: knows {len(model.classes):,} classes; {command.suite} is for models of ImageNet's 1,000"
        )
    folder = command.out or model.run.folder / command.suite
    make_folder(folder)
    sets = {}
    for name, path in there.items():
        rows = read_rows(path, layout=name, whole=True)
        accepted = by_label(objectnet_answers(rows.root)) if name == "objectnet" else {}
        own = sorted({*rows.labels.tolist()}.union(*accepted.values()))
        best = best_answers(model, rows, own, accelerator, command)
        sets[name] = shifted(rows, best, accepted)
        if accelerator.is_main_process:
            save_answers(folder / f"{name}.csv", rows, best)
    found = Suited(command.suite, sets, tuple(name for name in SETS if name not in there))
    if accelerator.is_main_process:
        write(folder / "suite.json", json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    accelerator.wait_for_everyone()
    return found, folder


def by_label(answers: Mapping[str, Sequence[int]]) -> dict[int, set[int]]:
    """Of objects that have several classes: every right answer, by the first."""
    found: dict[int, set[int]] = {}
    for labels in answers.values():
        found.setdefault(labels[0], set()).update(labels)
    return found


def best_answers(model: Any, rows: Rows, classes: Sequence[int], accelerator: Any, command: Suite) -> np.ndarray:
    """int64 [n, 2, 5]: the likeliest of all, and of the set's own `classes`; -1 where it has fewer."""
    own = torch.tensor(classes, device=accelerator.device)

    def best(images: Tensor, masks: Tensor | None) -> Tensor:
        logits = model.method.judge(images, sight_for_prediction(model.method, images, masks)).logits.float()
        among = own[logits[:, own].topk(min(TOP, len(own)), dim=1).indices]
        among = torch.nn.functional.pad(among, (0, TOP - among.shape[1]), value=-1)
        return torch.stack([logits.topk(TOP, dim=1).indices, among], dim=1)

    if model.method.needs_masks:
        raise UserError("this model is told where to look by masks, and these sets have none")
    indices = np.arange(len(rows))
    batches = inference_batches(
        rows, indices, model.expects, accelerator, batch=command.batch, workers=command.workers, cache=command.cache
    )
    with closing(batches):
        return map_batches(best, batches, accelerator).astype(np.int64)


def shifted(rows: Rows, best: np.ndarray, accepted: Mapping[int, set[int]]) -> Shifted:
    """The label alone is right, as RobustViT counts; among its own classes, all that ObjectNet accepts are."""
    classes = len(np.unique(rows.labels))
    right = best[:, 0] == rows.labels[:, None]
    figures = {"top1": share(right[:, 0]), "top5": share(right.any(axis=1))}
    if classes < WHOLE:
        allowed = [accepted.get(int(label), {int(label)}) for label in rows.labels]
        pairs = zip(best[:, 1], allowed, strict=True)
        own = [[int(guess) in right_ones for guess in guesses] for guesses, right_ones in pairs]
        first, any_of = (np.array([pick(some) for some in own]) for pick in (lambda some: some[0], any))
        figures |= {"own_top1": share(first), "own_top5": share(any_of)}
    return Shifted(len(rows), classes, figures, rows.notes)


def share(right: np.ndarray) -> Estimate:
    low, high = wilson(int(right.sum()), len(right))
    return Estimate(float(right.mean()), low, high, len(right), "Wilson")


def save_answers(path: Path, rows: Rows, best: np.ndarray) -> None:
    """Without 1,000 probabilities each, which nothing here needs."""
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
class SuiteCompared:
    """Top-1 of every set before and after, on the same pictures."""

    rows: tuple[tuple[str, Estimate, Estimate, Estimate], ...]

    def table(self, names: Sequence[str]) -> Table:
        from rich.table import Table

        from ..metrics.comparison import verdict

        table = Table("", *names, "difference", "", "n", box=None, pad_edge=False)
        for name, before, after, gain in self.rows:
            cells = [f"{e.figure} {e.interval}".replace("[", r"\[") for e in (before, after, gain)]
            table.add_row(name, *cells, verdict(gain), f"{gain.n:,}")
        return table

    def to_dict(self) -> dict[str, Any]:
        names = ("before", "after", "gain")
        return {name: dict(zip(names, map(asdict, some), strict=True)) for name, *some in self.rows}


def answers_in(run: Path, suite: str) -> Path:
    """The folder of a run's answers, or itself, where `--out` had them written."""
    for home in (run / suite, run):
        if (home / "suite.json").exists():
            return home
    raise UserError(f"{run / suite}: no answers; make them: `sightline evaluate {run} --suite {suite} …`")


def compare_suites(before: Path, after: Path, suite: str) -> tuple[SuiteCompared, dict[str, tuple[Seen, Seen]]]:
    from .class_changes import both
    from .perturbation import mean_over

    homes = [answers_in(run, suite) for run in (before, after)]
    files = [(path, homes[1] / path.name) for path in sorted(homes[0].glob("*.csv"))]
    pairs = {one.stem: both(one, other) for one, other in files if other.exists()}
    if not pairs:
        raise UserError(f"{before} and {after}: no set of {suite} that both have answered")
    rows = []
    for name, (one, other) in pairs.items():
        gain = mean_over(other.correct.astype(float), one.correct.astype(float))
        rows.append((name, share(one.correct), share(other.correct), gain))
    return SuiteCompared(tuple(rows)), pairs
