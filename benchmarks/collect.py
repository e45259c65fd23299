"""The result files of the studies, put together from run folders: neither weights nor images are needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from contrasts import (
    ACCURACY,
    PARTS,
    WORST,
    Term,
    block_of,
    contrast_of_terms,
    images_in_common,
    mean_of_block,
    measured_values,
    versus,
)
from evidence import (
    FOUND,
    PLAIN,
    SIGHT,
    STRATA,
    Evidence,
    Missing,
    about,
    arrays_in,
    benchmark_rows,
    displaced_in,
    distances_in,
    facts_of,
    mean_of,
    mean_over_seeds,
    outcomes_in,
    predictions_of,
    read_json,
    stratum,
)
from rows import Row, folders_of
from sightline.explain.perturbation import Curve
from sightline.explain.stress_results import StressResults
from sightline.metrics.comparison import compare, verdict
from sightline.metrics.estimates import Estimate
from sightline.metrics.groups import evaluate, evaluate_seeds
from sightline.metrics.predictions import Predictions
from tables import result_of

# ---- interventions ---------------------------------------------------------------------------------------------------

SHOWN = ("pooled_iou", "pixel_iou", "grid_iou", "coverage", "keypoint_error")


def interventions_results(runs: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """By set and row: the figures under every intervention, with intervals over images and seeds."""
    evidence, found = Evidence(runs), {}
    for row in rows:
        if row.name not in found.get(row.set, {}) and folders_of(runs / row.set, row.name):
            table = {"line": row.line} | interventions_of_row(evidence, row.set, row.name)
            found.setdefault(row.set, {})[row.name] = table
    return found


def interventions_of_row(evidence: Evidence, kind: str, row: str) -> dict[str, Any]:
    """By intervention: accuracy on all test images and by attribute, worst-group accuracy, and the sight."""
    folders = evidence.folders(kind, row)
    first = outcomes_in(next(iter(folders.values())))
    figures: dict[str, dict[str, Any]] = {}
    for how in [how for how in first.correct if all(how in outcomes_in(path).correct for path in folders.values())]:
        parts = ["all", *first.by_attribute] if len(first.by_attribute) > 1 else ["all"]
        found = {part: contrast_of_terms(evidence, kind, [Term(1, row, how, part)], "accuracy")[0] for part in parts}
        if 1 < len(set(first.groups.values())) <= 12:
            found["worst group"] = contrast_of_terms(evidence, kind, [Term(1, row, how)], "worst group")[0]
        figures[how] = {part: asdict(next(iter(one.values()))) for part, one in found.items()}
    for part, how, name, one in intervention_sights(list(folders.values())):
        figures.setdefault(how, {})[f"{name} on {part}" if part != "all" else name] = asdict(one)
    searched = {
        seed: {
            "searches": {name: s["sentence"] for name, s in found["searches"].items()},
            **{name: found.get(name) for name in ("objects", "noise") if found.get(name)},
        }
        for seed, path in folders.items()
        if (path / FOUND).exists() and (found := read_json(path / FOUND))["searches"]
    }
    return {
        "seeds": list(folders), "runs": [fingerprint_of(path) for path in folders.values()],
        "figures": figures, "searched": searched,
        "speed": [facts_of(path).get("speed") for path in folders.values()],
    }  # fmt: skip


def fingerprint_of(folder: Path) -> str:
    """By which a run is recognised: a short hash of its correct predictions."""
    correct = outcomes_in(folder).correct[PLAIN]
    return sha256(json.dumps(correct, sort_keys=True).encode()).hexdigest()[:12]


def intervention_sights(folders: Sequence[Path]) -> Iterator[tuple[str, str, str, Estimate]]:
    """Part of the test images, intervention, figure, and its mean over seeds."""
    known = [read_json(path / SIGHT) for path in folders if (path / SIGHT).exists()]
    for part, hows in known[0].items() if known else ():
        for how, figures in hows.items():
            for name in (name for name in SHOWN if name in figures):
                yield part, how, name, mean_over_seeds([Estimate(**one[part][how][name]) for one in known])


def with_rows_of(before: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The new figures come first, unless more was measured before; `again` holds those of the other training."""
    old = read_json(before)
    sets: dict[str, Any] = {}
    for kind in dict.fromkeys((*found, *old["sets"])):
        then = {name: {"commit": old["commit"]} | row for name, row in old["sets"].get(kind, {}).items()}
        now = found.get(kind, {})
        sets[kind] = {name: with_both(now.get(name), then.get(name)) for name in dict.fromkeys((*now, *then))}
    return sets


def with_both(now: dict[str, Any] | None, then: dict[str, Any] | None) -> Any:
    if now is None or then is None:
        return now or then
    if set(now["runs"]) & set(then.get("runs", [])):  # perhaps with more seeds
        return now | {"again": then["again"]} if "again" in then else now
    first, other = (now, then) if set(then["figures"]) <= set(now["figures"]) else (then, now)
    once = {key: value for key, value in other.items() if key not in ("line", "again")}
    return first | {"again": [once, *then.get("again", [])]}


