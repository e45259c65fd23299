"""What run folders say, without weights or images: predictions, measurements of each image, means with intervals."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from rows import folder_of, folders_of
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES
from sightline.metrics.intervals import TAIL, mean_over_runs, resample, sum_over_runs
from sightline.metrics.predictions import Predictions

FOUND, TEST, SIGHT, SIGHTS = (Path("interventions") / n for n in ("found.json", "test.csv", "sight.json", "sight.csv"))
PLAIN = "plain"  # without an intervention
STRATA = {  # share of the test images by distance of the bird from the centre, and whether it is the farthest share
    "farthest 1 %": (0.01, True),
    "farthest 10 %": (0.1, True),
    "the rest": (0.1, None),
    "nearest 10 %": (0.1, False),
}


class Missing(Exception):
    """A test lacks a run or a measurement; the message says which."""


# ---- files of a run --------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def facts_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / "run.json")


def about(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The backbone, the data, the selection rule and the device, without anybody's folders."""
    backbone = dict(facts["backbone"] or {})
    backbone["file"] = Path(backbone.get("file") or "").name
    data = {name: value for name, value in facts["data"].items() if name not in ("path", "notes")}
    versions = facts.get("versions", {})
    on_gpu = facts.get("device", "").startswith("cuda")
    trained = {"device": versions.get("device", "") if on_gpu else "CPU", "torch": versions.get("torch", "")}
    return {"selection": facts["selection"], "backbone": backbone, "data": data, "trained_on": trained}


