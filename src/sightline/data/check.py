"""What is wrong with a data set, and what it can be used for: `print("\\n".join(check(rows).lines()))`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import binomtest

from ..config import Check
from ..console.files import make_way, write
from ..console.terminal import bar
from .fingerprints import file_stamps
from .inspection import Severity
from .rows import SPLITS, Rows, attribute_of, group_table, read_rows
from .table import first_of

WIDE = 0.2  # an interval wider than this decides nothing
STRONG = 0.3  # Cramér's V from which the group is worth a warning
MOST_COMBINATIONS = 10_000  # of label and attribute, to name those that occur nowhere
NO_LABEL = ("nan", "none", "null")  # what programs write into an empty cell
SHOWN = 10  # files or cells named per finding in `lines`; `to_dict` has all


@dataclass(frozen=True)
class Finding:
    """One thing to know. An error must be repaired, a warning limits what can be concluded, an info is just said."""

    severity: Severity
    topic: str
    text: str
    items: tuple[str, ...] = ()  # every file or cell concerned
    values: dict[str, Any] = field(default_factory=dict)  # the numbers in the text


@dataclass(frozen=True)
class Report:
    name: str
    classes: int
    groups: int
    cell_names: tuple[str, ...]  # groups, or classes where there are no groups
    counts: tuple[tuple[int, ...], ...]  # [splits, cells]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def lines(self) -> list[str]:
        """For people."""
        totals = [sum(row) for row in self.counts]
        groups = f", {_count(self.groups, 'group')}" if self.groups else ""
        lines = [f"{self.name}: {sum(totals):,} rows, {_count(self.classes, 'class', 'classes')}{groups}", ""]
        shown = list(zip(self.cell_names, zip(*self.counts, strict=True), strict=True))
        left_out = [f"… and {len(shown) - 2 * SHOWN:,} more"] if len(shown) > 2 * SHOWN else []
        shown = [("all", totals), *shown[: 2 * SHOWN]]
        width = max(len(name) for name, _ in shown)
        lines.append(" " * width + "".join(f"{split:>11}" for split in SPLITS))
        lines += [f"{name:<{width}}" + "".join(f"{count:>11,}" for count in counts) for name, counts in shown]
        lines += [*left_out, ""]
        for finding in self.findings:
            lines.append(f"{finding.severity:<8} {finding.text}")
            lines += [f"         - {item}" for item in finding.items[:SHOWN]]
            if len(finding.items) > SHOWN:
                lines.append(f"         … and {len(finding.items) - SHOWN:,} more")
        errors, warnings = (sum(f.severity == severity for f in self.findings) for severity in ("error", "warning"))
        lines.append(f"{'ok' if self.ok else 'not ok'}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For machines: everything, ready for JSON."""
        return {
            "name": self.name,
            "ok": self.ok,
            "classes": self.classes,
            "groups": self.groups,
            "counts": {
                split: dict(zip(self.cell_names, row, strict=True))
                for split, row in zip(SPLITS, self.counts, strict=True)
            },
            "findings": [
                {"severity": f.severity, "topic": f.topic, "text": f.text, "items": list(f.items), "values": f.values}
                for f in self.findings
            ],
        }


