"""`sightline check`: problems of a dataset, group sizes, the strength of the shortcut, and near-duplicates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binomtest

from ..config import Check
from ..console.files import prepare_output, write
from ..console.terminal import bar
from .fingerprints import file_fingerprints
from .rows import SPLITS, Rows, attribute_of, group_table, read_rows
from .table import first_occurrence

if TYPE_CHECKING:  # it imports torch
    from .inspection import Severity

MAX_INTERVAL = 0.2  # width of a 95 % interval above which a group is reported as too small
STRONG_ASSOCIATION = 0.3  # Cramér's V from which label and group are reported as associated
MAX_COMBINATIONS = 10_000  # of label and attribute, up to which those that never occur are listed
EMPTY_LABELS = ("nan", "none", "null")  # written by programs into an empty cell
SHOWN = 10  # files or groups listed per finding in `lines`; `to_dict` has all


@dataclass(frozen=True)
class Finding:
    """One result. An error must be repaired, a warning limits what can be concluded, an info is for information."""

    severity: Severity
    topic: str
    text: str
    items: tuple[str, ...] = ()  # every file or group concerned
    values: dict[str, Any] = field(default_factory=dict)  # the numbers in the text


@dataclass(frozen=True)
class CheckReport:
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
        """The report as text."""
        totals = [sum(row) for row in self.counts]
        groups = f", {_count(self.groups, 'group')}" if self.groups else ""
        lines = [f"{self.name}: {sum(totals):,} rows, {_count(self.classes, 'class', 'classes')}{groups}", ""]
        shown = list(zip(self.cell_names, zip(*self.counts, strict=True), strict=True))
        omitted = [f"… and {len(shown) - 2 * SHOWN:,} more"] if len(shown) > 2 * SHOWN else []
        shown = [("all", totals), *shown[: 2 * SHOWN]]
        width = max(len(name) for name, _ in shown)
        lines.append(" " * width + "".join(f"{split:>11}" for split in SPLITS))
        lines += [f"{name:<{width}}" + "".join(f"{count:>11,}" for count in counts) for name, counts in shown]
        lines += [*omitted, ""]
        for finding in self.findings:
            lines.append(f"{finding.severity:<8} {finding.text}")
            lines += [f"         - {item}" for item in finding.items[:SHOWN]]
            if len(finding.items) > SHOWN:
                lines.append(f"         … and {len(finding.items) - SHOWN:,} more")
        errors, warnings = (sum(f.severity == severity for f in self.findings) for severity in ("error", "warning"))
        lines.append(f"{'ok' if self.ok else 'not ok'}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The complete report, ready for JSON."""
        return {
            "name": self.name,
            "ok": self.ok,
            "classes": self.classes,
            "groups": self.groups,
            "counts": {
                split: dict(zip(self.cell_names, row, strict=True))
                for split, row in zip(SPLITS, self.counts, strict=True)
            },
            "findings": [asdict(finding) for finding in self.findings],
        }


