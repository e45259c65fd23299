"""What claims are tested with: figures of trained rows, read from their run folders, or measured and put there."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.compare import compare
from sightline.config import Evaluate, Shape
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES, Cells, across_seeds
from sightline.metrics.intervals import TAIL, over_runs, resample
from sightline.metrics.predictions import Answers, aligned
from waterbirds_results import about, answers_in, answers_of, facts_of, mean_over_seeds, sights_of
from waterbirds_rows import folders_of

Pair = tuple[dict[str, Estimate], Estimate]  # the figures of two rows, or of one, and the difference


class Missing(Exception):
    """What a test needs is not there; says what to do."""


@dataclass(frozen=True)
class Runs:
    folder: Path
    split: str = "test"
    proof: Path = Path("proof.json")
    certified: int = 32
    read_only: bool = False
    device: str = "auto"
    workers: int = 2

    def of(self, row: str) -> list[Path]:
        """The folders of a row's finished seeds."""
        return list(folders_of(self.folder, row, (self.split,)).values())

    def needed(self, row: str) -> list[Path]:
        if found := self.of(row):
            return found
        raise Missing(f"no run of {row!r}")

    def facts(self) -> dict[str, Any]:
        """The backbone and the data, which must be the same in all runs, or nothing could be compared."""
        found: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in sorted(self.folder.glob("*/run.json")):
            if (path.parent / "predictions").exists():
                facts = about(facts_of(path.parent))
                backbone, data = facts["backbone"], facts["data"]
                found.setdefault(json.dumps([backbone, data["fingerprint"]], sort_keys=True), (path, facts))
        if len(found) > 1:
            (one, _), (other, _) = list(found.values())[:2]
            raise UserError(f"{one} and {other}: other data or another backbone, so they cannot be compared")
        return next(iter(found.values()))[1] if found else {}

    def answers(self, row: str) -> list[Answers]:
        return answers_of(self.needed(row), self.split)

    def shape_answers(self, row: str) -> list[Answers]:
        """Of the probes that see the shape alone, of the seeds that have one, or whose weights are there to make it."""
        from sightline.explain.shape import shape_run

        found, lost = [], None
        command: Any = {"split": self.split, "device": self.device, "workers": self.workers}
        for folder in self.needed(row):
            path = folder / "shape" / f"{self.split}.csv"
            try:
                self.measured(path, "sightline shape", lambda run: shape_run(Shape(run, **command)))
            except Missing as error:
                lost = error
            else:
                found.append(answers_in(folder, f"shape/{path.name}", self.split))
        if lost is not None and not found:
            raise lost
        return found

    def pictures(self, row: str, figure: str) -> dict[int, dict[str, float]]:
        """By seed and picture, a figure of the sight, where it counts."""
        found, _ = {}, self.needed(row)
        for seed, folder in folders_of(self.folder, row, (self.split,)).items():
            path = folder / "localization" / f"{self.split}.csv"
            if not path.exists():
                raise Missing(f"not measured: `sightline localize {folder.name} --split {self.split}`")
            with path.open(newline="", encoding="utf-8") as file:
                found[seed] = {line["image"]: float(line[figure]) for line in csv.DictReader(file) if line[figure]}
        return found

    def measured(self, path: Path, command: str, measure: Callable[[Path], object]) -> None:
        """What is not there yet is measured, if the run's weights and data are."""
        folder = next(parent for parent in path.parents if (parent / "run.json").exists())
        if path.exists():
            return
        missing = Missing(f"not measured: `{command} {folder.name}`")
        if self.read_only:
            raise missing
        try:
            measure(folder)
        except UserError as error:
            print(error, file=sys.stderr)  # not in the results: it may name folders of this machine
            raise missing from error


# ---- two rows against each other -------------------------------------------------------------------------------------


def worst_group(runs: Runs, ours: str, theirs: str) -> Pair:
    reference, entry = compare({theirs: runs.answers(theirs), ours: runs.answers(ours)}).entries
    assert entry.worst_gain is not None
    return {ours: entry.worst, theirs: reference.worst}, entry.worst_gain


def grid_iou(runs: Runs, ours: str, theirs: str) -> Pair:
    """On the same pictures, of those where something true fills half a patch; and seed by seed, where they are the
    same, since then both began with the same weights and saw the same batches."""
    blocks = [runs.pictures(row, "grid_iou") for row in (ours, theirs)]
    looked = {row: sights_of(runs.of(row), runs.split) for row in (ours, theirs)}
    figures = {row: mean_over_seeds([one["grid_iou"] for one in seeds]) for row, seeds in looked.items()}
    same = sorted(set.intersection(*(set(seed) for block in blocks for seed in block.values())))
    values = [np.array([[seed[image] for seed in block.values()] for image in same]) for block in blocks]
    one_cell = np.zeros(len(same), dtype=np.int64)
    return figures, gain(values, one_cell, np.ones(1), by_seed=list(blocks[0]) == list(blocks[1]))