def is_in(found: dict[str, Any], row: Row) -> bool:
    """Also if its run is not there any more."""
    known = found.get(row.set, {}).get(row.name, {"seeds": []})
    return row.seed in known["seeds"] and ("interventions" not in row.measures or len(known["figures"]) > 1)


# ---- relevance -------------------------------------------------------------------------------------------------------

OF_MAPS = ("mass gae", "hit gae", "positive gae", "negative gae")
OF_FEATURES = ("1 neighbours", "10 neighbours")  # none of ImageNet, which has one photograph of each class
COMPARED = ((ACCURACY, "usual"), (ACCURACY, "shifted"), (ACCURACY, "all"), (WORST, "all"), ("mass gae", "all"))


def start_of(row: str, kind: str) -> str:
    return "before" if kind == "imagenet" else "ERM, S" if row.endswith(", S") else "ERM"


def relevance_results(runs: Path) -> dict[str, Any]:
    evidence, found = Evidence(runs), {}
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        lines, rows = benchmark_rows(folder), []
        for name, known in lines.items():
            seeds = list(evidence.folders(folder.name, name))
            figures = {k: asdict(one) for k, one in summary_of_row(evidence, folder.name, name).items()}
            curves = curves_of(list(evidence.folders(folder.name, name).values()))
            about_row = {"row": name, "command": known["line"], "rate": known.get("rate"), "seeds": seeds}
            rows.append(about_row | figures | ({"curves": curves} if curves else {}))
        if rows:
            facts = about(facts_of(next(iter(evidence.folders(folder.name, rows[0]["row"]).values()))))
            facts = {name: facts[name] for name in ("data", "trained_on")}
            found[folder.name] = facts | {"rows": rows, "paired": paired(evidence, folder.name, list(lines))}
            found[folder.name] |= {"warnings": list(other_starts(evidence, folder.name, list(lines)))}
    return found


def curves_of(folders: Sequence[Path]) -> dict[str, Any]:
    """By direction and map: accuracy with 10, 20, …, 90 % of the pixels black, and the area below; means over seeds."""
    files = [folder / "stress" / "test.json" for folder in folders]
    known = [StressResults.from_dict(read_json(file)) for file in files if file.exists()]
    by_name: dict[str, list[Curve]] = {}
    for curve in (curve for one in known for curve in one.curves):
        by_name.setdefault(f"{curve.direction} {curve.map}", []).append(curve)
    return {
        name: {
            "accuracy": [round(float(np.mean([point.value for point in at])), 4) for at in zip(*points, strict=True)],
            "trapezoid": asdict(mean_over_seeds([one.trapezoid for one in some])),
        }
        for name, some in by_name.items()
        for points in [[one.accuracy for one in some]]
    }


def other_starts(evidence: Evidence, kind: str, rows: list[str]) -> Iterator[str]:
    """A start that was trained again differs on a GPU: rows must fine-tune the same one."""
    found: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in rows:
        for seed, folder in evidence.folders(kind, row).items():
            if weights := (facts_of(folder).get("began_with") or {}).get("weights"):
                found.setdefault((start_of(row, kind), seed), {}).setdefault(weights, []).append(row)
    for (start, seed), by_weights in found.items():
        if len(by_weights) > 1:
            said = "; ".join(f"{weights[:6]}: {', '.join(some)}" for weights, some in by_weights.items())
            yield f"not all rows of seed {seed} went on with the same weights of {start}: {said}"


def paired(evidence: Evidence, kind: str, rows: list[str]) -> list[dict[str, Any]]:
    """Every row against its start, on the same images, with the seeds that both have."""
    found = []
    for row in rows:
        start = start_of(row, kind)
        if row == start or row.startswith("ERM"):
            continue
        line: dict[str, Any] = {"row": row, "against": start}
        for measure, part in COMPARED:
            if measure == WORST and kind != "birds":
                continue
            try:
                _, gain, seeds = versus(evidence, kind, (row, measure), (start, measure), part)
            except (Missing, KeyError):
                continue
            line["seeds"] = seeds[row]
            line[f"{measure}, {part}"] = asdict(gain) | {"verdict": verdict(gain)}
        found.append(line)
    return found


def summary_of_row(evidence: Evidence, kind: str, row: str) -> dict[str, Estimate]:
    """Accuracies on all images and on the parts, and what was measured."""
    found, runs = {}, evidence.folders(kind, row)
    for part in ("all", *PARTS[kind]):
        values = measured_values(evidence, kind, runs, ACCURACY, part)
        images = sorted(next(iter(values.values())))
        if images:
            found[f"accuracy{f', {part}' * (part != 'all')}"] = mean_of_block(block_of(values, images))
    if kind == "birds":
        found["worst group"] = evaluate_seeds(predictions_of(list(runs.values()), "test")).worst_group
    for name in (*OF_MAPS, *(OF_FEATURES if kind != "imagenet" else ())):
        try:
            values = measured_values(evidence, kind, runs, name)
        except Missing:
            continue
        if images := images_in_common([values]):
            found[name] = mean_of_block(block_of(values, images))
    return {name: one for name, one in found.items() if one is not None}


