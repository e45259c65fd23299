"""What claims about interventions are tested with: answers and sights of rows, picture by picture, under each one."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from claim_figures import Missing
from interventions_measure import FOUND, SIGHT, SIGHTS, TEST, as_csv
from sightline.errors import UserError
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import RESAMPLES
from sightline.metrics.intervals import TAIL, least_gain, over_runs, resample
from waterbirds_results import facts_of, mean_over_seeds
from waterbirds_rows import folder_of

KEPT = ("run.json", "metrics.json", "log.jsonl", *map(str, (FOUND, TEST, SIGHT, SIGHTS)))
PACKED, PLAIN = ".tar.xz", "plain"
SHOWN = ("pooled_iou", "pixel_iou", "grid_iou", "coverage", "keypoint_error")


@dataclass(frozen=True)
class Outcomes:
    """Of one run's test pictures."""

    groups: dict[str, str]  # by picture
    right: dict[str, dict[str, float]]  # by intervention and picture

    @property
    def by_attribute(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for image, group in self.groups.items():
            found.setdefault(group.rpartition("/")[2], []).append(image)
        return dict(sorted(found.items()))


@cache
def outcomes_in(folder: Path) -> Outcomes:
    """What was measured under interventions; of a run without parts, its answers."""
    path = folder / TEST
    measured = path.exists()
    path = path if measured else folder / "predictions" / "test.csv"
    if not path.exists():
        raise Missing(f"{folder.name}: no answers")
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        reader = csv.reader(file)
        header = next(reader)
        at = {name: header.index(name) for name in ("image", "label", "group", "predicted") if name in header}
        hows = {name: k for k, name in enumerate(header) if measured and name not in at}
        lines = [line[: None if measured else max(at.values()) + 1] for line in reader]
    groups = {line[at["image"]]: line[at["group"]] if "group" in at else "" for line in lines}
    if not measured:
        right = {line[at["image"]]: float(line[at["predicted"]] == line[at["label"]]) for line in lines}
        return Outcomes(groups, {PLAIN: right})
    return Outcomes(groups, {how: {line[at["image"]]: float(line[k]) for line in lines} for how, k in hows.items()})


@cache
def sights_in(folder: Path) -> dict[str, dict[str, float]]:
    """By column, such as `q0.99 pixel_iou`, and picture."""
    if not (folder / SIGHTS).exists():
        raise Missing(f"{folder.name}: nobody has measured where it looks")
    with (folder / SIGHTS).open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        lines = list(csv.DictReader(file))
    columns = [name for name in lines[0] if name != "image"]
    return {name: {line["image"]: float(line[name]) for line in lines if line[name]} for name in columns}


@dataclass(frozen=True)
class Term:
    """A row under an intervention, on some of the test pictures; and how much it counts."""

    weight: float
    row: str
    how: str = PLAIN
    part: str = "all"  # an attribute, such as `swapped`

    @property
    def words(self) -> str:
        return self.row + f" ({self.how})" * (self.how != PLAIN)


@dataclass(frozen=True)
class Evidence:
    runs: Path
    twice: Path | None = None  # a file of `interventions.py --before`, with rows that were trained again

    def folders(self, kind: str, row: str) -> dict[int, Path]:
        """By seed."""
        start = folder_of(self.runs / kind, row, 0).name[:-1]
        found = {
            int(seed): path
            for path in sorted((self.runs / kind).glob(f"{start}*"))
            if (seed := path.name.removeprefix(start)).isdigit() and (path / "metrics.json").exists()
        }
        if not found:
            raise Missing(f"no run of {row!r} on {kind}")
        return found

    def values(self, kind: str, term: Term, measure: str) -> dict[int, dict[str, float]]:
        """By seed and picture; of a gap, by seed and bird: (1 + right on `same` − right on `rand`) / 2."""
        found = {}
        for seed, path in self.folders(kind, term.row).items():
            known = outcomes_in(path)
            if measure == "gap":
                right = known.right[PLAIN]
                found[seed] = {
                    image: (1 + right[image] - right[image.replace("/same/", "/rand/")]) / 2
                    for image in known.by_attribute.get("same", [])
                }
                continue
            column = f"{term.how} pixel_iou"
            every = sights_in(path).get(column) if measure == "IoU" else known.right.get(term.how)
            if every is None:
                raise Missing(f"{path.name}: not measured under {term.how!r}")
            wanted = known.groups if term.part == "all" else known.by_attribute.get(term.part, [])
            found[seed] = {image: every[image] for image in wanted if image in every}
        return found

    def groups(self, kind: str, row: str) -> dict[str, str]:
        return outcomes_in(next(iter(self.folders(kind, row).values()))).groups

    def found(self, kind: str, row: str) -> dict[int, dict[str, Any]]:
        """What searches chose, by seed."""
        paths = {seed: path / FOUND for seed, path in self.folders(kind, row).items()}
        if not any(path.exists() for path in paths.values()):
            raise Missing(f"{row!r} on {kind}: nothing was searched for")
        return {s: json.loads(path.read_text(encoding="utf-8")) for s, path in paths.items() if path.exists()}

    def spread(self, kind: str, part: str, measure: str) -> Spread | None:
        """Of figures as trained, over the rows of a set that were trained again; a probe's fit is always the same."""
        rows = {} if self.twice is None else json.loads(self.twice.read_text(encoding="utf-8"))["sets"].get(kind, {})
        learnt = [row for row in rows.values() if row["line"].split()[0] != "probe"]
        pairs = [(row, other) for row in learnt for other in row.get("again", [])]
        squares = [
            (figure_in(row, part, measure) - figure_in(other, part, measure)) ** 2
            / (1 / len(row["seeds"]) + 1 / len(other["seeds"]))
            for row, other in pairs
        ]
        return Spread(float(np.sqrt(np.mean(squares))), len(squares)) if squares else None


@dataclass(frozen=True)
class Spread:
    """The standard deviation between runs of a row, and how many rows tell of it."""

    deviation: float
    rows: int

    def widened(self, difference: Estimate, terms: Sequence[Term], runs: dict[str, int]) -> Estimate:
        """Runs that are alone say nothing of others like them. What a run is under an intervention against itself
        stays as it is: there, being trained again is in both."""
        weights = {row: sum(term.weight for term in terms if term.row == row) for row in {term.row for term in terms}}
        variance = sum(weight**2 for row, weight in weights.items() if runs[row] == 1) * self.deviation**2
        if not variance:
            return difference
        reach = student_t.ppf(1 - TAIL, self.rows) * np.sqrt(variance)
        low, high = (np.hypot(difference.value - end, reach) for end in (difference.low, difference.high))
        how = f"{difference.how}, and training again ({self.rows} rows)"
        return replace(difference, low=difference.value - low, high=difference.value + high, how=how)


def figure_in(row: dict[str, Any], part: str, measure: str) -> float:
    """Of a table's row, as trained."""
    figures = row["figures"][PLAIN]
    if measure == "gap":
        return figures["same"]["value"] - figures["rand"]["value"]
    return figures["worst group" if measure == "worst group" else part]["value"]


def contrast(
    evidence: Evidence, kind: str, terms: Sequence[Term], measure: str
) -> tuple[dict[str, Estimate], Estimate]:
    """The figure of every term, and their weighted sum, on pictures that are drawn once for all; runs are drawn by row,
    so that a run stays together with itself under an intervention."""
    every = [evidence.values(kind, term, measure) for term in terms]
    same = sorted(set.intersection(*(set(seed) for block in every for seed in block.values())))
    if not same:
        raise Missing(f"{kind}: no pictures in common")
    blocks = [np.array([[seed[image] for seed in block.values()] for image in same]) for block in every]
    groups = evidence.groups(kind, terms[0].row)
    names = sorted({groups[image] for image in same}) if measure == "worst group" else [""]
    cells = np.array([names.index(groups[image]) if len(names) > 1 else 0 for image in same])
    samples = resample(blocks, cells, RESAMPLES, seed=0)
    runs = {term.row: sample.runs for term, sample in zip(reversed(terms), reversed(samples), strict=True)}
    scale, value, draws = 2.0 if measure == "gap" else 1.0, 0.0, np.zeros(RESAMPLES)
    figures = {}
    for term, sample in zip(terms, samples, strict=True):
        observed, drawn = sample.parts(np.eye(len(names)))
        observed, drawn = scale * (observed.min(axis=1) - (scale - 1) / 2), scale * drawn.min(axis=2) - (scale - 1)
        together = over_runs(drawn, runs[term.row])
        low, high = np.quantile(together, [TAIL, 1 - TAIL])
        figures[term.words] = Estimate(float(observed.mean()), low, high, len(same), "bootstrap over images")
        value, draws = value + term.weight * observed.mean(), draws + term.weight * together
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    how = "paired bootstrap over images" + " and runs" * (max(block.shape[1] for block in blocks) > 1)
    if measure == "worst group" and [term.weight for term in terms] == [1, -1]:
        ours, theirs = ((s.parts(np.eye(len(names)))[1], runs[t.row]) for s, t in zip(samples, terms, strict=True))
        low, high = least_gain(*ours, *theirs), -least_gain(*theirs, *ours)
    elif measure == "worst group":
        how += ", of minima, so biased"
    return figures, Estimate(float(value), float(low), float(high), len(same), how, difference=True)


# ---- tables and parcels ----------------------------------------------------------------------------------------------


def table_of(evidence: Evidence, kind: str, row: str) -> dict[str, Any]:
    """By intervention: accuracy on all test pictures and on those of each attribute, the worst group, and the sight."""
    folders = evidence.folders(kind, row)
    first = outcomes_in(next(iter(folders.values())))
    figures: dict[str, dict[str, Any]] = {}
    for how in [how for how in first.right if all(how in outcomes_in(path).right for path in folders.values())]:
        parts = ["all", *first.by_attribute] if len(first.by_attribute) > 1 else ["all"]
        found = {part: contrast(evidence, kind, [Term(1, row, how, part)], "accuracy")[0] for part in parts}
        if 1 < len(set(first.groups.values())) <= 12:
            found["worst group"] = contrast(evidence, kind, [Term(1, row, how)], "worst group")[0]
        figures[how] = {part: asdict(next(iter(one.values()))) for part, one in found.items()}
    for part, how, name, one in sights_of(list(folders.values())):
        figures.setdefault(how, {})[f"{name} on {part}" if part != "all" else name] = asdict(one)
    searched = {
        seed: {
            "searches": {name: s["sentence"] for name, s in found["searches"].items()},
            **{name: found.get(name) for name in ("objects", "noise") if found.get(name)},
        }
        for seed, path in folders.items()
        if (path / FOUND).exists() and (found := json.loads((path / FOUND).read_text(encoding="utf-8")))["searches"]
    }
    return {
        "seeds": list(folders), "runs": [mark_of(path) for path in folders.values()],
        "figures": figures, "searched": searched,
        "speed": [facts_of(path).get("speed") for path in folders.values()],
    }  # fmt: skip


def mark_of(folder: Path) -> str:
    """By which a run is known again: a short hash of which pictures it was right on."""
    right = outcomes_in(folder).right[PLAIN]
    return sha256(json.dumps(right, sort_keys=True).encode()).hexdigest()[:12]


def sights_of(folders: Sequence[Path]) -> Iterator[tuple[str, str, str, Estimate]]:
    """Part of the test pictures, intervention, figure, and its mean over seeds."""
    known = [json.loads((path / SIGHT).read_text(encoding="utf-8")) for path in folders if (path / SIGHT).exists()]
    for part, hows in known[0].items() if known else ():
        for how, figures in hows.items():
            for name in (name for name in SHOWN if name in figures):
                yield part, how, name, mean_over_seeds([Estimate(**one[part][how][name]) for one in known])


def pack_all(runs: Path, into: Path) -> Iterator[dict[str, Any]]:
    """Results without weights and without the probabilities of 200 classes, a file for each set."""
    into.mkdir(parents=True, exist_ok=True)
    for kind in sorted({path.parents[1] for path in runs.glob("*/*/metrics.json")}):
        target = into / f"{kind.name}{PACKED}"
        with tarfile.open(target, "w:xz") as file:
            for folder in sorted(path for path in kind.iterdir() if (path / "metrics.json").exists()):
                for name, content in packed_of(folder).items():
                    entry = tarfile.TarInfo(f"{folder.name}/{name}")
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))
        yield {"packed": target.name, "megabytes": round(target.stat().st_size / 1e6, 2)}


