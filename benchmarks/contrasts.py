"""Differences between rows on the same images, with intervals: what the tests of claims measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from evidence import (
    PLAIN,
    SIGHTS,
    Evidence,
    Missing,
    Outcomes,
    drawn_estimate,
    facts_of,
    gain,
    mean_over_seeds,
    outcomes_in,
    predictions_of,
    sights_of,
    values_in,
)
from sightline.compare import compare
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES, Cells
from sightline.metrics.intervals import (
    TAIL,
    gain_lower_bound,
    mean_estimate,
    mean_over_runs,
    resample,
    run_weights,
    sum_over_runs,
)
from sightline.metrics.predictions import Predictions, align_runs

Figures = dict[str, Any]
ACCURACY, WORST = "accuracy", "worst group"
ONE_CELL = np.ones(1)


def one_cell(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.int64)


def block_of(values: Mapping[int, Mapping[str, float]], images: Sequence[str]) -> np.ndarray:
    """[n, S]"""
    return np.array([[seed[image] for seed in values.values()] for image in images])


def images_in_common(sides: Sequence[Mapping[int, Mapping[str, float]]]) -> list[str]:
    return sorted(set.intersection(*(set(seed) for side in sides for seed in side.values())))


def worst_group_gain(
    ours: tuple[str, list[Predictions]], theirs: tuple[str, list[Predictions]]
) -> tuple[Figures, Estimate]:
    reference, entry = compare(dict([theirs, ours])).entries
    assert entry.worst_gain is not None, "there is always a worst group"
    return {ours[0]: entry.worst, theirs[0]: reference.worst}, entry.worst_gain


# ---- waterbirds ------------------------------------------------------------------------------------------------------


def worst_group(evidence: Evidence, kind: str, ours: str, theirs: str) -> tuple[Figures, Estimate]:
    return worst_group_gain(*((row, evidence.predictions(kind, row)) for row in (ours, theirs)))


def grid_iou(evidence: Evidence, kind: str, ours: str, theirs: str) -> tuple[Figures, Estimate]:
    """On images where the true mask fills half a patch; seed by seed where the seeds are the same, since both then
    started from the same weights and saw the same batches."""
    blocks, figures = [], {}
    for row in (ours, theirs):
        folders = evidence.folders(kind, row)
        blocks.append({})
        for seed, folder in folders.items():
            path = folder / "localization" / f"{evidence.split}.csv"
            if not path.exists():
                raise Missing(f"not measured: `sightline localize {folder.name} --split {evidence.split}`")
            blocks[-1][seed] = values_in(path, "grid_iou")
        seen = sights_of(list(folders.values()), evidence.split)
        figures[row] = mean_over_seeds([one["grid_iou"] for one in seen])
    same = images_in_common(blocks)
    values = [block_of(block, same) for block in blocks]
    return figures, gain(values, one_cell(len(same)), ONE_CELL, by_seed=list(blocks[0]) == list(blocks[1]))


def balanced_gain(ours: Sequence[Predictions], theirs: Sequence[Predictions]) -> Estimate:
    """Of class-balanced accuracy."""
    runs = align_runs([(f"run {number}", run) for number, run in enumerate([*ours, *theirs], 1)])
    blocks, cells = (runs[: len(ours)], runs[len(ours) :]), Cells.of(runs[0])
    correct = [np.stack([run.correct for run in block], axis=1) for block in blocks]
    return gain(correct, cells.of_image, cells.subsets(cells.labels, runs[0].classes).weights.mean(axis=0))


# ---- relevance -------------------------------------------------------------------------------------------------------

BEFORE = "before"  # the pretrained weights
USUAL = ("landbird/land", "waterbird/water")


def attribute(group: str) -> str:
    return group.partition("/")[2]


PARTS: dict[str, dict[str, Callable[[str], bool]]] = {
    "birds": {"usual": lambda group: group in USUAL, "shifted": lambda group: group not in USUAL},
    "cub": {
        "usual": lambda group: attribute(group) == "original",
        "shifted": lambda group: attribute(group) == "swapped",
    },
    "si": {
        "usual": lambda group: attribute(group) == "none",
        "shifted": lambda group: attribute(group) != "none",
        **{
            shift: (lambda group, shift=shift: attribute(group).startswith(shift))
            for shift in ("location", "rotation", "size")
        },
    },
    "imagenet": {},
}


def with_common_seeds(evidence: Evidence, kind: str, ours: str, theirs: str) -> list[dict[int, Path]]:
    """A fine-tuned run is compared with the run it started from. The pretrained weights have no seed, and stand beside
    each."""
    sides = [evidence.folders(kind, row) for row in (ours, theirs)]
    for side, other, row in ((0, 1, ours), (1, 0, theirs)):
        if row == BEFORE:
            sides[side] = dict.fromkeys(sides[other], next(iter(sides[side].values())))
    seeds = sorted(set(sides[0]) & set(sides[1]))
    if not seeds:
        raise Missing(f"{ours!r} and {theirs!r} on {kind} have no seed in common")
    return [{seed: side[seed] for seed in seeds} for side in sides]


def measured_values(
    evidence: Evidence, kind: str, runs: Mapping[int, Path], measure: str, part: str = "all"
) -> dict[int, dict[str, float]]:
    """By seed and image; `part` is one of PARTS, and of the classes with masks (`learnt`) or without."""
    found = {}
    for seed, folder in runs.items():
        known = outcomes_in(folder)
        if measure == ACCURACY:
            every = known.correct[PLAIN]
        elif not (path := folder / "stress" / "test.csv").exists():
            raise Missing(f"not measured: `sightline stress {folder.name}`")
        else:
            try:
                every = values_in(path, measure)
            except KeyError:
                raise Missing(f"{folder.name}: {measure!r} was not measured") from None
        wanted = part_of(evidence, kind, part, known, seed)
        found[seed] = {image: value for image, value in every.items() if wanted(image)}
    return found


def part_of(evidence: Evidence, kind: str, part: str, known: Outcomes, seed: int) -> Callable[[str], bool]:
    words = [word for word in part.split(", ") if word != "all"]
    learnt = classes_with_masks(evidence, kind, seed) if any(word.endswith("learnt") for word in words) else frozenset()

    def is_in(image: str) -> bool:
        return all(
            (known.labels[image] in learnt) == (word == "learnt")
            if word.endswith("learnt")
            else PARTS[kind][word](known.groups[image])
            for word in words
        )

    return is_in


def classes_with_masks(evidence: Evidence, kind: str, seed: int) -> frozenset[str]:
    """Of the headline row of RobustViT."""
    folder = evidence.folders(kind, "RobustViT").get(seed)
    if folder is None:
        raise Missing(f"no run of 'RobustViT' on {kind} with the seed {seed}")
    return frozenset(facts_of(folder)["learnt_from"]["classes"])


def mean_of_block(values: np.ndarray) -> Estimate:
    """Of a block [n, S]."""
    (sample,) = resample([values], one_cell(len(values)), RESAMPLES, 0)
    how = "bootstrap over images" + (" and over seeds" if values.shape[1] > 1 else "")
    return mean_estimate(*sample.weighted_mean(ONE_CELL), sample.runs, len(values), how)


def versus(
    evidence: Evidence, kind: str, ours: tuple[str, str], theirs: tuple[str, str], part: str = "all"
) -> tuple[Figures, Estimate, dict[str, int]]:
    """(row, measure) of two sides on the same images and with the same seeds: figures, difference, number of seeds."""
    runs = with_common_seeds(evidence, kind, ours[0], theirs[0])
    if ours[1] == theirs[1] == WORST:
        folders = {side[0]: list(some.values()) for side, some in zip((ours, theirs), runs, strict=True)}
        figures, difference = worst_group_gain(*((row, predictions_of(some, "test")) for row, some in folders.items()))
        return figures, difference, {theirs[0]: len(folders[theirs[0]]), ours[0]: len(folders[ours[0]])}
    sides = [
        measured_values(evidence, kind, some, side[1], part) for some, side in zip(runs, (ours, theirs), strict=True)
    ]
    if part.endswith("learnt") and len(runs[0]) > 1:
        return seed_by_seed(ours[0], theirs[0], sides)
    images = images_in_common(sides)
    if not images:
        raise Missing(f"{ours[0]} and {theirs[0]} have not been shown the same images of {part!r}")
    blocks = [block_of(side, images) for side in sides]
    difference = gain(blocks, one_cell(len(images)), ONE_CELL, by_seed=True)
    names = [" ".join(side) if ours[1] != theirs[1] else side[0] for side in (ours, theirs)]
    counts = [len(set(some.values())) for some in runs]
    figures = {name: mean_of_block(one[:, :n]) for name, one, n in zip(names, blocks, counts, strict=True)}
    return figures, difference, {side[0]: n for side, n in zip((ours, theirs), counts, strict=True)}


def seed_by_seed(
    ours: str, theirs: str, sides: Sequence[Mapping[int, Mapping[str, float]]]
) -> tuple[Figures, Estimate, dict[str, int]]:
    """Where each seed has other images, since it trained with other classes: each is averaged by itself. Seeds are
    drawn, and images, whichever seeds they are of."""
    seeds = sorted(sides[0])
    common = {seed: sorted(set(sides[0][seed]) & set(sides[1][seed])) for seed in seeds}
    images = {image: i for i, image in enumerate(sorted(set().union(*common.values())))}
    if not all(common.values()):
        raise Missing(f"{ours} and {theirs} have not been shown the same images with every seed")
    values = np.full((2, len(seeds), len(images)), np.nan)
    for s, seed in enumerate(seeds):
        at = [images[image] for image in common[seed]]
        for side in (0, 1):
            values[side, s, at] = [sides[side][seed][image] for image in common[seed]]
    there, generator = ~np.isnan(values[0]), np.random.default_rng(0)
    filled, draws = np.nan_to_num(values), []
    for _ in range(RESAMPLES):
        times = np.bincount(generator.integers(len(images), size=len(images)), minlength=len(images))
        means = (filled @ times) / np.maximum(there @ times, 1)
        draws.append(means @ run_weights(len(seeds), 1, generator)[0])
    found, how, n = np.nanmean(values, axis=2).mean(axis=1), "bootstrap over images and over seeds", len(images)
    drawn = np.array(draws)
    figures = {
        name: drawn_estimate(found[side], drawn[:, side], n, how, difference=False)
        for side, name in enumerate((ours, theirs))
    }
    gained = drawn_estimate(found[0] - found[1], drawn[:, 0] - drawn[:, 1], n, how)
    return figures, gained, dict.fromkeys((ours, theirs), len(seeds))


# ---- interventions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A row under an intervention, on a part of the test images; and its weight in a sum."""

    weight: float
    row: str
    how: str = PLAIN
    part: str = "all"  # an attribute, such as `swapped`

    @property
    def words(self) -> str:
        return self.row + f" ({self.how})" * (self.how != PLAIN)


