"""The tables of docs/results_v1.md and of the README, from benchmarks/results/waterbirds_v1.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from birds_tables import Row, figure, read, table

V1, WBR = "birds", "wbr"
FROM_TRAIN = ", selected on train"
USES_GROUPS = ("GroupDRO", "IRM", "CORAL", "DFR", "A2 TI>TI, DFR", "A2 SELF>TI, DFR", "ERM, balanced groups")
HEADLINE = {  # the README's table: what a line says, and its row
    "ERM": "ERM",
    "LfF": "LfF",
    "GroupDRO": "GroupDRO, adjusted 2",
    "DFR, fitted on training data": "DFR train",
    "iFAM as in the papers, K = 4": "iFAM K=4, papers",
    "iFAM with whole patches and our recipe, K = 4": "iFAM K=4, whole patches, our recipe",
    "**iFAM, the default, K = 4**": "iFAM K=4",
    "true masks of pixels": "early mask, true, pixels",
}


def group_labels(row: Row) -> str:
    """What labels of groups are used for."""
    if row["row"].startswith(USES_GROUPS):
        return "training"
    return "selection" if row["selection"].startswith("worst-group") else ""


def found(results: Path, kind: str) -> list[tuple[Row, Row]]:
    """Every row of this set with intervals, and its run with the first seed; the best worst group first."""
    content = read(results, "waterbirds_v1.json")
    first = {(run["set"], run["row"]): run for run in reversed(content["runs"])}
    rows = sorted(content["rows"], key=lambda row: -row["worst_group"]["value"])
    return [(row, first[kind, row["row"]]) for row in rows if row["set"] == kind]


def of_rows(pairs: Sequence[tuple[Row, Row]]) -> str:
    groups = list(pairs[0][0]["groups"])
    head = ["", "group labels", "seeds", "worst group", "adjusted accuracy", *groups, "sees", "pixel IoU", "GFLOPs"]
    lines = []
    for row, run in pairs:
        each = [f"{100 * row['groups'][group]['value']:.1f}" for group in groups]
        iou = "" if run["pixel_iou"] is None else f"{run['pixel_iou']:.2f}".removeprefix("0")
        cost = "" if run["gflops"] is None else f"{run['gflops']:.1f}"
        lines.append(
            [row["row"], group_labels(row), str(len(row["seeds"])), figure(row["worst_group"]),
             figure(row["adjusted"]), *each, sees(run), iou, cost]
        )  # fmt: skip
    return table(head, lines, ("group labels",))


def sees(run: Row) -> str:
    """Of the image; methods that are not blind to the rest leak."""
    leaks = ", leaks" * (run["coverage"] < 1 and not run["blind"])
    return f"{100 * run['coverage']:.0f} %{leaks}"


def on_validation(results: Path) -> str:
    return of_rows([pair for pair in found(results, V1) if not pair[0]["row"].endswith(FROM_TRAIN)])


def on_train(results: Path) -> str:
    """Each row below the same one as it is selected otherwise."""
    pairs = {row["row"]: (row, run) for row, run in found(results, V1)}
    both = [(name.removesuffix(FROM_TRAIN), name) for name in pairs if name.endswith(FROM_TRAIN)]
    return of_rows([pairs[name] for names in both for name in names])


def rebuilt(results: Path) -> str:
    return of_rows(found(results, WBR))


def headline(results: Path) -> str:
    """A line of the README for each row of HEADLINE; on rebuilt Waterbirds some were not run."""
    v1, wbr = ({row["row"]: (row, run) for row, run in found(results, kind)} for kind in (V1, WBR))
    head = ["", "group labels", "adjusted accuracy", "worst group", "worst group, rebuilt (three seeds)", "sees"]
    lines = []
    for words, name in HEADLINE.items():
        row, run = v1[name]
        again = figure(wbr[name][0]["worst_group"]) if name in wbr else ""
        lines.append([words, group_labels(row), figure(row["adjusted"]), figure(row["worst_group"]), again, sees(run)])
    return table(head, lines, ("group labels",))


TABLES = {"rows": on_validation, "selection": on_train, "rebuilt": rebuilt}
README = {"headline": headline}