def check(
    rows: Rows, *, open_images: bool = True, workers: int = 2, progress: Callable[[int], None] | None = None
) -> Report:
    """Look for everything that can be seen in the rows and, with `open_images`, in the pictures and masks.

    `progress` is told how many pictures have been opened so far.
    """
    there, findings = _files(rows, "pictures", rows.images)
    if rows.masks is not None:
        masks_there, more = _files(rows, "masks", rows.masks)
        findings += more
        rows = replace(rows, masks=[mask if here else "" for mask, here in zip(rows.masks, masks_there, strict=True)])
    findings += _splits(rows)
    if open_images:
        findings += _pictures(rows, np.flatnonzero(there), workers, progress)
    findings += _classes(rows) + _spelling(rows) + _cells(rows) + _association(rows)
    findings += [Finding("info", "reading", note) for note in rows.notes]
    order = {"error": 0, "warning": 1, "info": 2}
    return Report(
        name=rows.name,
        classes=len(rows.classes),
        groups=len(rows.group_names),
        cell_names=rows.cells[1],
        counts=tuple(map(tuple, group_table(rows).tolist())),
        findings=tuple(sorted(findings, key=lambda finding: order[finding.severity])),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _files(rows: Rows, what: str, paths: list[str]) -> tuple[np.ndarray, list[Finding]]:
    """bool [n]: which files can be opened; and what to say about the others."""
    there, absent, empty = np.ones(len(paths), bool), [], []
    for row, (path, stamp) in enumerate(zip(paths, file_stamps(rows.root, paths), strict=True)):
        if path and not stamp:
            absent.append(path)
        elif stamp.partition(":")[0] == "0":
            empty.append(path)
        else:
            continue
        there[row] = False
    findings = []
    if absent:
        text = f"{len(absent):,} of {len(paths):,} {what} are missing; paths count from {rows.root}"
        text += "; write / between folders, not \\" if "\\" in absent[0] and os.sep == "/" else ""
        findings.append(Finding("error", "files", text, tuple(absent)))
    if empty:
        text = f"{len(empty):,} of {len(paths):,} {what} are empty files; restore or remove them"
        findings.append(Finding("error", "files", text, tuple(empty)))
    return there, findings


def _splits(rows: Rows) -> list[Finding]:
    first = first_of(rows.images)
    twice = np.flatnonzero(rows.splits != rows.splits[first])
    if not len(twice):
        return []
    items = (f"{rows.images[row]}: {_split_of(rows, first[row])} and {_split_of(rows, row)}" for row in twice)
    text = f"{_count(len(twice), 'row')} of one split repeat an image of another; keep each image in one split"
    return [Finding("error", "duplicates", text, tuple(items))]


def _classes(rows: Rows) -> list[Finding]:
    findings = []
    present = {split: np.bincount(rows.labels[rows.where(split)], minlength=len(rows.classes)) for split in SPLITS}
    anywhere = np.bincount(rows.labels, minlength=len(rows.classes)) > 0
    if anywhere.sum() < 2:
        findings.append(Finding("error", "classes", "all rows have the same label: there is nothing to tell apart"))
    if not anywhere.all():
        names = _named(rows.classes, ~anywhere)
        findings.append(Finding("info", "classes", f"{_count(len(names), 'class', 'classes')} without any row", names))
    for split, counts in present.items():
        absent = _named(rows.classes, anywhere & (counts == 0))
        if counts.any() and absent:
            severity, so = ("error", "cannot be learned") if split == "train" else ("warning", "cannot be measured")
            text = f"{split}: {_count(len(absent), 'class', 'classes')} without any row; what is absent {so}"
            findings.append(Finding(severity, "classes", text, absent))
    return findings


def _spelling(rows: Rows) -> list[Finding]:
    """Labels that look like a slip: one word written in several ways, or an empty cell written as a word."""
    alike: dict[str, list[int]] = {}
    for label in np.unique(rows.labels).tolist():
        alike.setdefault("".join(rows.classes[label].casefold().split()), []).append(label)
    several = [label for some in alike.values() if len(some) > 1 for label in some]
    void = [label for word in NO_LABEL for label in alike.get(word, [])]
    findings = []
    for labels, text in (
        (several, "differ in case or space only; if they are one class, write it in one way"),
        (void, "look like an empty cell; if they are no class, give one, or remove these rows"),
    ):
        if labels:
            items = tuple(_written(rows, label) for label in labels)
            findings.append(Finding("warning", "classes", f"{len(labels):,} labels {text}", items))
    return findings


def _written(rows: Rows, label: int) -> str:
    """A label, how many rows have it, and where the first of them are."""
    at = np.flatnonzero(rows.labels == label)
    told = f"{rows.classes[label]!r}: {_count(len(at), 'row')}"
    if rows.table is None or rows.lines is None:
        return told
    lines = ", ".join(map(str, rows.lines[at[:SHOWN]])) + (" …" if len(at) > SHOWN else "")
    return f"{told}, {rows.table.name}:{lines}"


def _cells(rows: Rows) -> list[Finding]:
    """Cells in which little or nothing can be measured; empty classes are told by `_classes`."""
    findings = []
    names, what = rows.cells[1], ("classes" if rows.groups is None else "groups")
    for split, counts in zip(SPLITS, group_table(rows).tolist(), strict=True):
        if not any(counts):
            continue
        empty = tuple(name for name, n in zip(names, counts, strict=True) if n == 0)
        if empty and rows.groups is not None:
            so = "never seen in training" if split == "train" else "nothing can be said about them"
            findings.append(
                Finding("warning", "groups", f"{split}: {len(empty):,} {what} without any row: {so}", empty)
            )
        tiny, values = [], {}
        for n, name in sorted(zip(counts, names, strict=True)):
            low, high = wilson_interval(round(0.9 * n), n)
            if n and high - low > WIDE:
                tiny.append(f"{name}: n = {n}; {round(0.9 * n)} of {n} right would mean {low:.0%} to {high:.0%}")
                values[name] = {"n": n, "interval": [low, high], "width": high - low}
        if tiny:
            text = f"{split}: {len(tiny):,} of {len(names):,} {what} too small to conclude from (95 % intervals)"
            severity = "info" if split == "train" else "warning"
            findings.append(Finding(severity, "groups", text, tuple(tiny), values))
    return findings + _combinations_nowhere(rows)


def _combinations_nowhere(rows: Rows) -> list[Finding]:
    table, attributes = _label_by_attribute(rows, np.arange(len(rows)))
    if table.size > MOST_COMBINATIONS or not ((table > 0).sum(axis=0) > 1).any():
        return []  # attributes that each belong to one label are no combinations
    labels = np.flatnonzero(table.any(axis=1))
    nowhere = [f"{rows.classes[y]}/{a}" for y in labels for a, n in zip(attributes, table[y], strict=True) if n == 0]
    text = f"{_count(len(nowhere), 'combination')} of label and group in no split: nothing can be said about them"
    return [Finding("info", "groups", text, tuple(nowhere))] if nowhere else []


def _label_by_attribute(rows: Rows, which: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """int64 [classes, attributes]: how often they meet; and what a group's name says besides the label."""
    if rows.groups is None:
        return np.zeros((len(rows.classes), 0), np.int64), []
    count = len(rows.group_names)
    pairs, sizes = np.unique(rows.labels[which] * np.int64(count) + rows.groups[which], return_counts=True)
    named = [
        (pair // count, attribute_of(rows.group_names[pair % count], rows.classes[pair // count])) for pair in pairs
    ]
    attributes = list(dict.fromkeys(attribute for _, attribute in named))
    place = {attribute: i for i, attribute in enumerate(attributes)}
    table = np.zeros((len(rows.classes), len(attributes)), np.int64)
    for (label, attribute), size in zip(named, sizes, strict=True):
        table[label, place[attribute]] += size
    return table, attributes


def cramers_v(table: np.ndarray) -> float:
    """How far two columns determine each other (Cramér 1946, ch. 21): 0 not at all, 1 entirely.

    >>> round(cramers_v(np.array([[95, 5], [5, 95]])), 3)
    0.9
    """
    table = table[table.any(axis=1)][:, table.any(axis=0)].astype(float)
    if min(table.shape) < 2:
        return 0.0
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    chi_squared = ((table - expected) ** 2 / expected).sum()
    return float(np.sqrt(chi_squared / table.sum() / (min(table.shape) - 1)))


def _association(rows: Rows) -> list[Finding]:
    """How well the group gives the label away in train: the shortcut that is there to be learned."""
    table, attributes = _label_by_attribute(rows, rows.where("train"))
    n = int(table.sum())
    if n == 0:
        return []
    if len(attributes) < 2 or (table.sum(axis=1) > 0).sum() < 2:
        return [Finding("info", "association", "train has only one label or one kind of group: no shortcut to measure")]
    v, right, alone = cramers_v(table), int(table.max(axis=0).sum()), table.sum(axis=1).max() / n
    label, attribute = np.unravel_index(table.argmax(), table.shape)
    largest, share = f"{rows.classes[label]}/{attributes[attribute]}", table.max() / n
    low, high = wilson_interval(right, n)
    text = (
        f"train: knowing the group alone gives the label right {right / n:.1%} of the time ({low:.1%} to {high:.1%}, "
        f"n = {n:,}; always saying the commonest label {alone:.1%}); Cramér's V {v:.2f}; "
        f"the largest cell, {largest}, holds {share:.1%}"
    )
    if ((table > 0).sum(axis=0) == 1).all():
        text += (
            ". Every group has one label only: either the group's name contains the label (give the attribute alone)"
        )
        text += ", or label and group cannot be told apart"
    values: dict[str, Any] = {"cramers_v": v, "label_from_group": right / n, "interval": [low, high], "n": n}
    values |= {"commonest_label": float(alone), "largest_cell": largest, "largest_cell_share": float(share)}
    return [Finding("warning" if v >= STRONG else "info", "association", text, values=values)]


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pictures(rows: Rows, which: np.ndarray, workers: int, progress: Callable[[int], None] | None) -> list[Finding]:
    from .inspection import TROUBLES, inspect

    seen = inspect(rows, which, workers, progress)
    findings = [
        Finding(severity, topic, f"{len(items):,} of {len(which):,} pictures {text}", tuple(items))
        for name, (severity, topic, text) in TROUBLES.items()
        if (items := seen.troubles[name])
    ]
    if seen.kinds:
        told = ", ".join(f"{count:,} {kind}" for kind, count in seen.kinds.most_common())
        text = f"pictures of other kinds: {told}; all are read as upright RGB of 8 bits"
        findings.append(Finding("info", "pictures", text, values=dict(seen.kinds)))
    return findings + _twins(rows, seen.hashed, seen.hashes)


def _twins(rows: Rows, which: np.ndarray, hashes: np.ndarray) -> list[Finding]:
    """Pictures of one split that look like one of an earlier split, each with the one it is most like."""
    from .duplicates import BITS, NEAR, twins_across

    findings = []
    for (later, earlier), pairs in twins_across(hashes, rows.splits[which], len(SPLITS)).items():
        pairs = [(which[one], which[other]) for one, other in pairs]
        items = tuple(_pair(rows, one, other) for one, other in pairs if rows.images[one] != rows.images[other])
        if items:
            n = int((rows.splits[which] == later).sum())
            text = (
                f"{len(items):,} of {n:,} {SPLITS[later]} pictures look like one in {SPLITS[earlier]} "
                f"(at most {NEAR} of {BITS} bits of a perceptual hash apart)"
            )
            values = {"split": SPLITS[later], "like": SPLITS[earlier], "twins": len(items), "n": n}
            findings.append(Finding("warning", "duplicates", text, items, values))
    return findings


def _pair(rows: Rows, row: int, other: int) -> str:
    labels = [rows.classes[rows.labels[i]] for i in (row, other)]
    told = f", labelled {labels[0]} and {labels[1]}" if labels[0] != labels[1] else ""
    return f"{rows.images[row]} like {rows.images[other]}{told}"


# ---- words -----------------------------------------------------------------------------------------------------------


def _split_of(rows: Rows, row: int) -> str:
    return SPLITS[rows.splits[row]]


def _named(names: tuple[str, ...], which: np.ndarray) -> tuple[str, ...]:
    return tuple(names[i] for i in np.flatnonzero(which))


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson's score interval)."""
    found = binomtest(successes, n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Check) -> int:
    make_way(command.out)
    rows = read_rows(command.data, layout=command.layout)
    with bar("opening pictures", len(rows)) as progress:
        report = check(rows, open_images=not command.no_images, workers=command.workers, progress=progress)
    print("\n".join(report.lines()))
    if command.out is not None:
        write(command.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return int(not report.ok)
