"""The top of the report: headline numbers as cards, and whether the sight makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from ..explain.background_swaps import SwapResults
from ..metrics.coverage import SightSummary, mean_by, measure_sight, percent, summarize
from ..metrics.estimates import Estimate, Metrics, read_metrics
from ..metrics.predictions import Predictions
from ..training.baseline import baseline_sentence, loses_what_matters
from .case import ReportContext
from .proof import Proof
from .survey import SurveyResults
from .text import best_group, swap_summary

IMAGES, QUICK_IMAGES = 256, 64


@dataclass(frozen=True)
class Card:
    title: str
    value: str
    note: str
    tone: str = ""  # good or bad, where there is something to say


@dataclass(frozen=True)
class Answer:
    question: str
    answer: str
    section: str  # the section of the page with the evidence


def sight_summary(context: ReportContext, seen: SurveyResults) -> SightSummary:
    command = context.command
    found = measure_sight(
        context.method, context.rows, context.indices, context.model.expects, context.accelerator, batch=command.batch,
        most=QUICK_IMAGES if command.quick else IMAGES,
    )  # fmt: skip
    if found is None:
        raise UserError("this method always sees the whole image, so that there is no sight to judge")
    return of_all_images(found, seen.predictions, seen.coverage)


def of_all_images(found: SightSummary, predictions: Predictions, coverage: np.ndarray) -> SightSummary:
    """With the visible fraction of every image of the report; the border and the rest stay those of a sample."""
    every = summarize(coverage)
    groups = {}
    if predictions.groups is not None:
        groups = mean_by(coverage, predictions.groups, predictions.group_names)
    return replace(
        found, coverage=every.coverage, spread=every.spread, empty=every.empty, everything=every.everything,
        histogram=every.histogram, groups=groups, classes=mean_by(coverage, predictions.labels, predictions.classes),
    )  # fmt: skip


def baseline(context: ReportContext) -> tuple[str, bool]:
    """The comparison with the probe that training made, and whether the sight loses what matters; empty without."""
    path = context.model.run.folder / "metrics.json"
    if not context.dataset.own or context.intervention.changes or not path.is_file():
        return "", False
    found = read_metrics(path).get("baseline", {}).get("splits", {}).get(context.command.split)
    return ("", False) if found is None else (baseline_sentence(found), loses_what_matters(found))


def cards(
    metrics: Metrics, seen: SightSummary | None, proof: Proof | None, swaps: SwapResults | None = None
) -> list[Card]:
    worst, kind = (metrics.worst_group, "group") if metrics.worst_group else (metrics.worst_class, "class")
    found = [
        Card("Accuracy", metrics.accuracy.value_text, with_n(metrics.accuracy)),
        Card(f"Worst {kind}", worst.value_text, f"{worst.of}, {with_n(worst)}"),
    ]
    if seen is None:
        found.append(Card("Sees", "100 %", "of the image, always: it hides nothing"))
    else:
        note = f"of the image on average (± {percent(seen.spread)}), n = {seen.coverage.n:,}"
        found.append(Card("Sees", percent(seen.coverage.value), note, "bad" if seen.suspicions else "good"))
    if proof is not None:
        found.append(proof_card(proof, seen))
    if swaps is not None and "other" in swaps.predictions:
        changed = swaps.changed("other")
        found.append(Card("Other background", changed.value_text, f"of predictions change, {with_n(changed)}"))
    if metrics.classification is not None:
        error: Estimate = metrics.classification.calibration_error
        found.append(Card("Calibration error", error.value_text, f"{with_n(error)}; lower is better"))
    return found


def with_n(estimate: Estimate) -> str:
    return f"{estimate.interval}, n = {estimate.n:,}"


def proof_card(proof: Proof, seen: SightSummary | None) -> Card:
    title, certificate = "Proof of blindness", proof.certificate
    if seen is None:
        return Card(title, "not blind", "it hides nothing")
    if proof.verdict == "blind" and certificate is not None:
        return Card(title, "proved", f"redrawing what it hides changed no bit, {images(certificate.images)}", "good")
    if proof.verdict == "leaks":
        return Card(title, "not blind", "hidden content reaches the prediction")
    return Card(title, "not proved", "the reason is below")


def images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def answers(
    metrics: Metrics,
    errors: Sequence[str],
    sight: tuple[SightSummary | None, str],
    proof: tuple[Proof | None, str],
    swaps: tuple[SwapResults | None, str],
    masks_from: str = "",
) -> list[Answer]:
    """What a reader asks first. Each of the last three is a result, or the reason why there is none."""
    seen = sight[0].sentence if sight[0] is not None else f"{capitalized(sight[1])}."
    return [
        Answer("Where does it fail?", " ".join([*errors[:1], best_group(metrics)]), "mistakes"),
        Answer("What does it look at?", seen, "sight"),
        Answer("Is that proved?", proved(*proof), "proof"),
        Answer("Does the background matter?", background_matters(proof[0], *swaps, masks_from), "backgrounds"),
    ]


def proved(proof: Proof | None, missing: str) -> str:
    if proof is None:
        return f"Not tested: {missing}."
    if proof.certificate is None or proof.verdict != "blind":
        return proof.sentence
    tested = f"Tested bit by bit on {images(proof.certificate.images)}."
    if proof.certificate.end_to_end is None:
        return f"{proof.sentence} {tested}"
    return f"{proof.sentence} {tested} What selects the sight does see the whole image."


def background_matters(proof: Proof | None, swaps: SwapResults | None, missing: str, masks_from: str) -> str:
    if swaps is None:
        return f"Not measured: {missing}."
    sentence = swap_summary(swaps, masks_from)
    blind = proof is not None and proof.verdict == "blind"
    if blind and "other" in swaps.predictions and swaps.changed("other").value > 0:
        sentence += " Hidden content cannot do this: another background can only move the sight, or show inside it."
    return sentence


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
