"""The tables of docs/results_parts.md, from benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from birds_tables import figure, read, table

FILE, CLAIMS = "interventions_h200.json", "claims_interventions.json"
WITH_OBJECTS = {"pair": "A post or a tag, always", "object": "A tag or nothing, 19 times out of 20"}
SEARCH = "both"  # parts and quantiles, as `--find` does
TOKENS = {"none": "plain", "1 %": "q0.99", "3 %": "q0.97"}
SEEN = {
    "own photographs": "original", "backgrounds swapped": "swapped", "pixel IoU, swapped": "pixel_iou on swapped",
    "key points, swapped": "keypoint_error on swapped",
}  # fmt: skip
LOOKING = ("iFAM K=1", "iFAM K=1, pixels", "iFAM K=4", "iFAM K=8", "iFAM K=16", "PDiscoFormer K=4")
CLOSELY = ("iFAM K=1, pixels",)  # look again
FULL = "iFAM K=4"
CHANGED = {
    "iFAM, K = 4": FULL, "without stage 2 (PDiscoFormer)": "PDiscoFormer K=4",
    **{how: f"{FULL}, {how}" for how in (
        "soft masks", "no shaping", "no stage-1 classification", "frozen stage 2", "part dropout 0", "part dropout 0.1",
        "part dropout 0.5",
    )},
}  # fmt: skip
SHOWN = {"species, own": ("cub", "original"), "species, swapped": ("cub", "swapped")}
SHOWN |= {"Waterbirds, worst group": ("birds", "worst group"), "Waterbirds, accuracy": ("birds", "all")}


PRECISIONS = ("fp32", "bf16", "fp32, averaged", "bf16, averaged")


def sets(results: Path) -> dict[str, Any]:
    return read(results, FILE)["sets"]


def of_runs(row: dict[str, Any] | None, part: str, how: str = "plain") -> str:
    """And, of a row that was trained before, too, what it was then: the mean over its seeds."""
    if not row:
        return "not run"
    if how not in row["figures"]:
        return ""
    before = [one["figures"][how][part]["value"] for one in row.get("again", []) if how in one["figures"]]
    said = ", ".join(f"{100 * value:.1f}" for value in before)
    return figure(row["figures"][how][part]) + f" ({said})" * bool(said)


def chosen(row: dict[str, Any]) -> str:
    """What validation data chose to leave out, seed by seed."""
    said = [one["searches"][SEARCH] for one in row["searched"].values()]
    found = [", ".join(re.findall(r"part (\d+)", one.partition(":")[0])) * one.startswith("Without ") for one in said]
    return "; ".join(one or "nothing" for one in found)


def natural_order(row: tuple[str, Any]) -> tuple[str, int]:
    """By method, then by how many parts."""
    method, _, parts = row[0].partition(" K=")
    return {"iFAM": " "}.get(method, method), int(parts.partition(",")[0] or 0)


def corrected(results: Path) -> str:
    blocks, left_out = [], "`--find` leaves out"
    for kind, words in WITH_OBJECTS.items():
        lines = [
            [name, *(figure(row["figures"]["plain"].get(key)) for key in ("all", "pixel_iou")),
             of_runs(row, "worst group"), chosen(row), of_runs(row, "worst group", SEARCH)]
            for name, row in sorted(sets(results)[kind].items(), key=natural_order)
        ]  # fmt: skip
        head = ["", "accuracy", "pixel IoU", "worst group", left_out, "worst group then"]
        blocks.append(f"{words}:\n\n{table(head, lines, (left_out,))}")
    return "\n\n".join(blocks)


def tokens(results: Path) -> str:
    rows = sets(results)["cub"]
    lines = []
    for name in (name for name in LOOKING if name in rows):
        for words, how in TOKENS.items():
            if how in rows[name]["figures"]:
                found = rows[name]["figures"][how]
                said = [figure(found.get(key)) for key in SEEN.values()]
                if how != "plain" and name in CLOSELY:
                    said[-1] = ""  # of the maps of the whole image, which distances in the closer look do not change
                lines.append([name, words, *said])
    return table(["", "removed", *SEEN], lines, ("removed",))


def ablations(results: Path) -> str:
    known = sets(results)
    lines = [
        [words, *(of_runs(known[kind].get(name), part) for kind, part in SHOWN.values())]
        for words, name in CHANGED.items()
    ]
    return table(["", *SHOWN], lines)


def precisions(results: Path) -> str:
    """Trained to the end beside others, for accuracy; for three epochs alone, for speed."""
    rows, lines = sets(results)["birds"], []
    for how in PRECISIONS:
        trained, timed = rows[FULL if how == "bf16" else f"{FULL}, {how}"], rows[f"{FULL}, timed, {how}"]
        speed = f"{timed['speed'][0]['images_per_second']:,.0f}"
        lines.append([how, *(of_runs(trained, part) for part in ("all", "worst group")), speed])
    return table(["", "accuracy", "worst group", "images/s"], lines)


def gap(results: Path) -> str:
    """Accuracy on a scene of the class less that on a random one, bird by bird."""
    claim = next(one for one in read(results, CLAIMS)["claims"] if one["id"] == "F21")
    gaps = {name: one for test in claim["tests"] for name, one in (test["figures"] or {}).items()}
    rows = sets(results)["mixed"]
    shown = {"own photograph": "original", "a scene of the class": "same", "any scene": "rand"}
    lines = [
        [name, *(figure(rows[name]["figures"]["plain"][part]) for part in shown.values()), figure(one)]
        for name, one in gaps.items()
    ]
    return table(["", *shown, "gap"], lines)


FIGURES = {"accuracy": "accuracy", "worst group": "worst group", "gap": "gap between backgrounds"}
SETS = {"cub": "species", "birds": "Waterbirds", "pair": "post or tag", "object": "tag", "mixed": "mixed backgrounds"}


def spread(results: Path) -> str:
    """How far apart runs of a row come."""
    lines = []
    for one in read(results, CLAIMS)["spread"]:
        where = "" if one["of"] == "all" else f", {one['of']}"
        lines.append(
            [f"{SETS[one['set']]}{where}: {FIGURES[one['figure']]}", f"{100 * one['deviation']:.1f}", str(one["rows"])]
        )
    return table(["", "standard deviation, points", "rows trained twice"], lines)


def otherwise(results: Path) -> str:
    """Claims that intervals over images alone would decide."""
    lines = [
        [one["id"], one["claim"], one["verdict_by_images_alone"], one["verdict"]]
        for one in read(results, CLAIMS)["claims"]
        if one["verdict"] != one["verdict_by_images_alone"]
    ]
    head = ["", "claim", "by images alone", "allowing for training again"]
    return table(head, lines, head)


def missing(results: Path) -> str:
    """Rows that nobody has trained, or measured, by set and seed."""
    trained: dict[str, list[str]] = {}
    for one in read(results, FILE)["missing"]:
        what = "to be measured under interventions" if one["lacks"] != ["training"] else "to be trained"
        trained.setdefault(f"{one['set']}, seed {one['seed']}, {what}", []).append(one["name"])
    return "\n".join(f"- {where}: {'; '.join(names)}." for where, names in sorted(trained.items()))


TABLES = {
    "corrected": corrected,
    "tokens": tokens,
    "ablations": ablations,
    "precisions": precisions,
    "gap": gap,
    "missing": missing,
    "spread": spread,
    "otherwise": otherwise,
}
