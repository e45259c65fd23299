"""What claims about A² are tested with: answers of rows, to all test pictures or some, and where backbones look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2_results import STRATA, displaced_in, distances_in, lines_in, mean_of, pictures_in, stratum
from claim_figures import Missing
from claims import FAILS, HOLDS, UNDECIDED, Finding, verdict
from sightline.compare import compare
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES, across_seeds
from sightline.metrics.intervals import TAIL, over_runs, resample
from sightline.metrics.predictions import Answers, aligned
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
PARTS = ("all", *STRATA, "displaced", "centred")
SETS_APART = 100  # between the seeds of two sets: more than there are parts


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
    value, draws = drawn_again(blocks, terms, measure)
    how = "paired bootstrap over images within groups" + "; of minima, so biased" * (measure == "worst group")
    n = sum({part: len(some[0]) for (_, part), some in blocks.items()}.values())
    return figures, drawn_estimate(value, draws, n, how)


def gains_apart(
    evidence: Evidence, kinds: tuple[str, str], terms: Sequence[Term], measure: str
) -> tuple[dict[str, Estimate], Estimate]:
    """A weighted sum of rows on one set less the same on another: other pictures, so each is drawn by itself."""
    how, found = "paired bootstrap over images within groups", {}
    for seed, kind in enumerate(kinds):
        blocks = {(row, part): evidence.answers(kind, row, part) for _, row, part in terms}
        n = len(next(iter(blocks.values()))[0])
        found[kind] = (*drawn_again(blocks, terms, measure, SETS_APART * seed), n)
    figures = {f"gain, {kind}": drawn_estimate(*one, how) for kind, one in found.items()}
    (ours, mine, n), (theirs, other, m) = found.values()
    return figures, drawn_estimate(ours - theirs, mine - other, n + m, f"{how}, of each set apart")


def drawn_again(
    blocks: dict[tuple[str, str], list[Answers]], terms: Sequence[Term], measure: str, seed: int = 0
) -> tuple[float, np.ndarray]:
    value, draws = 0.0, np.zeros(RESAMPLES)
    for i, part in enumerate(PARTS):
        mine = [(weight, row) for weight, row, of in terms if of == part]
        if mine:
            answers, weights = [blocks[row, part] for _, row in mine], [weight for weight, _ in mine]
            found, drawn = sums(answers, weights, measure, seed + 1 + i)
            value, draws = value + found, draws + drawn
    return value, draws


def drawn_estimate(value: float, draws: np.ndarray, n: int, how: str) -> Estimate:
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Estimate(value, float(low), float(high), n, how, difference=True)


def sums(
    blocks: Sequence[list[Answers]], weights: Sequence[float], measure: str, seed: int
) -> tuple[float, np.ndarray]:
    """Of rows that answered the same pictures: the weighted sum of their figures, and RESAMPLES other draws of it."""
    every = aligned([(f"run {i}", run) for i, run in enumerate([run for block in blocks for run in block], 1)])
    runs = iter(every)
    correct = [np.stack([next(runs).correct for _ in block], axis=1) for block in blocks]
    labels = every[0].labels if every[0].groups is None else every[0].groups
    _, cells, sizes = np.unique(labels, return_inverse=True, return_counts=True)
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


LESS = {
    "best": "the best block of the last half",  # by validation pictures
    "two thirds": "the block at two thirds",
}


@dataclass(frozen=True)
class Column:
    """A figure of every picture: of a backbone's attention in a block, counted from the end, or a difference of two."""

    backbone: str
    figure: str  # "mass", "hit", "registers"
    block: int = -1
    less: str | None = None  # the block to take away: one of LESS

    @property
    def words(self) -> str:
        less = f" minus {LESS[self.less]}" if self.less else ""
        return f"{self.figure} of {self.backbone}, block {self.block}{less}"

    def values(self, evidence: Evidence, kind: str) -> np.ndarray:
        known = evidence.pictures(kind, self.backbone)
        depth = 1 + max(int(name.split()[0]) for name in known if name[0].isdigit())
        found = known[self.name(self.block % depth)]
        if self.less is None:
            return found
        if self.less == "best":
            val = evidence.pictures(kind, self.backbone, "val")
            return found - known[self.name(max(range(depth // 2, depth), key=lambda i: val[self.name(i)].mean()))]
        return found - known[self.name(max(0, round(depth * 2 / 3) - 1))]

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


# ---- kinds of tests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of rows' figures, on the same pictures."""

    kind: str  # the set
    terms: tuple[Term, ...]
    measure: str = "worst group"
    margin: float = 0.0
    within: bool = False  # of the margin, on either side
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        signs = {1.0: "+", -1.0: "−"}
        said = " ".join(f"{signs[sign]} {row}{f' ({part})' * (part != 'all')}" for sign, row, part in self.terms)
        limit = f" within ±{100 * self.margin:g} points" if self.within else f" > {100 * self.margin:+g} points"
        return f"{self.kind}, {self.measure}: {said.removeprefix('+ ')}{limit if self.margin else ''}"

    def find(self, evidence: Evidence) -> Finding:
        figures, difference = contrast(evidence, self.kind, self.terms, self.measure)
        found = inside(difference, self.margin) if self.within else verdict(difference, self.margin)
        seeds = {row: len(evidence.folders(self.kind, row)) for _, row, _ in self.terms}
        note = ", ".join(f"{row}: {count} seeds" for row, count in seeds.items() if count > 1)
        return Finding(self.words, found, figures, difference, self.margin, self.decides, note=note)


def inside(difference: Estimate, margin: float) -> str:
    if -margin < difference.low and difference.high < margin:
        return HOLDS
    return FAILS if difference.low > margin or difference.high < -margin else UNDECIDED


@dataclass(frozen=True)
class Apart:
    """What is measured of each picture, of two backbones; or of one, against nothing."""

    kind: str
    ours: Column
    theirs: Column | None = None
    margin: float = 0.0
    decides: bool = True
    note: str = ""
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        margin = f" > {100 * self.margin:+g} points" if self.margin else ""
        return f"{self.kind}: {self.ours.words}{f' − {self.theirs.words}' if self.theirs else ''}{margin}"

    def find(self, evidence: Evidence) -> Finding:
        try:
            figures, difference = columns_apart(evidence, self.kind, self.ours, self.theirs)
        except Missing as missing:
            raise Missing(f"{missing}{f'; {self.note}' * bool(self.note)}") from None
        found = verdict(difference, self.margin)
        return Finding(self.words, found, figures, difference, self.margin, self.decides, note=self.note)


@dataclass(frozen=True)
class GainsMore:
    """A row gains more over another on one set than on another set."""

    kinds: tuple[str, str]
    ours: str
    theirs: str
    measure: str = "accuracy"
    decides: bool = True
    rows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.measure}, gain of {self.ours} over {self.theirs}: {self.kinds[0]} − {self.kinds[1]}"

    def find(self, evidence: Evidence) -> Finding:
        figures, difference = gains_apart(evidence, self.kinds, less(self.ours, self.theirs), self.measure)
        return Finding(self.words, verdict(difference), figures, difference, decides=self.decides)


def less(ours: str, theirs: str, part: str = "all") -> tuple[Term, Term]:
    return (1.0, ours, part), (-1.0, theirs, part)