# ---- A² --------------------------------------------------------------------------------------------------------------

KEPT = {"val": ("balanced",), "test": ("accuracy", "mean_of_groups", "worst_group", "groups")}


def parts_of(folder: Path, distances: Mapping[str, float] | None) -> dict[str, Any]:
    """Accuracy and worst-group accuracy of a run by distance of the birds from the centre, and for moved birds."""
    found: dict[str, Predictions] = {}
    if distances:
        (every,) = predictions_of([folder], "test")
        found |= {name: every.take(stratum(every, distances, name)) for name in STRATA}
    found |= {name: some for name in ("displaced", "centred") if (some := displaced_in(folder, name)) is not None}
    result = {}
    for name, some in found.items():
        metrics = evaluate(some)
        worst = metrics.worst_group or metrics.worst_class
        result[name] = {"accuracy": asdict(metrics.accuracy), "worst_group": asdict(worst)}
    return result


def a2_results(runs: Path) -> dict[str, Any]:
    return {path.name: found for path in sorted(runs.glob("*")) if path.is_dir() and (found := a2_set(path))}


def a2_set(folder: Path) -> dict[str, Any]:
    lines, rows = benchmark_rows(folder), []
    distances = distances_in(folder) if (folder / "distances-0").exists() else None
    for name, known in lines.items():
        folders = folders_of(folder, name, ("val", "test"))
        result = result_of(folder, name, known["line"], ("val", "test"), list(folders))
        if result is None:
            continue
        first = next(iter(folders.values()))
        measured = arrays_in(first) if (first / "localization" / "test.csv").exists() else {}
        result |= {"looked": {k: asdict(mean_of(v)) for k, v in measured.items() if k != "image"}} if measured else {}
        off_centre = (
            distances if folder.name == "birds" and (first / "predictions" / "displaced.csv").exists() else None
        )
        parts = parts_of(first, off_centre)
        rows.append(
            result | ({"look": known["look"]} if known.get("look") else {}) | ({"parts": parts} if parts else {})
        )
    attention = {
        path.name.removesuffix("-0"): {k: asdict(mean_of(v)) for k, v in arrays_in(path).items() if k != "image"}
        for path in sorted(folder.glob("attention-*"))
        if (path / "localization" / "test.csv").exists()
    }
    if not rows and not attention:
        return {}
    facts = about(facts_of(folders_of(folder, rows[0]["row"], ("test",))[0])) if rows else {}
    facts = {name: facts[name] for name in ("data", "trained_on") if name in facts}
    return facts | {"rows": rows, "paired": paired_with_controls(folder, lines), "attention": attention}


def paired_with_controls(folder: Path, lines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every row against the whole image with the same backbone and the same kind of fit, on the same images."""
    found = []
    for name, known in lines.items():
        what = known["line"].partition("--backbone @")[2]
        fit = next((kind for kind in ("plain", "DFR val", "DFR train") if name.endswith(f", {kind}")), "")
        control = f"{fit}, {what}" if fit.startswith("DFR") else f"full, {what}{', plain' * (fit == 'plain')}"
        if control == name or control not in lines:
            continue
        blocks = {row: list(folders_of(folder, row, ("test",)).values()) for row in (control, name)}
        entry = compare({row: predictions_of(folders, "test") for row, folders in blocks.items()}).entries[1]
        gains = {"worst_group": entry.worst_gain, "accuracy": entry.accuracy_gain}
        line = {"row": name, "against": control, "split": "test"}
        line["seeds"] = {row: len(folders) for row, folders in blocks.items()}
        found.append(line | {k: asdict(gain) | {"verdict": verdict(gain)} for k, gain in gains.items() if gain})
    return found


def with_looks_once(found: dict[str, Any]) -> dict[str, Any]:
    """The candidates of the look are the same in every row of a backbone: they are listed once."""
    tried = {}
    for row in (row for row in found["rows"] if "look" in row):
        tried[row["row"].removeprefix("A2 ").partition(">")[0]] = row["look"]["tried"]
        row["look"] = {"chosen": row["look"]["chosen"]}
    return found | ({"looks_tried": tried} if tried else {})


def short(found: Any) -> Any:
    """Of hundreds of rows: the main figures with their intervals, rounded; the files of the runs have the rest."""
    if isinstance(found, list):
        return [short(one) for one in found]
    if not isinstance(found, dict):
        return found
    if "low" in found:
        interval = [round(found["low"], 5), round(found["high"], 5)]
        kept = {key: found[key] for key in ("n", "of", "verdict") if found.get(key)}
        return {"value": round(found["value"], 5), "interval": interval} | kept
    if "metrics" in found:
        metrics = {k: {name: one[name] for name in KEPT[k] if one.get(name)} for k, one in found["metrics"].items()}
        found = found | {"metrics": metrics}
    return {key: short(one) for key, one in found.items() if one not in (None, {})}
