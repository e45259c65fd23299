"""Figures that say how sure they are, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

FIGURES = {
    "accuracy": "accuracy",
    "balanced": "class-balanced accuracy",
    "adjusted": "adjusted average (training proportions)",
    "mean_of_groups": "mean of groups",
    "worst_group": "worst group",
    "minority_worst_group": "worst minority group",
    "worst_class": "worst class",
    "group_gap": "accuracy − worst group",
    "background_gap": "background gap (same − random)",
    "auc": "AUC",
    "minority_auc": "AUC on minority groups",
    "worst_pair_auc": "AUC of the worst pair of groups",
}


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, the number of images behind it, and how the interval was made."""

    value: float
    low: float
    high: float
    n: int
    how: str
    of: str = ""  # which group, class or pair is the worst
    difference: bool = False  # of two figures: in points, and perhaps negative

    def __post_init__(self) -> None:
        floor = -1.0 if self.difference else 0.0
        for name, number in (  # rounding, or a shifted centre, must not leave the value outside
            ("low", min(max(self.low, floor), self.value)),
            ("high", max(min(self.high, 1.0), self.value)),
            ("value", self.value),
        ):
            object.__setattr__(self, name, float(number))

    def __str__(self) -> str:
        return f"{self.figure}  {self.interval}  n {self.n:,}"

    @property
    def figure(self) -> str:
        return f"{100 * self.value:+.1f} points" if self.difference else f"{100 * self.value:.1f} %"

    @property
    def interval(self) -> str:
        return f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Metrics:
    """What can be said about one run, or about several seeds of one, on one split."""

    split: str
    n: int
    seeds: int
    accuracy: Estimate
    balanced: Estimate  # mean of the classes
    worst_class: Estimate
    classes: dict[str, Estimate]
    groups: dict[str, Estimate] = field(default_factory=dict)
    adjusted: Estimate | None = None  # group accuracies weighted by training proportions (Sagawa et al. 2020)
    mean_of_groups: Estimate | None = None
    worst_group: Estimate | None = None  # of all groups
    minority_worst_group: Estimate | None = None  # of each label's rarest group in training, as many papers have it
    group_gap: Estimate | None = None
    background_gap: Estimate | None = None  # accuracy on same-class minus random backgrounds (ImageNet-9's BG-GAP)
    auc: Estimate | None = None  # binary tasks; the second class is the positive one
    minority_auc: Estimate | None = None  # positives against negatives of minority groups (SIIM-ACR's robust test set)
    worst_pair_auc: Estimate | None = None  # lowest of: positives of one group against negatives of one group
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        read: dict[str, Any] = dict(values) | {"warnings": tuple(values["warnings"])}
        for name in FIGURES:
            read[name] = Estimate(**values[name]) if values[name] else None
        for kind in ("classes", "groups"):
            read[kind] = {name: Estimate(**estimate) for name, estimate in values[kind].items()}
        return cls(**read)

    def rows(self, limit: int = 20) -> list[tuple[str, str, str, str]]:
        """Name, value, interval, n; where there are more than `limit` groups or classes, the worst of them."""
        figures = [(label, getattr(self, name)) for name, label in FIGURES.items()]
        rows = [_row(f"{label}: {e.of}" if e.of else label, e) for label, e in figures if e is not None]
        for kind, cells in (("group", self.groups), ("class", self.classes)):
            shown = list(cells.items())
            if len(cells) > limit:
                shown = sorted(shown, key=lambda item: item[1].value)[:limit]
            rows += [_row(f"{kind} {name}", estimate) for name, estimate in shown]
            if len(cells) > limit:
                rows.append((f"({kind}: {len(cells) - limit} better ones not shown)", "", "", ""))
        return rows

    def table(self) -> Table:
        from rich.table import Table

        hows: dict[str, list[str]] = {}
        for name, label in FIGURES.items():
            if estimate := getattr(self, name):
                hows.setdefault(estimate.how, []).append(label)
        for kind, cells in (("every group", self.groups), ("every class", self.classes)):
            for how in {estimate.how for estimate in cells.values()}:
                hows.setdefault(how, []).append(kind)
        caption = "\n".join(f"{', '.join(labels)}: {how}." for how, labels in hows.items())
        table = Table("", "value", "95 % interval", "n", box=None, pad_edge=False, caption=caption)
        table.caption_justify = "left"
        for row in self.rows():
            table.add_row(*row)
        return table

    def headline(self) -> str:
        worst, kind = (self.worst_group, "group") if self.worst_group else (self.worst_class, "class")
        link = "but on only" if worst.high < self.accuracy.low else "and on"
        value, interval = _whole_numbers(self.accuracy)
        worst_value, worst_interval = _whole_numbers(worst)
        return (
            f"Right on {value} of all images {interval}, {link} {worst_value} {worst_interval} "
            f"of the worst {kind}, {worst.of} (n {worst.n:,})"
        )


def read_metrics(path: Path) -> dict[str, Any]:
    """The content of a metrics.json: `splits`, by which rule and where the weights were selected, perhaps `data`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for metrics in content["splits"].values():
            Metrics.from_dict(metrics)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `sightline evaluate` makes it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it and evaluate again") from error
    return content


def _row(name: str, estimate: Estimate) -> tuple[str, str, str, str]:
    return name, estimate.figure, estimate.interval, f"{estimate.n:,}"


def _whole_numbers(estimate: Estimate) -> tuple[str, str]:
    """Per cent without decimals, unless that would make nearly all look like all, or a little like nothing."""
    digits = 0 if 0.01 < estimate.value < 0.99 else 1
    value, low, high = (f"{100 * x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} %", f"[{low}, {high}]"
