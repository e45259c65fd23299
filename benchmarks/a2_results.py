"""From run folders to the A² tables: needs their answers and what was measured, neither weights nor pictures."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from a2_rows import RULE
from sightline.compare import compare
from sightline.compare import verdict as said_of
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate
from sightline.metrics.predictions import Answers
from waterbirds_results import about, answers_of, facts_of, result_of, show
from waterbirds_rows import folders_of

Found = dict[str, dict[str, Any]]  # by set
STRATA = {
    "farthest 1 %": (0.01, True),
    "farthest 10 %": (0.1, True),
    "the rest": (0.1, None),
    "nearest 10 %": (0.1, False),
}


def lines_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every finished row: what was asked for, and how its look was chosen."""
    found = {}
    for path in sorted(folder.glob("*/run.json")):
        known = facts_of(path.parent).get("benchmark")
        if known and (path.parent / "metrics.json").exists():
            found[known["row"]] = known
    return found


def pictures_in(folder: Path, split: str = "test") -> dict[str, np.ndarray]:
    """The columns of a table that has a line for every picture; `image` among them."""
    with (folder / "localization" / f"{split}.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return {
        name: np.array([line[name] if name == "image" else float(line[name]) for line in lines]) for name in lines[0]
    }


def mean_of(values: np.ndarray, *, difference: bool = False, resamples: int = 2000) -> Estimate:
    """With a bootstrap over pictures."""
    generator = np.random.default_rng(0)
    values = values[np.isfinite(values)].astype(np.float64)
    draws = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(values.mean(), low, high, len(values), "bootstrap over images", difference=difference)


# ---- parts of the test data ------------------------------------------------------------------------------------------


def stratum(answers: Answers, distances: Mapping[str, float], name: str) -> np.ndarray:
    """Places of the pictures whose birds are so far from the centre, or so near; rounded up, as in the paper."""
    share, far = STRATA[name]
    order = np.argsort([distances[image] for image in answers.images], kind="stable")
    count = int(np.ceil(share * len(order)))
    if far is None:
        return np.sort(order[:-count])
    return np.sort(order[-count:] if far else order[:count])


def distances_in(runs: Path) -> dict[str, float]:
    known = pictures_in(runs / "distances-0")
    return dict(zip(known["image"].tolist(), known["distance"].tolist(), strict=True))


def displaced_in(folder: Path, position: str) -> Answers | None:
    """What a run answered to birds that were moved, or to those that were not, in groups of class and place."""
    path = folder / "predictions" / "displaced.csv"
    if not path.exists():
        return None
    every = Answers.load_csv(path, split="test")
    assert every.groups is not None, "the set has groups"
    named = np.array(every.group_names)[every.groups]
    some = every.take(np.flatnonzero(np.char.endswith(named, f"/{position}")))
    assert some.groups is not None, "so does a part of it"
    short = [name.removesuffix(f"/{position}") for name in some.group_names]
    names = tuple(dict.fromkeys(name for name in short if not name.endswith(("/displaced", "/centred", "/kept"))))
    groups = np.array([names.index(short[group]) for group in some.groups])
    return Answers(
        some.images, some.labels, some.probabilities, some.predicted, some.classes, groups, names, some.split
    )


def parts_of(folder: Path, distances: Mapping[str, float] | None) -> dict[str, Any]:
    """Accuracy and worst group of a run where birds are far from the centre, near it, or were moved."""
    found: dict[str, Answers] = {}
    if distances:
        (answers,) = answers_of([folder], "test")
        found |= {name: answers.take(stratum(answers, distances, name)) for name in STRATA}
    found |= {name: some for name in ("displaced", "centred") if (some := displaced_in(folder, name)) is not None}
    result = {}
    for name, some in found.items():
        metrics = evaluate(some)
        worst = metrics.worst_group or metrics.worst_class
        result[name] = {"accuracy": asdict(metrics.accuracy), "worst_group": asdict(worst)}
    return result


# ---- sets ------------------------------------------------------------------------------------------------------------


def collect(runs: Path) -> Found:
    return {path.name: found for path in sorted(runs.glob("*")) if path.is_dir() and (found := of_set(path))}


