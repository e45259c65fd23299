"""What claims about A² are tested with: answers of rows, to all test pictures or some, and where backbones look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2_results import STRATA, displaced_in, distances_in, lines_in, mean_of, pictures_in, stratum
from claim_figures import Missing
from sightline.answers import Answers, aligned
from sightline.compare import compare
from sightline.evaluate import RESAMPLES, across_seeds
from sightline.intervals import TAIL, over_runs, resample
from sightline.metrics import Estimate
from waterbirds_results import answers_of, facts_of
from waterbirds_rows import folders_of


@dataclass(frozen=True)
class Evidence:
    runs: Path
    ifam: tuple[Path, ...] = ()
    ifam_disjoint: tuple[Path, ...] = ()
    matrix: Path | None = None

    def folders(self, kind: str, row: str) -> list[Path]:
        """Of a row's seeds; iFAM's are given, not made here."""
        if row == "iFAM":
            found = list(self.ifam_disjoint if kind == "disjoint" else self.ifam)
            flag = "--ifam-disjoint" if kind == "disjoint" else "--ifam"
            if not found:
                raise Missing(f"no iFAM run on these data was given with {flag}")
            return found
        if found := list(folders_of(self.runs / kind, row, ("test",)).values()):
            return found
        raise Missing(f"no run of {row!r} on {kind}")

    def answers(self, kind: str, row: str, part: str = "all") -> list[Answers]:
        folders = self.folders(kind, row)
        if part in ("displaced", "centred"):
            found = [some for folder in folders if (some := displaced_in(folder, part)) is not None]
            if len(found) < len(folders):
                raise Missing(f"{row!r} has not answered displaced birds")
            return found
        every = answers_of(folders, "test")
        if part == "all":
            return every
        if not (self.runs / kind / "distances-0").exists():
            raise Missing("nobody has measured how far birds are from the centre")
        return [one.take(stratum(one, distances_in(self.runs / kind), part)) for one in every]

    def names(self, kind: str) -> list[str]:
        """The backbones that have answered the whole picture, the first one first."""
        lines = lines_in(self.runs / kind)
        return [name.removeprefix("full, ") for name in lines if name.startswith("full, ") and name.count(",") == 1]

    def pictures(self, kind: str, backbone: str, split: str = "test") -> dict[str, np.ndarray]:
        folder = next(iter(folders_all(self.runs / kind, f"attention {backbone}")), None)
        if folder is None or not (folder / "localization" / f"{split}.csv").exists():
            raise Missing(f"nobody has measured where {backbone} looks on {kind}")
        return pictures_in(folder, split)

    def same_backbone_as_ifam(self, kind: str) -> str:
        """The name here of the backbone that iFAM's runs began with."""
        file = Path((facts_of(self.folders(kind, "iFAM")[0])["backbone"] or {}).get("file") or "").name
        for name in self.names(kind):
            here = facts_of(self.folders(kind, f"full, {name}")[0])["backbone"]
            if Path(here.get("file") or "").name == file:
                return name
        raise Missing(f"iFAM has another backbone ({file}) than every row here")


def folders_all(runs: Path, row: str) -> list[Path]:
    from waterbirds_rows import folder_of

    return [folder] if (folder := folder_of(runs, row, 0)).exists() else []


# ---- figures and differences -----------------------------------------------------------------------------------------

Term = tuple[float, str, str]  # how much it counts, the row, and the part of the test pictures


def contrast(
    evidence: Evidence, kind: str, terms: Sequence[Term], measure: str
) -> tuple[dict[str, Estimate], Estimate]:
    """The figure of every term, and their weighted sum, on pictures that are drawn once for all rows."""
    blocks = {(row, part): evidence.answers(kind, row, part) for _, row, part in terms}
    figures = {f"{row}{f', {part}' * (part != 'all')}": figure(some, measure) for (row, part), some in blocks.items()}
    (one, ours, part), *others = terms
    if measure == "worst group" and len(terms) == 2 and (one, others[0][0], others[0][2]) == (1, -1, part):
        entry = compare({"theirs": blocks[others[0][1:]], "ours": blocks[ours, part]}).entries[1]
        assert entry.worst_gain is not None, "there is always a worst one"
        return figures, entry.worst_gain
    value, draws = 0.0, np.zeros(RESAMPLES)
    for part in dict.fromkeys(part for _, _, part in terms):
        mine = [(weight, row) for weight, row, of in terms if of == part]
        found, drawn = sums([blocks[row, part] for _, row in mine], [weight for weight, _ in mine], measure, part)
        value, draws = value + found, draws + drawn
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    how = "paired bootstrap over images within groups" + "; of minima, so biased" * (measure == "worst group")
    n = sum({part: len(some[0]) for (_, part), some in blocks.items()}.values())
    return figures, Estimate(value, float(low), float(high), n, how, difference=True)