@dataclass(frozen=True)
class Spread:
    """The standard deviation between runs of a row, and from how many rows it is known."""

    deviation: float
    rows: int

    def widened(self, difference: Estimate, terms: Sequence[Term], runs: dict[str, int]) -> Estimate:
        """For rows with a single run. A run under an intervention against itself stays as it is."""
        weights = {row: sum(term.weight for term in terms if term.row == row) for row in {term.row for term in terms}}
        variance = sum(weight**2 for row, weight in weights.items() if runs[row] == 1) * self.deviation**2
        if not variance:
            return difference
        reach = student_t.ppf(1 - TAIL, self.rows) * np.sqrt(variance)
        low, high = (np.hypot(difference.value - end, reach) for end in (difference.low, difference.high))
        how = f"{difference.how}, and training again ({self.rows} rows)"
        return replace(difference, low=difference.value - low, high=difference.value + high, how=how)


def spread(evidence: Evidence, kind: str, part: str, measure: str) -> Spread | None:
    """Over the rows of a dataset that were trained again."""

    def figure(row: dict[str, Any]) -> float:
        figures = row["figures"][PLAIN]
        if measure == "gap":
            return figures["same"]["value"] - figures["rand"]["value"]
        return figures[WORST if measure == WORST else part]["value"]

    squares = [
        (figure(row) - figure(other)) ** 2 / (1 / len(row["seeds"]) + 1 / len(other["seeds"]))
        for row, other in evidence.retrained_rows(kind)
    ]
    return Spread(float(np.sqrt(np.mean(squares))), len(squares)) if squares else None