def of_set(folder: Path) -> dict[str, Any]:
    lines, rows = lines_in(folder), []
    distances = distances_in(folder) if (folder / "distances-0").exists() else None
    for name, known in lines.items():
        folders = folders_of(folder, name, ("val", "test"))
        result = result_of(folder, name, known["line"], ("val", "test"), list(folders))
        if result is None:
            continue
        first = next(iter(folders.values()))
        measured = pictures_in(first) if (first / "localization" / "test.csv").exists() else {}
        result |= {"looked": {k: asdict(mean_of(v)) for k, v in measured.items() if k != "image"}} if measured else {}
        off_centre = (
            distances if folder.name == "birds" and (first / "predictions" / "displaced.csv").exists() else None
        )
        parts = parts_of(first, off_centre)
        rows.append(result | ({"look": known["look"]} if known["look"] else {}) | ({"parts": parts} if parts else {}))
    attention = {
        path.name.removesuffix("-0"): {k: asdict(mean_of(v)) for k, v in pictures_in(path).items() if k != "image"}
        for path in sorted(folder.glob("attention-*"))
        if (path / "localization" / "test.csv").exists()
    }
    if not rows and not attention:
        return {}
    facts = about(facts_of(folders_of(folder, rows[0]["row"], ("test",))[0])) if rows else {}
    facts = {name: facts[name] for name in ("data", "trained_on") if name in facts}
    return facts | {"rows": rows, "paired": paired_with_controls(folder, lines), "attention": attention}


def paired_with_controls(folder: Path, lines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every row against the whole picture with the same backbone and the same kind of fit, on the same pictures."""
    found = []
    for name, known in lines.items():
        what = known["line"].partition("--backbone @")[2]
        fit = next((kind for kind in ("plain", "DFR val", "DFR train") if name.endswith(f", {kind}")), "")
        control = f"{fit}, {what}" if fit.startswith("DFR") else f"full, {what}{', plain' * (fit == 'plain')}"
        if control == name or control not in lines:
            continue
        blocks = {row: list(folders_of(folder, row, ("test",)).values()) for row in (control, name)}
        entry = compare({row: answers_of(folders, "test") for row, folders in blocks.items()}).entries[1]
        gains = {"worst_group": entry.worst_gain, "accuracy": entry.accuracy_gain}
        line = {"row": name, "against": control, "split": "test"}
        line["seeds"] = {row: len(folders) for row, folders in blocks.items()}
        found.append(line | {k: asdict(gain) | {"verdict": said_of(gain)} for k, gain in gains.items() if gain})
    return found


def show_all(found: Found, *, markdown: bool) -> None:
    for name, one in found.items():
        print(f"\n{name}")
        if one["rows"]:
            show(one["rows"], one["paired"], "test", markdown=markdown)


def record_all(path: Path, found: Found, note: str) -> None:
    from record import record

    sets = {name: with_looks_once(in_short(one)) for name, one in found.items()}
    record(path, "cpu", ({"note": note} if note else {}) | {"looks_chosen_by": RULE, "sets": sets})


def with_looks_once(found: dict[str, Any]) -> dict[str, Any]:
    """What was tried before a look was chosen is the same in every row of a backbone: it is said once."""
    tried = {}
    for row in (row for row in found["rows"] if "look" in row):
        tried[row["row"].removeprefix("A2 ").partition(">")[0]] = row["look"]["tried"]
        row["look"] = {"chosen": row["look"]["chosen"]}
    return found | ({"looks_tried": tried} if tried else {})


SAID = {"val": ("balanced",), "test": ("accuracy", "mean_of_groups", "worst_group", "groups")}


def in_short(found: Any) -> Any:
    """Of hundreds of rows: what is said of each, with its interval, rounded; the runs' own files have the rest."""
    if isinstance(found, list):
        return [in_short(one) for one in found]
    if not isinstance(found, dict):
        return found
    if "low" in found:
        interval = [round(found["low"], 5), round(found["high"], 5)]
        kept = {key: found[key] for key in ("n", "of", "verdict") if found.get(key)}
        return {"value": round(found["value"], 5), "interval": interval} | kept
    if "metrics" in found:
        metrics = {k: {name: one[name] for name in SAID[k] if one.get(name)} for k, one in found["metrics"].items()}
        found = found | {"metrics": metrics}
    return {key: in_short(one) for key, one in found.items() if one not in (None, {})}
