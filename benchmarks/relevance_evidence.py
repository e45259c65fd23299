"""What claims about relevance are tested with: answers and measurements of rows, picture by picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from claim_figures import Missing, gain
from sightline.compare import compare
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES, across_seeds
from sightline.metrics.intervals import average, resample
from waterbirds_results import answers_of, facts_of
from waterbirds_rows import folders_of

AS_THEY_WERE = "before"
CORRECT = "accuracy"
WORST = "worst group"
USUAL = ("landbird/land", "waterbird/water")
OF_MAPS = ("mass gae", "hit gae", "positive gae", "negative gae")
OF_FEATURES = ("1 neighbours", "10 neighbours")  # none of ImageNet, which has one photograph of each class


@dataclass(frozen=True)
class Pictures:
    """Of one run, by picture."""

    labels: dict[str, str]
    groups: dict[str, str]
    right: dict[str, float]


@cache
def pictures_in(folder: Path) -> Pictures:
    with (folder / "predictions" / "test.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        reader = csv.reader(file)
        header = next(reader)
        at = {name: header.index(name) for name in ("image", "label", "predicted", "group") if name in header}
        lines = [{name: line[i] for name, i in at.items()} for line in reader]
    return Pictures(
        {line["image"]: line["label"] for line in lines},
        {line["image"]: line.get("group", "") for line in lines},
        {line["image"]: float(line["predicted"] == line["label"]) for line in lines},
    )


@cache
def column_in(folder: Path, name: str) -> dict[str, float]:
    """What `sightline stress` measured of each picture."""
    path = folder / "stress" / "test.csv"
    if not path.exists():
        raise Missing(f"not measured: `sightline stress {folder.name}`")
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        lines = list(csv.DictReader(file))
    if name not in lines[0]:
        raise Missing(f"{folder.name}: {name!r} was not measured")
    return {line["image"]: float(line[name]) for line in lines if line[name]}


# ---- parts of the test pictures --------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Evidence:
    runs: Path

    def folders(self, kind: str, row: str) -> dict[int, Path]:
        """By seed."""
        if found := folders_of(self.runs / kind, row, ("test",)):
            return found
        raise Missing(f"no run of {row!r} on {kind}")

    def in_common(self, kind: str, ours: str, theirs: str) -> list[dict[int, Path]]:
        """The runs of two rows, by the seeds that both have: what goes on with another run is held against that run,
        and not against its other seeds. The weights as they were have none, and stand beside each."""
        sides = [self.folders(kind, row) for row in (ours, theirs)]
        for side, other, row in ((0, 1, ours), (1, 0, theirs)):
            if row == AS_THEY_WERE:
                sides[side] = dict.fromkeys(sides[other], next(iter(sides[side].values())))
        seeds = sorted(set(sides[0]) & set(sides[1]))
        if not seeds:
            raise Missing(f"{ours!r} and {theirs!r} on {kind} have no seed in common")
        return [{seed: side[seed] for seed in seeds} for side in sides]

    def values(
        self, kind: str, runs: Mapping[int, Path], measure: str, part: str = "all"
    ) -> dict[int, dict[str, float]]:
        """By seed and picture; `part` may be of PARTS, and of the classes that were learnt from or not."""
        found = {}
        for seed, folder in runs.items():
            known = pictures_in(folder)
            every = known.right if measure == CORRECT else column_in(folder, measure)
            found[seed] = {image: value for image, value in every.items() if self.is_in(kind, part, known, image, seed)}
        return found

    def is_in(self, kind: str, part: str, known: Pictures, image: str, seed: int) -> bool:
        for word in part.split(", "):
            if word in ("learnt", "not learnt"):
                if (known.labels[image] in self.learnt(kind, seed)) != (word == "learnt"):
                    return False
            elif word != "all" and not PARTS[kind][word](known.groups[image]):
                return False
        return True

    def learnt(self, kind: str, seed: int) -> frozenset[str]:
        """The classes whose masks RobustViT's headline row was shown."""
        folder = self.folders(kind, "RobustViT").get(seed)
        if folder is None:
            raise Missing(f"no run of 'RobustViT' on {kind} with the seed {seed}")
        return frozenset(facts_of(folder)["learnt_from"]["classes"])

    def rate(self, kind: str, row: str) -> str:
        folder = next(iter(self.folders(kind, row).values()))
        return str(((facts_of(folder).get("benchmark") or {}).get("rate") or {}).get("rate", ""))


def block(values: dict[int, dict[str, float]], images: Sequence[str]) -> np.ndarray:
    return np.array([[seed[image] for seed in values.values()] for image in images])


def figure(values: np.ndarray) -> Estimate:
    """The mean of a block [n, S]."""
    (sample,) = resample([values], np.zeros(len(values), dtype=np.int64), RESAMPLES, 0)
    how = "bootstrap over images" + (" and over seeds" if values.shape[1] > 1 else "")
    return average(*sample.averages(np.ones(1)), sample.runs, len(values), how)