def sums(
    blocks: Sequence[list[Answers]], weights: Sequence[float], measure: str, part: str
) -> tuple[float, np.ndarray]:
    """Of rows that answered the same pictures: the weighted sum of their figures, and RESAMPLES other draws of it."""
    every = aligned([(f"run {i}", run) for i, run in enumerate([run for block in blocks for run in block], 1)])
    runs = iter(every)
    correct = [np.stack([next(runs).correct for _ in block], axis=1) for block in blocks]
    labels = every[0].labels if every[0].groups is None else every[0].groups
    _, cells, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    seed = 1 + ["all", *STRATA, "displaced", "centred"].index(part)
    value, draws = 0.0, np.zeros(RESAMPLES)
    for weight, sample in zip(weights, resample(correct, cells, RESAMPLES, seed), strict=True):
        if measure == "worst group":
            observed, drawn = sample.parts(np.eye(len(sizes)))
            observed, drawn = observed.min(axis=1), drawn.min(axis=2)
        else:
            shares = sizes / sizes.sum() if measure == "accuracy" else np.full(len(sizes), 1 / len(sizes))
            observed, drawn = sample.averages(shares)
        value, draws = value + weight * observed.mean(), draws + weight * over_runs(drawn, sample.runs)
    return float(value), draws


def figure(runs: Sequence[Answers], measure: str) -> Estimate:
    metrics = across_seeds(runs)
    if measure == "accuracy":
        return metrics.accuracy
    worst = metrics.worst_group or metrics.worst_class
    return worst if measure == "worst group" else metrics.mean_of_groups or metrics.balanced


@dataclass(frozen=True)
class Column:
    """A figure of every picture: of a backbone's attention in a block, counted from the end, or a difference of two."""

    backbone: str
    figure: str  # "mass", "hit", "registers"
    block: int = -1
    less: int | str | None = None  # the block to take away, or `best`: the block that validation pictures say is best

    @property
    def words(self) -> str:
        less = f" minus that of block {self.less}" if self.less is not None else ""
        return f"{self.figure} of {self.backbone}, block {self.block}{less}"

    def values(self, evidence: Evidence, kind: str) -> np.ndarray:
        known = evidence.pictures(kind, self.backbone)
        depth = 1 + max(int(name.split()[0]) for name in known if name[0].isdigit())
        found = known[self.name(self.block % depth)]
        if self.less is None:
            return found
        if self.less == "best":
            val = evidence.pictures(kind, self.backbone, "val")
            return found - known[self.name(max(range(depth), key=lambda i: val[self.name(i)].mean()))]
        block = self.less if isinstance(self.less, int) else max(0, round(depth * 2 / 3) - 1)
        return found - known[self.name(block % depth)]

    def name(self, block: int) -> str:
        return f"{block} registers" if self.figure == "registers" else f"{block} mean pixels {self.figure}"


def columns_apart(
    evidence: Evidence, kind: str, ours: Column, theirs: Column | None
) -> tuple[dict[str, Any], Estimate]:
    values = ours.values(evidence, kind)
    if theirs is None:
        return {ours.words: asdict(mean_of(values, difference=True))}, mean_of(values, difference=True)
    others = theirs.values(evidence, kind)
    same = np.array_equal(
        evidence.pictures(kind, ours.backbone)["image"], evidence.pictures(kind, theirs.backbone)["image"]
    )
    if not same:
        raise Missing(f"{ours.backbone} and {theirs.backbone} were not shown the same pictures")
    figures = {one.words: mean_of(some) for one, some in ((ours, values), (theirs, others))}
    return figures, mean_of(values - others, difference=True)
