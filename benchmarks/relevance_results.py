"""From run folders to the relevance tables, and pictures of what changed: only these need weights and photographs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from claim_figures import Missing
from relevance_evidence import CORRECT, WORST, Evidence, summary, versus
from sightline.compare import verdict
from sightline.errors import UserError
from sightline.explain.perturbation import Curve
from sightline.explain.stress_results import Stressed
from sightline.metrics.estimates import Estimate
from waterbirds_results import about, facts_of, mean_over_seeds, pack

EXAMPLES = 6  # pictures that were helped, and as many that were harmed
COMPARED = ((CORRECT, "usual"), (CORRECT, "shifted"), (CORRECT, "all"), (WORST, "all"), ("mass gae", "all"))


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Every finished row with its line, and how its rate was chosen."""
    found = {}
    for path in sorted(folder.glob("*/run.json")):
        known = facts_of(path.parent).get("benchmark")
        if known and (path.parent / "metrics.json").exists():
            found.setdefault(known["row"], known)
    return found


def start_of(row: str, kind: str) -> str:
    return "before" if kind == "imagenet" else "ERM, S" if row.endswith(", S") else "ERM"


def collect(runs: Path) -> dict[str, Any]:
    evidence, found = Evidence(runs), {}
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        lines, rows = rows_in(folder), []
        for name, known in lines.items():
            seeds = list(evidence.folders(folder.name, name))
            figures = {k: asdict(one) for k, one in summary(evidence, folder.name, name).items()}
            curves = curves_of(list(evidence.folders(folder.name, name).values()))
            about_row = {"row": name, "command": known["line"], "rate": known["rate"], "seeds": seeds}
            rows.append(about_row | figures | ({"curves": curves} if curves else {}))
        if rows:
            facts = about(facts_of(next(iter(evidence.folders(folder.name, rows[0]["row"]).values()))))
            facts = {name: facts[name] for name in ("data", "trained_on")}
            found[folder.name] = facts | {"rows": rows, "paired": paired(evidence, folder.name, list(lines))}
            found[folder.name] |= {"warnings": list(apart(evidence, folder.name, list(lines)))}
    return found


def curves_of(folders: Sequence[Path]) -> dict[str, Any]:
    """By direction and map: accuracy with 10, 20, …, 90 % of the pixels black, and the area below; means over seeds."""
    files = [folder / "stress" / "test.json" for folder in folders]
    known = [Stressed.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]
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


def apart(evidence: Evidence, kind: str, rows: list[str]) -> Iterator[str]:
    """A beginning that was trained again is another one on a GPU: its rows go with it alone."""
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
    """Every row against what it went on with, on the same pictures, of the seeds that both have."""
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


def show(found: dict[str, Any]) -> None:
    console = Console(highlight=False, width=240)
    for kind, one in found.items():
        names = list(
            dict.fromkeys(k for row in one["rows"] for k, v in row.items() if isinstance(v, dict) and "low" in v)
        )
        table = Table(kind, "seeds", *names, box=None, pad_edge=False)
        for row in one["rows"]:
            cells = [_short(Estimate(**row[name])) if name in row else "" for name in names]
            table.add_row(row["row"], str(len(row["seeds"])), *cells)
        console.print(table)
        for warning in one["warnings"]:
            console.print(f"warning: {kind}: {warning}", markup=False)
        for line in one["paired"]:
            gains = {name: gain for name, gain in line.items() if isinstance(gain, dict)}
            said = ", ".join(f"{name} {100 * gain['value']:+.1f} ({gain['verdict']})" for name, gain in gains.items())
            console.print(f"{line['row']} − {line['against']} (seeds: {line.get('seeds', 0)}): {said}", markup=False)


def _short(one: Estimate) -> str:
    return f"{100 * one.value:.1f} \\{one.interval}"


def pack_all(runs: Path, into: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(runs.iterdir()):
        folders = sorted(one for one in path.iterdir() if (one / "metrics.json").exists()) if path.is_dir() else []
        for parcel in pack(folders, into / path.name) if folders else []:
            yield {"packed": f"{path.name}/{parcel.name}", "megabytes": round(parcel.stat().st_size / 1e6, 2)}


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_all(runs: Path, device: str = "auto") -> None:
    """Per set, what changed from the beginning to RobustViT: classes, and maps of pictures whose answer changed."""
    from sightline.explain.class_changes import both, class_changes, draw_changes, in_words

    for kind in sorted(path.name for path in runs.glob("*") if path.is_dir()):
        try:
            evidence = Evidence(runs)
            before, after = (evidence.folders(kind, row)[0] for row in (start_of("RobustViT", kind), "RobustViT"))
        except (Missing, KeyError):
            continue
        pair = both(*(folder / "predictions" / "test.csv" for folder in (before, after)))
        changes = class_changes(*pair)
        print(f"{kind}: {in_words(changes)}")
        try:
            draw_changes({kind: changes}, runs / kind / "classes.png", f"from {before.name} to {after.name}")
        except UserError as error:
            print(f"no picture of classes: {error}")
        if all((folder / "best.safetensors").exists() for folder in (before, after)):
            draw_maps(before, after, runs / kind / "changed.png", device)


def draw_maps(before: Path, after: Path, path: Path, device: str) -> None:
    """Relevance before and after, of pictures that were put right and of such that were put wrong, alike."""
    from sightline.config import Evaluate
    from sightline.data.images import Canvas, decode
    from sightline.datasets.imagenet import imagenet_classes
    from sightline.evaluate import data_asked_for, opened
    from sightline.explain.class_changes import both
    from sightline.report.drawing import lit, sheet
    from sightline.where.relevance import MAPS

    called = imagenet_classes()

    one, other = both(*(folder / "predictions" / "test.csv" for folder in (before, after)))
    accelerator, first = opened(before, device)
    _, second = opened(after, device)
    rows = data_asked_for(Evaluate(before), first.run).rows
    place = {image: i for i, image in enumerate(rows.images)}
    strips: dict[str, Any] = {}
    for name, changed in (("helped", ~one.correct & other.correct), ("harmed", one.correct & ~other.correct)):
        chosen = np.flatnonzero(changed)
        if not len(chosen):
            continue
        chosen = chosen[np.linspace(0, len(chosen) - 1, EXAMPLES).astype(int)]
        images = torch.stack([decode(rows, place[one.images[i]], Canvas.of(first.expects)).image for i in chosen])
        images = images.to(accelerator.device).float() / 255
        names = [
            ", ".join(called.get(some[i], some[i]) for i in chosen)
            for some in (one.labels, one.predicted, other.predicted)
        ]
        strips[f"{name}: {names[0]}"] = images.cpu()
        for model, said, word in ((first, names[1], "before"), (second, names[2], "after")):
            strips[f"{name}, {word}: {said}"] = lit(images, MAPS["gae"](model.method, images)).cpu()
    if strips:
        sheet(strips).save(path)