def versus(
    evidence: Evidence, kind: str, ours: tuple[str, str], theirs: tuple[str, str], part: str = "all"
) -> tuple[dict[str, Estimate], Estimate, dict[str, int]]:
    """Rows and measures of two sides on the same pictures and with the same seeds: the figures, the difference, and how
    many seeds."""
    if ours[1] == theirs[1] == WORST:
        return worst(evidence, kind, ours[0], theirs[0])
    runs = evidence.in_common(kind, ours[0], theirs[0])
    sides = [evidence.values(kind, some, side[1], part) for some, side in zip(runs, (ours, theirs), strict=True)]
    if part.endswith("learnt") and len(runs[0]) > 1:
        return seed_by_seed(ours[0], theirs[0], sides)
    images = sorted(set.intersection(*(set(seed) for side in sides for seed in side.values())))
    if not images:
        raise Missing(f"{ours[0]} and {theirs[0]} have not been shown the same pictures of {part!r}")
    blocks = [block(side, images) for side in sides]
    difference = gain(blocks, np.zeros(len(images), dtype=np.int64), np.ones(1), by_seed=True)
    names = [" ".join(side) if ours[1] != theirs[1] else side[0] for side in (ours, theirs)]
    counts = [len(set(some.values())) for some in runs]
    figures = {name: figure(one[:, :n]) for name, one, n in zip(names, blocks, counts, strict=True)}
    return figures, difference, {side[0]: n for side, n in zip((ours, theirs), counts, strict=True)}


def seed_by_seed(
    ours: str, theirs: str, sides: Sequence[Mapping[int, Mapping[str, float]]]
) -> tuple[dict[str, Estimate], Estimate, dict[str, int]]:
    """Where every seed has pictures of its own, since it learnt from other classes: each is averaged by itself. Drawn
    anew are the seeds, and the pictures, whichever seeds they are of."""
    seeds = sorted(sides[0])
    common = {seed: sorted(set(sides[0][seed]) & set(sides[1][seed])) for seed in seeds}
    images = {image: i for i, image in enumerate(sorted(set().union(*common.values())))}
    if not all(common.values()):
        raise Missing(f"{ours} and {theirs} have not been shown the same pictures with every seed")
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
        draws.append(means[:, generator.integers(len(seeds), size=len(seeds))].mean(axis=1))
    found, how, n = np.nanmean(values, axis=2).mean(axis=1), "bootstrap over images and over seeds", len(images)

    def estimate(value: float, drawn: np.ndarray, **more: Any) -> Estimate:
        low, high = np.quantile(drawn, (0.025, 0.975))
        return Estimate(float(value), float(low), float(high), n, how, **more)

    drawn = np.array(draws)
    figures = {name: estimate(found[side], drawn[:, side]) for side, name in enumerate((ours, theirs))}
    gained = estimate(found[0] - found[1], drawn[:, 0] - drawn[:, 1], difference=True)
    return figures, gained, dict.fromkeys((ours, theirs), len(seeds))


def worst(
    evidence: Evidence, kind: str, ours: str, theirs: str
) -> tuple[dict[str, Estimate], Estimate, dict[str, int]]:
    pair = evidence.in_common(kind, theirs, ours)
    folders = {row: list(some.values()) for row, some in zip((theirs, ours), pair, strict=True)}
    entry = compare({row: answers_of(some, "test") for row, some in folders.items()}).entries
    assert entry[1].worst_gain is not None
    return {ours: entry[1].worst, theirs: entry[0].worst}, entry[1].worst_gain, {k: len(v) for k, v in folders.items()}


def subsets_of(evidence: Evidence, kind: str, row: str) -> dict[str, Any]:
    folder = next(iter(evidence.folders(kind, row).values()))
    path = folder / "stress" / "test.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("subsets") if path.exists() else None
    if found is None:
        raise Missing(f"not measured: `sightline stress {folder.name} --tests subsets`")
    return found


def summary(evidence: Evidence, kind: str, row: str) -> dict[str, Estimate]:
    """Of one row: accuracies on all pictures and on the parts, and what was measured."""
    found, runs = {}, evidence.folders(kind, row)
    for part in ("all", *PARTS[kind]):
        values = evidence.values(kind, runs, CORRECT, part)
        images = sorted(next(iter(values.values())))
        if images:
            found[f"accuracy{f', {part}' * (part != 'all')}"] = figure(block(values, images))
    if kind == "birds":
        found["worst group"] = across_seeds(answers_of(list(runs.values()), "test")).worst_group
    for name in (*OF_MAPS, *(OF_FEATURES if kind != "imagenet" else ())):
        try:
            values = evidence.values(kind, runs, name)
        except Missing:
            continue
        images = sorted(set.intersection(*(set(seed) for seed in values.values())))
        if images:
            found[name] = figure(block(values, images))
    return {name: one for name, one in found.items() if one is not None}