def benchmark_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Every finished row of a dataset: its line, and how its learning rate or look was selected."""
    found = {}
    for path in sorted(folder.glob("*/run.json")):
        known = facts_of(path.parent).get("benchmark")
        if known and (path.parent / "metrics.json").exists():
            found.setdefault(known["row"], known)
    return found


def predictions_in(folder: Path, path: str, split: str) -> Predictions:
    """From a CSV file in a run folder, with the groups in the order of the data."""
    return Predictions.load_csv(folder / path, split=split, group_names=facts_of(folder)["data"]["group_names"])


def predictions_of(folders: Sequence[Path], split: str) -> list[Predictions]:
    return [predictions_in(folder, f"predictions/{split}.csv", split) for folder in folders]


def columns_in(path: Path) -> dict[str, list[str]]:
    """A CSV file by column, without probabilities."""
    return _columns(path, path.stat().st_mtime_ns)


@cache
def _columns(path: Path, _: int) -> dict[str, list[str]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        reader = csv.reader(file)
        header = next(reader)
        kept = [i for i, name in enumerate(header) if not name.startswith("p_")]
        lines = [[line[i] for i in kept] for line in reader]
    columns = zip(*lines, strict=True) if lines else ([] for _ in kept)
    return {header[i]: list(column) for i, column in zip(kept, columns, strict=True)}


def values_in(path: Path, name: str) -> dict[str, float]:
    """A column by image, where it has a value."""
    columns = columns_in(path)
    return {image: float(value) for image, value in zip(columns["image"], columns[name], strict=True) if value}


def arrays_in(folder: Path, split: str = "test") -> dict[str, np.ndarray]:
    """What was measured of each image of a split; `image` among the columns."""
    columns = columns_in(folder / "localization" / f"{split}.csv")
    return {name: np.array(some if name == "image" else [float(x) for x in some]) for name, some in columns.items()}


@dataclass(frozen=True)
class Outcomes:
    """Of the test images of one run."""

    groups: dict[str, str]  # by image
    labels: dict[str, str]  # by image, where known
    correct: dict[str, dict[str, float]]  # by intervention and image

    @property
    def by_attribute(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for image, group in self.groups.items():
            found.setdefault(group.rpartition("/")[2], []).append(image)
        return dict(sorted(found.items()))


def outcomes_in(folder: Path) -> Outcomes:
    """Under every intervention that was measured; of a run without parts, its predictions."""
    path = folder / TEST if (folder / TEST).exists() else folder / "predictions" / "test.csv"
    if not path.exists():
        raise Missing(f"{folder.name}: no predictions")
    columns = columns_in(path)
    images, about_image = columns["image"], ("image", "label", "group", "predicted")
    groups = dict(zip(images, columns.get("group", [""] * len(images)), strict=True))
    labels = dict(zip(images, columns.get("label", ()), strict=False))
    if path.parent.name == "predictions":
        correct = [float(one == other) for one, other in zip(columns["predicted"], columns["label"], strict=True)]
        return Outcomes(groups, labels, {PLAIN: dict(zip(images, correct, strict=True))})
    return Outcomes(groups, labels, {how: values_in(path, how) for how in columns if how not in about_image})


def sights_of(folders: Sequence[Path], split: str) -> list[dict[str, Estimate]]:
    """What `sightline localize` measured of each seed, of those that have been measured."""
    found = []
    for folder in folders:
        path = folder / "localization.json"
        splits = read_json(path)["splits"] if path.exists() else {}
        if split in splits:
            found.append({name: Estimate(**one) for name, one in splits[split]["figures"].items()})
    return found


# ---- parts of the test data ------------------------------------------------------------------------------------------


def stratum(predictions: Predictions, distances: Mapping[str, float], name: str) -> np.ndarray:
    """Indices of the images whose birds are farthest from the centre, or nearest; rounded up, as in the paper."""
    share, far = STRATA[name]
    order = np.argsort([distances[image] for image in predictions.images], kind="stable")
    count = int(np.ceil(share * len(order)))
    if far is None:
        return np.sort(order[:-count])
    return np.sort(order[-count:] if far else order[:count])


def distances_in(runs: Path) -> dict[str, float]:
    return values_in(runs / "distances-0" / "localization" / "test.csv", "distance")


def displaced_in(folder: Path, position: str) -> Predictions | None:
    """Predictions of a run for birds that were moved, or for those that were not, in groups of class and background."""
    path = folder / "predictions" / "displaced.csv"
    if not path.exists():
        return None
    every = Predictions.load_csv(path, split="test")
    assert every.groups is not None, "the dataset has groups"
    named = np.array(every.group_names)[every.groups]
    some = every.take(np.flatnonzero(np.char.endswith(named, f"/{position}")))
    assert some.groups is not None, "so has a part of it"
    short = [name.removesuffix(f"/{position}") for name in some.group_names]
    names = tuple(dict.fromkeys(name for name in short if not name.endswith(("/displaced", "/centred", "/kept"))))
    groups = np.array([names.index(short[group]) for group in some.groups])
    return Predictions(
        some.images, some.labels, some.probabilities, some.predicted, some.classes, groups, names, some.split
    )


# ---- means and differences -------------------------------------------------------------------------------------------


def mean_over_seeds(seeds: Sequence[Estimate]) -> Estimate:
    """More seeds reduce the variance between seeds, not that over images, which are the same."""
    values = np.array([one.value for one in seeds])
    half = float(np.mean([((one.high - one.low) / 2) ** 2 for one in seeds]))
    if len(values) > 1:
        half += student_t.ppf(1 - TAIL, len(values) - 1) ** 2 * values.var(ddof=1) / len(values)
    half, how = math.sqrt(half), "normal, over images" + (" and t, over seeds" if len(values) > 1 else "")
    return Estimate(values.mean(), values.mean() - half, values.mean() + half, seeds[0].n, how)


def mean_of(values: np.ndarray, *, difference: bool = False, resamples: int = 2000) -> Estimate:
    """With a bootstrap over images."""
    generator = np.random.default_rng(0)
    values = values[np.isfinite(values)].astype(np.float64)
    draws = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(values.mean(), low, high, len(values), "bootstrap over images", difference=difference)


def gain(blocks: Sequence[np.ndarray], cells: np.ndarray, weights: np.ndarray, *, by_seed: bool = False) -> Estimate:
    """Of a weighted mean over cells of images, between two blocks of runs [n, S]. As in `sightline compare`, images are
    drawn once for both, and runs of each by itself; with `by_seed` runs are drawn once for both, too."""
    samples = resample(blocks, cells, RESAMPLES, seed=0)
    (one, drawn), (other, other_drawn) = (sample.weighted_mean(weights) for sample in samples)
    ours, theirs = (sample.runs for sample in samples)
    sides = [(1.0, drawn, ours), (-1.0, other_drawn, theirs)]
    draws = mean_over_runs(drawn - other_drawn, ours) if by_seed else sum_over_runs(sides)
    several = sum(block.shape[1] for block in blocks) > 2
    how = "paired bootstrap over images" + (f" and over {'pairs of ' * by_seed}seeds" if several else "")
    return drawn_estimate(one.mean() - other.mean(), draws, len(cells), how)


def drawn_estimate(value: float, draws: np.ndarray, n: int, how: str, *, difference: bool = True) -> Estimate:
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Estimate(float(value), float(low), float(high), n, how, difference=difference)


def apart(ours: Estimate, theirs: Estimate, n: int, how: str) -> Estimate:
    """A difference of which only the intervals of both sides are known, as of different images: it is wider than need
    be where the images are the same."""
    value = ours.value - theirs.value
    down = math.hypot(ours.value - ours.low, theirs.high - theirs.value)
    up = math.hypot(ours.high - ours.value, theirs.value - theirs.low)
    return Estimate(value, value - down, value + up, n, how, difference=True)


# ---- the runs of a study ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The runs that claims are decided by, and the files beside them."""

    runs: Path
    split: str = "test"
    retrained: Path | None = None
    """A result file with rows that were trained again: their spread widens intervals between single runs."""
    ifam: tuple[Path, ...] = ()
    ifam_disjoint: tuple[Path, ...] = ()
    matrix: tuple[Path, ...] = ()
    pretrained: Path | None = None
    proof: Path = Path("proof.json")
    certified: int = 32
    read_only: bool = False
    device: str = "auto"
    workers: int = 2

    def folders(self, kind: str, row: str) -> dict[int, Path]:
        """By seed. The iFAM runs of the A² study are given, not trained there."""
        if row == "iFAM":
            flag, given = ("--ifam-disjoint", self.ifam_disjoint) if kind == "disjoint" else ("--ifam", self.ifam)
            if not given:
                raise Missing(f"no iFAM run on these data was given with {flag}")
            return dict(enumerate(given))
        every = folders_of(self.runs / kind, row)
        files = (TEST, Path("predictions") / f"{self.split}.csv")
        if found := {seed: path for seed, path in every.items() if any((path / file).exists() for file in files)}:
            return found
        raise Missing(f"no run of {row!r} on {kind}")

    def seeds(self, kind: str, *rows: str) -> dict[str, int]:
        return {row: len(self.folders(kind, row)) for row in rows}

    def predictions(self, kind: str, row: str, part: str = "all") -> list[Predictions]:
        """Of the split, or of a part of it: STRATA, displaced, centred."""
        folders = list(self.folders(kind, row).values())
        if part in ("displaced", "centred"):
            found = [some for folder in folders if (some := displaced_in(folder, part)) is not None]
            if len(found) < len(folders):
                raise Missing(f"{row!r} has not answered displaced birds")
            return found
        every = predictions_of(folders, self.split)
        if part == "all":
            return every
        if not (self.runs / kind / "distances-0").exists():
            raise Missing("nobody has measured how far birds are from the centre")
        return [one.take(stratum(one, distances_in(self.runs / kind), part)) for one in every]

    def attention(self, kind: str, backbone: str, split: str = "test") -> dict[str, np.ndarray]:
        """Where a backbone attends, image by image."""
        folder = folder_of(self.runs / kind, f"attention {backbone}", 0)
        if not (folder / "localization" / f"{split}.csv").exists():
            raise Missing(f"nobody has measured where {backbone} looks on {kind}")
        return arrays_in(folder, split)

    def backbones(self, kind: str) -> list[str]:
        """Those with predictions from the whole image, the first one first."""
        names = (name.removeprefix("full, ") for name in benchmark_rows(self.runs / kind) if name.startswith("full, "))
        return [name for name in names if "," not in name]

    def searches(self, kind: str, row: str) -> dict[int, dict[str, Any]]:
        """What the search for an intervention selected, by seed."""
        paths = {seed: path / FOUND for seed, path in self.folders(kind, row).items()}
        if not any(path.exists() for path in paths.values()):
            raise Missing(f"{row!r} on {kind}: nothing was searched for")
        return {seed: read_json(path) for seed, path in paths.items() if path.exists()}

    def retrained_rows(self, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Pairs of figures of the same row, trained twice; the fit of a probe is always the same."""
        rows = {} if self.retrained is None else read_json(self.retrained)["sets"].get(kind, {})
        for row in rows.values():
            if row["line"].split()[0] != "probe":
                yield from ((row, other) for other in row.get("again", []))
