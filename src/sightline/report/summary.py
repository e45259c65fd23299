"""The top of the report: headline numbers as cards, and whether the sight makes sense."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from ..metrics.coverage import SightSummary, measure_sight, percent
from ..metrics.estimates import Estimate, Metrics, read_metrics
from ..training.baseline import baseline_sentence, loses_what_matters
from .case import ReportContext
from .proof import Proof

IMAGES, QUICK_IMAGES = 256, 64


@dataclass(frozen=True)
class Card:
    title: str
    value: str
    note: str
    tone: str = ""  # good or bad, where there is something to say


def sight_summary(context: ReportContext) -> SightSummary:
    command = context.command
    found = measure_sight(
        context.method, context.rows, context.indices, context.model.expects, context.accelerator, batch=command.batch,
        most=QUICK_IMAGES if command.quick else IMAGES,
    )  # fmt: skip
    if found is None:
        raise UserError("this method always sees the whole image, so that there is no sight to judge")
    return found


def baseline(context: ReportContext) -> tuple[str, bool]:
    """The comparison with the probe that training made, and whether the sight loses what matters; empty without."""
    path = context.model.run.folder / "metrics.json"
    if not context.dataset.own or context.intervention.changes or not path.is_file():
        return "", False
    found = read_metrics(path).get("baseline", {}).get("splits", {}).get(context.command.split)
    return ("", False) if found is None else (baseline_sentence(found), loses_what_matters(found))


def cards(metrics: Metrics, seen: SightSummary | None, coverage: np.ndarray, proof: Proof | None) -> list[Card]:
    """`coverage`: the visible fraction of every image."""
    worst, kind = (metrics.worst_group, "group") if metrics.worst_group else (metrics.worst_class, "class")
    found = [
        Card("Accuracy", metrics.accuracy.value_text, f"{metrics.accuracy.interval}, n = {metrics.n:,}"),
        Card(f"Worst {kind}", worst.value_text, f"{worst.interval} {worst.of}"),
    ]
    if seen is None:
        found.append(Card("Sees", "everything", "the whole image, always"))
    else:
        note = f"of the image, ± {percent(float(coverage.std()))}"
        found.append(Card("Sees", percent(float(coverage.mean())), note, "bad" if seen.suspicions else "good"))
    if proof is not None:
        blind = proof.verdict == "blind"
        note = "redrawing what is hidden changed no bit" if blind else "hidden content reaches the prediction"
        if seen is None:
            note = "it hides nothing"
        found.append(Card("Proof", "blind" if blind else "not blind", note, "good" if blind else ""))
    if metrics.classification is not None:
        error: Estimate = metrics.classification.calibration_error
        found.append(Card("Calibration error", error.value_text, f"{error.interval}, expected"))
    return found
