"""Metrics with their uncertainty: `Estimate` (value, 95 % interval, n) and the table `Metrics` of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..console.checksums import check_checksum
from ..errors import UserError

METRIC_LABELS = {
    "accuracy": "Accuracy",
    "balanced": "Class-balanced accuracy",
    "adjusted": "Adjusted average accuracy",
    "mean_of_groups": "Mean group accuracy",
    "worst_group": "Worst-group accuracy",
    "minority_worst_group": "Worst minority-group accuracy",
    "worst_class": "Worst-class accuracy",
    "group_gap": "Accuracy − worst-group accuracy",
    "background_gap": "Background gap (same − random)",
    "auc": "AUROC",
    "minority_auc": "AUROC on minority groups",
    "worst_pair_auc": "AUROC of the worst pair of groups",
}


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95 % interval, the number of images behind it, and the method of the interval."""

    value: float
    low: float
    high: float
    n: int
    how: str
    of: str = ""  # which group, class or pair is the worst
    difference: bool = False  # of two metrics: in percentage points, may be negative

    def __post_init__(self) -> None:
        floor = -1.0 if self.difference else 0.0
        for name, number in (  # neither rounding nor re-centring may put the value outside its interval
            ("low", min(max(self.low, floor), self.value)),
            ("high", max(min(self.high, 1.0), self.value)),
            ("value", self.value),
        ):
            object.__setattr__(self, name, float(number))

    def __str__(self) -> str:
        return f"{self.value_text}  {self.interval}  n {self.n:,}"

    @property
    def value_text(self) -> str:
        return f"{100 * self.value:+.1f} points" if self.difference else f"{100 * self.value:.1f} %"

    @property
    def interval(self) -> str:
        return f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class ClassScores:
    """Of one class: `precision` of the images predicted as it, `recall` of those labelled so, and their harmonic mean;
    None where there are no such images."""

    precision: Estimate | None
    recall: Estimate | None
    f1: Estimate | None


@dataclass(frozen=True)
class ReliabilityBin:
    """The images whose confidence lies in (low, high]."""

    low: float
    high: float
    n: int
    confidence: float  # mean
    accuracy: float


@dataclass(frozen=True)
class Classification:
    """One run's predictions, class by class."""

    confusion: dict[str, dict[str, int]]  # images by label and prediction; pairs without images are left out
    scores: dict[str, ClassScores]
    macro_f1: Estimate  # mean over classes
    calibration_error: Estimate  # expected calibration error (ECE)
    reliability: tuple[ReliabilityBin, ...]  # without empty bins

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Classification:
        def estimate(one: Mapping[str, Any] | None) -> Estimate | None:
            return None if one is None else Estimate(**one)

        scores = {
            name: ClassScores(**{k: estimate(v) for k, v in one.items()}) for name, one in values["scores"].items()
        }
        return cls(
            {label: dict(counts) for label, counts in values["confusion"].items()},
            scores,
            Estimate(**values["macro_f1"]),
            Estimate(**values["calibration_error"]),
            tuple(ReliabilityBin(**one) for one in values["reliability"]),
        )

    def top_confusions(self, most: int) -> list[tuple[str, str, int, int]]:
        """Label, prediction, images confused so, and images of the label; the most frequent first."""
        pairs = [
            (label, predicted, count, sum(counts.values()))
            for label, counts in self.confusion.items()
            for predicted, count in counts.items()
            if predicted != label
        ]
        return sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))[:most]


@dataclass(frozen=True)
class Metrics:
    """All metrics of one run, or of several seeds of one method, on one split."""

    split: str
    n: int
    seeds: int
    accuracy: Estimate
    balanced: Estimate  # mean of the class accuracies
    worst_class: Estimate
    classes: dict[str, Estimate]
    groups: dict[str, Estimate] = field(default_factory=dict)
    adjusted: Estimate | None = None  # group accuracies weighted by training proportions (Sagawa et al. 2020)
    mean_of_groups: Estimate | None = None
    worst_group: Estimate | None = None  # of all groups
    minority_worst_group: Estimate | None = None  # worst of each label's rarest group in training, as in many papers
    group_gap: Estimate | None = None
    background_gap: Estimate | None = None  # accuracy on same-class minus random backgrounds (ImageNet-9's BG-GAP)
    auc: Estimate | None = None  # AUROC of binary tasks; the second class is the positive one
    minority_auc: Estimate | None = None  # positives against negatives of minority groups (SIIM-ACR's robust test set)
    worst_pair_auc: Estimate | None = None  # lowest of: positives of one group against negatives of one group
    classification: Classification | None = None  # of one run: confusions, precision, recall, F1, calibration
    warnings: tuple[str, ...] = ()  # about these data
    remarks: tuple[str, ...] = ()  # which metrics are missing, and why

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"warnings": list(self.warnings), "remarks": list(self.remarks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        read: dict[str, Any] = dict(values)
        read |= {name: tuple(values.get(name, ())) for name in ("warnings", "remarks")}
        read["classification"] = Classification.from_dict(one) if (one := values.get("classification")) else None
        for name in METRIC_LABELS:
            read[name] = Estimate(**values[name]) if values[name] else None
        for kind in ("classes", "groups"):
            read[kind] = {name: Estimate(**estimate) for name, estimate in values[kind].items()}
        return cls(**read)

    def rows(self, limit: int = 20) -> list[tuple[str, str, str, str]]:
        """Label, value, interval, n; of more than `limit` groups or classes only the worst."""
        labelled = [(label, getattr(self, name)) for name, label in METRIC_LABELS.items()]
        rows = [_row(f"{label}: {e.of}" if e.of else label, e) for label, e in labelled if e is not None]
        for kind, cells in (("Group", self.groups), ("Class", self.classes)):
            shown = list(cells.items())
            if len(cells) > limit:
                shown = sorted(shown, key=lambda item: item[1].value)[:limit]
            rows += [_row(f"{kind} {name}", estimate) for name, estimate in shown]
            if len(cells) > limit:
                rows.append((f"({kind}: {len(cells) - limit} with higher accuracy not shown)", "", "", ""))
        return rows

    def headline(self) -> str:
        """Accuracy and worst-group accuracy (worst-class accuracy without group labels) in one sentence."""
        worst, kind = (self.worst_group, "group") if self.worst_group else (self.worst_class, "class")
        return (
            f"Accuracy {self.accuracy.value_text}; worst-{kind} accuracy {worst.value_text} {worst.interval} "
            f"({worst.of}, n = {worst.n:,})."
        )


def read_metrics(path: Path) -> dict[str, Any]:
    """The content of a metrics.json: `splits`, how the checkpoint was selected, and perhaps `data`."""
    check_checksum(path, "restore it, or remove it and evaluate again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for metrics in content["splits"].values():
            Metrics.from_dict(metrics)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; create it with `sightline evaluate`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it and evaluate again") from error
    return content


def _row(name: str, estimate: Estimate) -> tuple[str, str, str, str]:
    return name, estimate.value_text, estimate.interval, f"{estimate.n:,}"