def packed_of(folder: Path) -> dict[str, bytes]:
    """By name in the run."""
    found = {name: (folder / name).read_bytes() for name in KEPT if (folder / name).exists()}
    facts = facts_of(folder)
    if "data" in facts:  # whose folder is another one elsewhere
        facts["data"]["path"] = Path(facts["data"]["path"]).name
        found["run.json"] = json.dumps(facts, indent=1, ensure_ascii=False).encode()
    if str(TEST) not in found:
        found[str(TEST)] = outcomes_as_csv(outcomes_in(folder)).encode("utf-8", "surrogateescape")
    return found


def unpack_all(parcels: Path, runs: Path) -> None:
    """Runs that are there already stay as they are."""
    found = sorted(parcels.glob(f"*{PACKED}"))
    if not found:
        raise UserError(f"{parcels}: no *{PACKED} in it, which --pack makes")
    for parcel in found:
        target = runs / parcel.name.removesuffix(PACKED)
        there = {path.name for path in target.glob("*") if (path / "metrics.json").exists()}
        with tarfile.open(parcel) as file:
            file.extractall(target, [one for one in file if Path(one.name).parts[0] not in there], filter="data")


@contextmanager
def unpacked(folder: Path) -> Generator[Path]:
    """A folder of runs; of parcels, one with the runs in them, for a while."""
    if not any(folder.glob(f"*{PACKED}")):
        yield folder
        return
    with TemporaryDirectory() as place:
        unpack_all(folder, Path(place))
        yield Path(place)


def outcomes_as_csv(known: Outcomes) -> str:
    columns: dict[str, Sequence[Any]] = {"image": list(known.groups), "group": list(known.groups.values())}
    return as_csv(columns | {how: [int(right[image]) for image in known.groups] for how, right in known.right.items()})