def check(
    rows: Rows, *, open_images: bool = True, workers: int = 2, progress: Callable[[int], None] | None = None
) -> CheckReport:
    """Find the problems of the rows and, with `open_images`, of the image and mask files.

    `progress` is called with the number of images opened so far.
    """
    exists, findings = _check_files(rows, "images", rows.images)
    if rows.masks is not None:
        mask_exists, more = _check_files(rows, "masks", rows.masks)
        findings += more
        rows = replace(rows, masks=[mask if found else "" for mask, found in zip(rows.masks, mask_exists, strict=True)])
    findings += _check_splits(rows)
    if open_images:
        findings += _check_images(rows, np.flatnonzero(exists), workers, progress)
    findings += _check_classes(rows) + _check_spelling(rows) + _check_groups(rows) + _measure_association(rows)
    findings += [Finding("info", "reading", note) for note in rows.notes]
    order = {"error": 0, "warning": 1, "info": 2}
    return CheckReport(
        name=rows.name,
        classes=len(rows.classes),
        groups=len(rows.group_names),
        cell_names=rows.cells[1],
        counts=tuple(map(tuple, group_table(rows).tolist())),
        findings=tuple(sorted(findings, key=lambda finding: order[finding.severity])),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _check_files(rows: Rows, kind: str, paths: list[str]) -> tuple[np.ndarray, list[Finding]]:
    """bool [n]: which files can be opened; and the findings about the others."""
    exists, missing, empty = np.ones(len(paths), bool), [], []
    for row, (path, mark) in enumerate(zip(paths, file_fingerprints(rows.root, paths), strict=True)):
        if path and not mark:
            missing.append(path)
        elif mark.partition(":")[0] == "0":
            empty.append(path)
        else:
            continue
        exists[row] = False
    findings = []
    if missing:
        text = f"{len(missing):,} of {len(paths):,} {kind} are missing; paths are relative to {rows.root}"
        text += "; separate folders by /, not \\" if "\\" in missing[0] and os.sep == "/" else ""
        findings.append(Finding("error", "files", text, tuple(missing)))
    if empty:
        text = f"{len(empty):,} of {len(paths):,} {kind} are empty files; restore or remove them"
        findings.append(Finding("error", "files", text, tuple(empty)))
    return exists, findings


def _check_splits(rows: Rows) -> list[Finding]:
    first = first_occurrence(rows.images)
    repeated = np.flatnonzero(rows.splits != rows.splits[first])
    if not len(repeated):
        return []
    split = [SPLITS[number] for number in rows.splits]
    items = (f"{rows.images[row]}: {split[first[row]]} and {split[row]}" for row in repeated)
    text = f"{_count(len(repeated), 'row')} with an image that is also in another split; keep each image in one split"
    return [Finding("error", "duplicates", text, tuple(items))]


def _check_classes(rows: Rows) -> list[Finding]:
    findings = []
    total = np.bincount(rows.labels, minlength=len(rows.classes))
    if (total > 0).sum() < 2:
        findings.append(Finding("error", "classes", "all rows have the same label; a classifier needs two classes"))
    if not total.all():
        names = _select(rows.classes, total == 0)
        findings.append(Finding("info", "classes", f"{_count(len(names), 'class', 'classes')} without rows", names))
    for split in SPLITS:
        counts = np.bincount(rows.labels[rows.split_indices(split)], minlength=len(rows.classes))
        missing = _select(rows.classes, (total > 0) & (counts == 0))
        if counts.any() and missing:
            train = split == "train"
            text = f"{split}: {_count(len(missing), 'class', 'classes')} without rows cannot be "
            text += "learned" if train else "evaluated"
            findings.append(Finding("error" if train else "warning", "classes", text, missing))
    return findings


def _check_spelling(rows: Rows) -> list[Finding]:
    """Labels that look like mistakes: one word written in several ways, or an empty cell written as a word."""
    spellings: dict[str, list[int]] = {}
    for label in np.unique(rows.labels).tolist():
        spellings.setdefault("".join(rows.classes[label].casefold().split()), []).append(label)
    variants = [label for labels in spellings.values() if len(labels) > 1 for label in labels]
    empty = [label for word in EMPTY_LABELS for label in spellings.get(word, [])]
    findings = []
    for labels, text in (
        (variants, "differ in case or spaces only; if they are one class, write it in one way"),
        (empty, "look like an empty cell; if they are not classes, give a class, or remove these rows"),
    ):
        if labels:
            items = tuple(_label_and_lines(rows, label) for label in labels)
            findings.append(Finding("warning", "classes", f"{len(labels):,} labels {text}", items))
    return findings


def _label_and_lines(rows: Rows, label: int) -> str:
    """A label, its number of rows, and the lines of the first of them."""
    at = np.flatnonzero(rows.labels == label)
    text = f"{rows.classes[label]!r}: {_count(len(at), 'row')}"
    if rows.table is None or rows.lines is None:
        return text
    lines = ", ".join(map(str, rows.lines[at[:SHOWN]])) + (" …" if len(at) > SHOWN else "")
    return f"{text}, {rows.table.name}:{lines}"


def _check_groups(rows: Rows) -> list[Finding]:
    """Groups (or classes) that are empty or too small; empty classes are reported by `_check_classes`."""
    findings = []
    names, kind = rows.cells[1], ("classes" if rows.groups is None else "groups")
    for split, counts in zip(SPLITS, group_table(rows).tolist(), strict=True):
        if not any(counts):
            continue
        empty = tuple(name for name, n in zip(names, counts, strict=True) if n == 0)
        if empty and rows.groups is not None:
            consequence = "never seen in training" if split == "train" else "cannot be evaluated"
            text = f"{split}: {_count(len(empty), 'group')} without rows: {consequence}"
            findings.append(Finding("warning", "groups", text, empty))
        small, values = [], {}
        for n, name in sorted((n, name) for n, name in zip(counts, names, strict=True) if n):
            low, high = wilson_interval(round(0.9 * n), n)
            if high - low > MAX_INTERVAL:
                small.append(f"{name}: n = {n}; accuracy {round(0.9 * n)}/{n} would mean {low:.0%} to {high:.0%}")
                values[name] = {"n": n, "interval": [low, high], "width": high - low}
        if small:
            text = f"{split}: {len(small):,} of {len(names):,} {kind} too small to conclude from (95 % intervals)"
            findings.append(Finding("info" if split == "train" else "warning", "groups", text, tuple(small), values))
    return findings + _missing_combinations(rows)


def _missing_combinations(rows: Rows) -> list[Finding]:
    table, attributes = _label_by_attribute(rows, np.arange(len(rows)))
    if table.size > MAX_COMBINATIONS or not ((table > 0).sum(axis=0) > 1).any():
        return []  # attributes that each belong to one label are not combined with labels
    labels = np.flatnonzero(table.any(axis=1))
    missing = [f"{rows.classes[y]}/{a}" for y in labels for a, n in zip(attributes, table[y], strict=True) if n == 0]
    text = f"{_count(len(missing), 'combination')} of label and group in no split: cannot be evaluated"
    return [Finding("info", "groups", text, tuple(missing))] if missing else []


def _label_by_attribute(rows: Rows, indices: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Contingency table int64 [classes, attributes], and the attributes: the parts of group names after the label."""
    if rows.groups is None:
        return np.zeros((len(rows.classes), 0), np.int64), []
    count = len(rows.group_names)
    pairs, sizes = np.unique(rows.labels[indices] * np.int64(count) + rows.groups[indices], return_counts=True)
    named = [
        (pair // count, attribute_of(rows.group_names[pair % count], rows.classes[pair // count])) for pair in pairs
    ]
    column = {attribute: i for i, attribute in enumerate(dict.fromkeys(attribute for _, attribute in named))}
    table = np.zeros((len(rows.classes), len(column)), np.int64)
    for (label, attribute), size in zip(named, sizes, strict=True):
        table[label, column[attribute]] += size
    return table, list(column)


def cramers_v(table: np.ndarray) -> float:
    """Association of two categorical variables (Cramér 1946, ch. 21): 0 independent, 1 one determines the other.

    >>> round(cramers_v(np.array([[95, 5], [5, 95]])), 3)
    0.9
    """
    table = table[table.any(axis=1)][:, table.any(axis=0)].astype(float)
    if min(table.shape) < 2:
        return 0.0
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    chi_squared = ((table - expected) ** 2 / expected).sum()
    return float(np.sqrt(chi_squared / table.sum() / (min(table.shape) - 1)))


def _measure_association(rows: Rows) -> list[Finding]:
    """How well the group predicts the label in train: the spurious correlation (shortcut) that can be learned."""
    table, attributes = _label_by_attribute(rows, rows.split_indices("train"))
    n = int(table.sum())
    if n == 0:
        return []
    if len(attributes) < 2 or (table.sum(axis=1) > 0).sum() < 2:
        return [Finding("info", "association", "train has only one label or one kind of group: no shortcut to measure")]
    v, correct, majority = cramers_v(table), int(table.max(axis=0).sum()), table.sum(axis=1).max() / n
    label, attribute = np.unravel_index(table.argmax(), table.shape)
    largest, fraction = f"{rows.classes[label]}/{attributes[attribute]}", table.max() / n
    low, high = wilson_interval(correct, n)
    text = (
        f"train: predicting the label from the group alone has accuracy {correct / n:.1%} ({low:.1%} to {high:.1%}, "
        f"n = {n:,}; majority class {majority:.1%}); Cramér's V {v:.2f}; "
        f"the largest group, {largest}, holds {fraction:.1%}"
    )
    if ((table > 0).sum(axis=0) == 1).all():
        text += (
            ". Every group has one label only: either the group's name contains the label (give the attribute alone)"
        )
        text += ", or label and group are confounded"
    values: dict[str, Any] = {"cramers_v": v, "label_from_group": correct / n, "interval": [low, high], "n": n}
    values |= {"commonest_label": float(majority), "largest_cell": largest, "largest_cell_share": float(fraction)}
    return [Finding("warning" if v >= STRONG_ASSOCIATION else "info", "association", text, values=values)]


# ---- images ----------------------------------------------------------------------------------------------------------


def _check_images(
    rows: Rows, indices: np.ndarray, workers: int, progress: Callable[[int], None] | None
) -> list[Finding]:
    from .inspection import PROBLEMS, inspect_images

    inspection = inspect_images(rows, indices, workers, progress)
    findings = [
        Finding(severity, topic, f"{len(items):,} of {len(indices):,} images {text}", tuple(items))
        for name, (severity, topic, text) in PROBLEMS.items()
        if (items := inspection.problems[name])
    ]
    if inspection.kinds:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in inspection.kinds.most_common())
        text = f"images of other kinds: {kinds}; all are read as upright 8-bit RGB"
        findings.append(Finding("info", "images", text, values=dict(inspection.kinds)))
    return findings + _find_near_duplicates(rows, inspection.hashed, inspection.hashes)


def _find_near_duplicates(rows: Rows, indices: np.ndarray, hashes: np.ndarray) -> list[Finding]:
    """Images of one split that are near-duplicates of one in an earlier split, each with the most similar one."""
    from .duplicates import BITS, MAX_DISTANCE, find_near_duplicates

    findings = []
    for (later, earlier), pairs in find_near_duplicates(hashes, rows.splits[indices], len(SPLITS)).items():
        pairs = [(indices[i], indices[j]) for i, j in pairs]
        items = tuple(_describe_pair(rows, i, j) for i, j in pairs if rows.images[i] != rows.images[j])
        if items:
            n = int((rows.splits[indices] == later).sum())
            text = (
                f"{len(items):,} of {n:,} {SPLITS[later]} images are near-duplicates of one in {SPLITS[earlier]} "
                f"(perceptual hashes at most {MAX_DISTANCE} of {BITS} bits apart)"
            )
            values = {"split": SPLITS[later], "like": SPLITS[earlier], "duplicates": len(items), "n": n}
            findings.append(Finding("warning", "duplicates", text, items, values))
    return findings


def _describe_pair(rows: Rows, row: int, other: int) -> str:
    labels = [rows.classes[rows.labels[i]] for i in (row, other)]
    disagreement = f", labelled {labels[0]} and {labels[1]}" if labels[0] != labels[1] else ""
    return f"{rows.images[row]} like {rows.images[other]}{disagreement}"


# ---- text ------------------------------------------------------------------------------------------------------------


def _select(names: tuple[str, ...], chosen: np.ndarray) -> tuple[str, ...]:
    return tuple(names[i] for i in np.flatnonzero(chosen))


def _count(n: int, singular: str, plural: str = "") -> str:
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson's score interval)."""
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Check) -> int:
    prepare_output(command.out)
    rows = read_rows(command.data, layout=command.layout)
    with bar("opening images", len(rows)) as progress:
        report = check(rows, open_images=command.images, workers=command.workers, progress=progress)
    print("\n".join(report.lines()))
    if command.out is not None:
        write(command.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return int(not report.ok)