def term_values(evidence: Evidence, kind: str, term: Term, measure: str) -> dict[int, dict[str, float]]:
    """By seed and image; of a gap, by seed and bird: (1 + correct on `same` − correct on `rand`) / 2."""
    found = {}
    for seed, path in evidence.folders(kind, term.row).items():
        known = outcomes_in(path)
        if measure == "gap":
            correct = known.correct[PLAIN]
            found[seed] = {
                image: (1 + correct[image] - correct[image.replace("/same/", "/rand/")]) / 2
                for image in known.by_attribute.get("same", [])
            }
            continue
        if measure == "IoU" and not (path / SIGHTS).exists():
            raise Missing(f"{path.name}: nobody has measured where it looks")
        try:
            every = values_in(path / SIGHTS, f"{term.how} pixel_iou") if measure == "IoU" else known.correct[term.how]
        except KeyError:
            raise Missing(f"{path.name}: not measured under {term.how!r}") from None
        wanted = known.groups if term.part == "all" else known.by_attribute.get(term.part, [])
        found[seed] = {image: every[image] for image in wanted if image in every}
    return found


def contrast_of_terms(evidence: Evidence, kind: str, terms: Sequence[Term], measure: str) -> tuple[Figures, Estimate]:
    """The figure of every term and their weighted sum. Images are drawn once for all terms; runs are drawn by row, so
    that a run stays together with itself under an intervention."""
    every = [term_values(evidence, kind, term, measure) for term in terms]
    same = images_in_common(every)
    if not same:
        raise Missing(f"{kind}: no images in common")
    blocks = [block_of(block, same) for block in every]
    groups = outcomes_in(next(iter(evidence.folders(kind, terms[0].row).values()))).groups
    names = sorted({groups[image] for image in same}) if measure == WORST else [""]
    cells = np.array([names.index(groups[image]) if len(names) > 1 else 0 for image in same])
    samples = resample(blocks, cells, RESAMPLES, seed=0)
    runs = {term.row: sample.runs for term, sample in zip(reversed(terms), reversed(samples), strict=True)}
    scale, value = 2.0 if measure == "gap" else 1.0, 0.0
    figures, by_row = {}, dict[str, np.ndarray]()
    for term, sample in zip(terms, samples, strict=True):
        observed, drawn = sample.subset_accuracies(np.eye(len(names)))
        observed, drawn = scale * (observed.min(axis=1) - (scale - 1) / 2), scale * drawn.min(axis=2) - (scale - 1)
        together = mean_over_runs(drawn, runs[term.row])
        how = "bootstrap over images"
        figures[term.words] = drawn_estimate(observed.mean(), together, len(same), how, difference=False)
        value += term.weight * observed.mean()
        by_row[term.row] = by_row.get(term.row, 0.0) + term.weight * drawn
    draws = sum_over_runs([(1.0, drawn, runs[row]) for row, drawn in by_row.items()])
    how = "paired bootstrap over images" + " and runs" * (max(block.shape[1] for block in blocks) > 1)
    if measure == WORST and [term.weight for term in terms] == [1, -1]:
        ours, theirs = (
            (s.subset_accuracies(np.eye(len(names)))[1], runs[t.row]) for s, t in zip(samples, terms, strict=True)
        )
        low, high = float(gain_lower_bound(*ours, *theirs)), -float(gain_lower_bound(*theirs, *ours))
        return figures, Estimate(float(value), low, high, len(same), how, difference=True)
    how += ", of minima, so biased" * (measure == WORST)
    return figures, drawn_estimate(value, draws, len(same), how)
