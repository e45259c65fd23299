"""The tables of docs/results.md, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SIGHT = {"pixel IoU": "pixel_iou", "grid IoU": "grid_iou", "coverage": "coverage"}
SHIFTS = {"one to one": "shift_o2o.json", "many to many": "shift_m2m.json", "disjoint": "shift_disjoint.json"}
SPECIES = (
    "ERM", "probe", "late mask, true", "early mask, true", "early mask, true, pixels", "PDiscoFormer K=4", "iFAM K=1",
    "iFAM K=4", "iFAM K=8", "iFAM K=16", "iFAM K=1, pixels",
)  # fmt: skip


def read(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def figure(found: dict[str, Any] | None, sign: str = "") -> str:
    if not found:
        return ""
    value, low, high = (100 * found[key] for key in ("value", "low", "high"))
    return f"{value:{sign}.1f} [{low:.1f}, {high:.1f}]"


def table(head: Iterable[str], lines: Iterable[Iterable[str]], words: Iterable[str] = ()) -> str:
    """Numbers to the right; `words` are the columns that hold none."""
    head = list(head)
    rule = ["---" if not place or name in words else "--:" for place, name in enumerate(head)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def of_rows(rows: list[Row]) -> str:
    groups = list(rows[0]["metrics"]["test"]["groups"])
    head = ["", "seeds", "worst group", "mean of groups", "accuracy", *SIGHT, *groups]
    lines = []
    for row in rows:
        found, seen = row["metrics"]["test"], (row.get("sight") or {}).get("test") or {}
        each = [f"{100 * found['groups'][group]['value']:.1f}" for group in groups]
        totals = [figure(found[name]) for name in ("worst_group", "mean_of_groups", "accuracy")]
        sight = [figure(seen.get(name)) for name in SIGHT.values()]
        lines.append([row["row"], str(len(row["seeds"])), *totals, *sight, *each])
    return table(head, lines)


def of_pairs(pairs: Iterable[Row]) -> str:
    lines, seen = [], set()
    for pair in pairs:
        names = pair["row"], pair["against"]
        if names in seen:
            continue
        seen.add(names)
        seeds = " and ".join(str(pair["seeds"][name]) for name in names)
        gains = [
            said for name in ("worst_group", "accuracy") for said in (figure(pair[name], "+"), pair[name]["verdict"])
        ]
        lines.append([*names, seeds, *gains])
    return table(["", "against", "seeds", "worst group", " ", "accuracy", " "], lines, ("against", " "))


def papers(results: Path) -> str:
    return of_rows(read(results, "wbr_ti_papers.json")["rows"])


def pixels(results: Path) -> str:
    """Those that are not among the papers' rows."""
    known = {row["row"] for row in read(results, "wbr_ti_papers.json")["rows"]}
    return of_rows([row for row in read(results, "wbr_ti_pixels.json")["rows"] if row["row"] not in known])


def paired(results: Path) -> str:
    return of_pairs(pair for name in ("papers", "pixels") for pair in read(results, f"wbr_ti_{name}.json")["paired"])


def of_vit_s(results: Path) -> str:
    found = read(results, "wbr_s.json")
    return f"{of_rows(found['rows'])}\n\n{of_pairs(found['paired'])}"


def shifts(results: Path) -> str:
    lines = []
    for words, name in SHIFTS.items():
        for row in read(results, name)["rows"]:
            found, seen = row["metrics"]["test"], (row.get("sight") or {}).get("test") or {}
            figures = [figure(found[key]) for key in ("accuracy", "mean_of_groups", "worst_group")]
            lines.append([words, row["row"], *figures, figure(seen.get("pixel_iou"))])
    return table(["scenes", "", "accuracy", "mean of groups", "worst group", "pixel IoU"], lines, ("",))


def shifts_paired(results: Path) -> str:
    blocks = [f"{words}:\n\n{of_pairs(read(results, name)['paired'])}" for words, name in SHIFTS.items()]
    return "\n\n".join(blocks)


def species(results: Path) -> str:
    found = read(results, "interventions_h200.json")["sets"]["cub"]
    shown = {
        "own photographs": "original", "backgrounds swapped": "swapped", "pixel IoU, own": "pixel_iou on original",
        "pixel IoU, swapped": "pixel_iou on swapped",
    }  # fmt: skip
    lines = [[name, *(figure(found[name]["figures"]["plain"].get(key)) for key in shown.values())] for name in SPECIES]
    return table(["", *shown], lines)


def missing(results: Path) -> str:
    """What the tables above still lack, row by row."""
    known = {}
    for name in ("papers", "pixels"):
        known |= read(results, f"wbr_ti_{name}.json")["missing"]
    untrained = [row.removesuffix(", seed 0") for row, lacks in known.items() if lacks == ["training"]]
    files = {
        "localization/test.csv": "where it looks",
        "shape/test.csv": "the shape probe",
        "certificate.json": "the certificate",
    }
    measures = [
        f"{row}: {', '.join(files[one] for one in lacks)}" for row, lacks in known.items() if lacks != ["training"]
    ]
    return f"- One seed of: {'; '.join(untrained)}.\n- Measured of a run that is there: {'; '.join(measures)}."


TABLES = {
    "papers": papers, "pixels": pixels, "paired": paired, "vit-s": of_vit_s, "shifts": shifts,
    "shifts paired": shifts_paired, "species": species, "missing": missing,
}  # fmt: skip