def gain(blocks: Sequence[np.ndarray], cells: np.ndarray, weights: np.ndarray, *, by_seed: bool = False) -> Estimate:
    """Of a mean that weighs cells of pictures so, between two blocks of runs [n, S]. As in `compare`, the pictures are
    drawn once for both, the runs of each for itself; or, `by_seed`, once for both, too."""
    samples = resample(blocks, cells, RESAMPLES, seed=0)
    (one, drawn), (other, other_drawn) = (sample.averages(weights) for sample in samples)
    draws = over_runs(drawn, samples[0].runs) - over_runs(other_drawn, samples[0 if by_seed else 1].runs)
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    several = sum(block.shape[1] for block in blocks) > 2
    how = "paired bootstrap over images" + (f" and over {'pairs of ' * by_seed}seeds" if several else "")
    return Estimate(one.mean() - other.mean(), low, high, len(cells), how, difference=True)


def apart(ours: Estimate, theirs: Estimate, n: int, how: str) -> Estimate:
    """A difference of which only the intervals of both sides are known: held against the spread of both, as of
    different pictures, which is wider than need be where they are the same."""
    value = ours.value - theirs.value
    down = math.hypot(ours.value - ours.low, theirs.high - theirs.value)
    up = math.hypot(ours.high - ours.value, theirs.value - theirs.low)
    return Estimate(value, value - down, value + up, n, how, difference=True)


def label_from_shape(runs: Runs, ours: str, theirs: str) -> Pair:
    answers = [runs.shape_answers(row) for row in (ours, theirs)]
    figures = [across_seeds(block).balanced for block in answers]
    return dict(zip((ours, theirs), figures, strict=True)), balanced_gain(*answers)


def balanced_gain(ours: Sequence[Answers], theirs: Sequence[Answers]) -> Estimate:
    """Of class-balanced accuracy, on the same pictures."""
    runs = aligned([(f"run {number}", run) for number, run in enumerate([*ours, *theirs], 1)])
    blocks, cells = (runs[: len(ours)], runs[len(ours) :]), Cells.of(runs[0])
    correct = [np.stack([run.correct for run in block], axis=1) for block in blocks]
    return gain(correct, cells.of_image, cells.parts(cells.labels, runs[0].classes).shares.mean(axis=0))


MEASURES: dict[str, Callable[[Runs, str, str], Pair]] = {
    "worst group": worst_group,
    "grid IoU": grid_iou,
    "label from shape": label_from_shape,
}


# ---- one row ---------------------------------------------------------------------------------------------------------


def above_chance(runs: Runs, row: str) -> Pair:
    metrics = across_seeds(runs.shape_answers(row))
    told, chance = metrics.balanced, 1 / len(metrics.classes)
    how = f"{told.how}; chance is {100 * chance:.1f} %"
    over = Estimate(told.value - chance, told.low - chance, told.high - chance, told.n, how, difference=True)
    return {row: told}, over


def certificates(runs: Runs, rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By run folder, of the rows that there are; of those that lack one, only that they do."""
    found = {}
    for folder in [folder for row in rows for folder in runs.of(row)]:
        path = folder / "certificate.json"
        try:
            runs.measured(path, "sightline verify", lambda run, to=path: certify(run, runs).save(to))
        except Missing as missing:
            found[folder.name] = {"verdict": None, "sentence": str(missing)}
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        found[folder.name] = {name: content[name] for name in ("verdict", "sentence", "images")} | {
            name: sum(tried[name] for tried in content["tried"]) for name in ("trials", "changed")
        }
    if not any(one["verdict"] for one in found.values()):
        raise Missing(next(iter(found.values()))["sentence"] if found else f"no run of {', '.join(map(repr, rows))}")
    return found


@torch.no_grad()
def certify(folder: Path, runs: Runs):
    """The proof on pictures of the run's own data, from all over the split."""
    from sightline.evaluate import data_asked_for, opened
    from sightline.metrics.inference import answering_batches, needs_masks, shown, sight_for
    from sightline.verify.verify import verify

    accelerator, model = opened(folder, runs.device)
    rows = shown(model.method, data_asked_for(Evaluate(folder), model.run).rows)
    there = rows.where(runs.split)
    chosen = there[np.linspace(0, len(there) - 1, min(runs.certified, len(there))).astype(int)]
    told = needs_masks(model.method)
    batches = answering_batches(rows, chosen, model.expects, accelerator, batch=len(chosen), workers=0, masks=told)
    try:
        batch = next(iter(batches.epoch(0))).to(accelerator.device)
    finally:
        batches.close()
    images = batch.images.float() / 255
    with torch.enable_grad(), accelerator.autocast():
        sight = sight_for(model.method, images, batch.masks) if told else None  # verify looks for itself
        return verify(model.method, images, sight, draws=2)
