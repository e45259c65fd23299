"""`sightline audit`: the report, one HTML file that opens offline. Accuracy by group, what the model sees, the proof of
blindness, and the effect of part removal, token removal and background swaps.

A section that cannot be made gives the reason. Nothing is selected here: figures on test data only describe the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ..config import Audit
from ..console.files import make_folder, prepare_output, write
from ..console.terminal import bar, present
from ..errors import UserError
from ..explain.background_swaps import MAX_IMAGES, PROGRESS_STEPS, SwapResults, swap_backgrounds
from ..explain.localize import localize, previous_results
from ..explain.segmentation import FIGURES as SEGMENTATION_LABELS
from ..explain.shape import ShapeProbe, fit_shape_probe, mask_shapes
from ..explain.stress_results import StressResults
from ..interventions.apply import load_search
from ..interventions.search import OBJECTIVE_LABELS, resolve_objective
from ..load import measure
from ..metrics.estimates import METRIC_LABELS, Estimate, Metrics
from ..metrics.groups import evaluate, score
from ..metrics.localization import LOCALIZATION_LABELS, MAP_LABELS, Localization
from . import text
from .case import ReportContext, open_report
from .errors import error_concentration
from .gallery import Thumbnail, galleries, jpeg_uri, part_css_colour, swap_example_count
from .proof import prove
from .provenance import command_for, run_facts, split_counts
from .summary import answers, baseline, cards, sight_summary
from .survey import PartFrequency, PartRemoval, SurveyResults, part_frequency, part_removals, survey

T = TypeVar("T")
QUICK_IMAGES = 200  # for background swaps, with --quick
MIN_PER_CLASS = 20  # training images of every class, for the probe of the mask shape
MAX_COLUMNS = 8
MAX_ROWS = 20
MAX_MATRIX = 12  # classes of a confusion matrix


@dataclass(frozen=True)
class Section(Generic[T]):
    """The content of a section, or the reason why there is none."""

    content: T | None = None
    missing: str = ""


def section(make: Callable[[], T]) -> Section[T]:
    try:
        return Section(make())
    except UserError as error:
        return Section(missing=str(error))


def audit(command: Audit) -> tuple[Path, str]:
    """Write the report; its file and its headline."""
    prepare_output(command.out)
    context = open_report(command)
    path = command.out or default_path(context)
    prepare_output(path)
    found = survey(context)
    metrics = measure(found.predictions, context.model.run)
    kind, cells = text.groups_or_classes(metrics)
    sight, proof = section(lambda: sight_summary(context, found)), section(lambda: prove(context))
    swaps, (compared, loses) = section(lambda: background_swaps(context)), baseline(context)
    swapped = swaps.content.found if swaps.content else None
    errors = error_concentration(found.predictions, found.coverage if sight.content else None)
    values = {
        "cards": cards(metrics, sight.content, proof.content, swapped),
        "answers": answers(
            metrics,
            errors.sentences,
            (sight.content, sight.missing),
            (proof.content, proof.missing),
            (swapped, swaps.missing),
            context.masks_from,
        ),
        "sight": sight,
        "baseline": compared,
        "baseline_loses": loses,
        "classification": metrics.classification,
        "errors": errors,
        "context": context,
        "facts": run_facts(context),
        "counts": split_counts(context),
        "metrics": metrics,
        "figures": [
            (label, one) for name, label in METRIC_LABELS.items() if (one := getattr(metrics, name)) is not None
        ],
        "headline": metrics.headline() + (copies_sentence(context) if context.dataset.own else ""),
        "kind": kind,
        "cells": cells,
        "proof": proof,
        "galleries": section(lambda: galleries(context, found)),
        "parts": describe_parts(context, found),
        "part_removal": section(lambda: part_removal(context, found)),
        "token_removal": section(lambda: token_removal(context, found)),
        "swaps": swaps,
        "shape": section(lambda: shape_probe(context, found)),
        "localization": section(lambda: localization(context)),
        "stress": section(lambda: stress_results(context)),
    }
    write(path, render(values))
    return path, values["headline"]


def copies_sentence(context: ReportContext) -> str:
    """About test images that are also in train or val, if training was allowed to use them."""
    copies = context.model.run.facts.get("copies") if context.command.split == "test" else None
    return f" {copies}." if copies else ""


def default_path(context: ReportContext) -> Path:
    folder, split = results_folder(context), context.command.split
    make_folder(folder)
    return folder / ("audit.html" if split == "test" else f"audit-{split}.html")


def results_folder(context: ReportContext) -> Path:
    """The run folder, or the folder inside it for other data or for the model with an intervention."""
    intervention = context.model.run.facts.get("intervention", {}).get("folder", "")
    option, dataset = (context.command.layout or "").partition(":")[2], context.dataset
    other = () if dataset.own else ("on", dataset.path.resolve().stem, option, dataset.fingerprint[:8])
    return context.model.run.folder / "-".join(filter(None, (*other, intervention)))


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    number: int
    name: str
    colour: str
    dropped: bool
    frequency: PartFrequency


def describe_parts(context: ReportContext, found: SurveyResults) -> list[Part]:
    if found.areas is None:
        return []
    K, applied = found.areas.shape[1], context.intervention
    return [
        Part(k, applied.part_name(k), part_css_colour(k, K), k in applied.drop, part_frequency(found, k))
        for k in range(K)
    ]


@dataclass(frozen=True)
class PartRemovalTable:
    trials: list[PartRemoval]
    objective: str
    before: float
    columns: list[str]  # groups or classes; empty if there are too many
    validation: str  # the result of the search on validation data


def part_removal(context: ReportContext, found: SurveyResults) -> PartRemovalTable:
    if found.areas is None:
        raise UserError("this method has no discovered parts to remove")
    if not found.part_removal:
        raise UserError("only one part is left; without it there is nothing to predict from")
    trials, objective = part_removals(found, context.command.seed), resolve_objective(found.predictions, None)
    names = list(trials[0].cells)
    columns = names if len(names) <= MAX_COLUMNS else []
    before = score(found.predictions, objective)
    return PartRemovalTable(trials, OBJECTIVE_LABELS[objective], before, columns, search_summary(context))


def search_summary(context: ReportContext) -> str:
    """The result of `intervene --find` on validation data, if it was run."""
    found, assumed = context.intervention.facts.get("found"), context.parts
    if context.intervention.changes and found and found.get("gain"):
        gain = Estimate(**found["gain"])
        return f"Applied here, as selected on {found['split']} data: {context.intervention.description} ({gain})."
    assert assumed is not None
    try:
        search = load_search(replace(context.model, method=assumed)) or {}
    except UserError:
        search = {}
    if not search.get("steps"):
        return "To select parts, use validation data: sightline intervene RUN --find."
    best = search["steps"][0]
    return (
        f"On {search['split']} data (n = {search['n']:,}), the best of {best['tried']} interventions, {best['step']}, "
        f"changes the {OBJECTIVE_LABELS[search['objective']]} by {100 * (best['after'] - best['before']):+.1f} points, "
        f"which is {'' if best['taken'] else 'not '}significant."
        + (f" {search['suspect']['sentence']}" if search.get("suspect") else "")
    )


# ---- token removal ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy and worst-group accuracy against the quantile of training distances up to which patches are kept."""

    labels: list[str]
    series: dict[str, list[Estimate]]
    calibrated_on: int

    WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 46, 16, 14, 46

    def x(self, k: int) -> float:
        step = (self.WIDTH - self.LEFT - self.RIGHT) / max(1, len(self.labels) - 1)
        return round(self.LEFT + k * step, 1)

    def y(self, value: float) -> float:
        return round(self.TOP + (1 - value) * (self.HEIGHT - self.TOP - self.BOTTOM), 1)

    def line(self, name: str) -> str:
        return " ".join(f"{self.x(k)},{self.y(one.value)}" for k, one in enumerate(self.series[name]))

    def band(self, name: str) -> str:
        points = list(enumerate(self.series[name]))
        upper = [f"{self.x(k)},{self.y(one.high)}" for k, one in points]
        return " ".join([*upper, *(f"{self.x(k)},{self.y(one.low)}" for k, one in reversed(points))])


def token_removal(context: ReportContext, found: SurveyResults) -> Curve:
    if found.areas is None:
        raise UserError("this method has no discovered parts, from which patches could be far")
    if not found.token_removal:
        raise UserError("there are no training images to measure distances on")
    first, quantile = "none", context.intervention.quantile
    if quantile is not None:
        first = f"as saved, {100 * quantile:g} %"
    runs = {first: found.predictions} | {f"{100 * q:g} %": one for q, one in found.token_removal.items()}
    metrics = [evaluate(predictions, seed=context.command.seed) for predictions in runs.values()]
    worst = [one.worst_group or one.worst_class for one in metrics]
    kind = "worst-group accuracy" if found.predictions.groups is not None else "worst-class accuracy"
    return Curve(list(runs), {"accuracy": [one.accuracy for one in metrics], kind: worst}, found.calibrated_on)


# ---- background swaps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwapTable:
    found: SwapResults
    metrics: dict[str, Metrics]
    names: dict[str, str]
    columns: list[str]
    sentence: str
    gap: Estimate | None
    examples: list[list[Thumbnail]]


def background_swaps(context: ReportContext) -> SwapTable:
    command, model = context.command, context.model
    with bar("swapping backgrounds", PROGRESS_STEPS) as progress:
        found = swap_backgrounds(
            context.method, context.rows, context.indices, model.expects, context.accelerator,
            most=QUICK_IMAGES if command.quick else MAX_IMAGES, seed=command.seed, batch=command.batch,
            workers=command.workers, cache=command.cache, progress=progress,
        )  # fmt: skip
    metrics = {condition: evaluate(one, seed=command.seed) for condition, one in found.predictions.items()}
    names = {condition: text.CONDITION_NAMES[condition] for condition in found.predictions}
    cells = list(text.groups_or_classes(metrics["original"])[1])
    count = min(len(found.examples["original"]), swap_example_count(command.examples))
    examples = [
        [
            Thumbnail(
                jpeg_uri(images[k].float() / 255), f"example {k + 1}: {names[condition]}", names[condition],
                images.shape[3], images.shape[2],
            )
            for condition, images in found.examples.items()
        ]
        for k in range(count)
    ]  # fmt: skip
    columns = cells if len(cells) <= MAX_COLUMNS else []
    sentence = text.swap_summary(found, context.masks_from)
    return SwapTable(found, metrics, names, columns, sentence, found.gap, examples)


# ---- the sight -------------------------------------------------------------------------------------------------------


def shape_probe(context: ReportContext, found: SurveyResults) -> ShapeProbe:
    """A probe of the label from the mask shape alone."""
    if not context.blind or (found.coverage == 1).all():
        raise UserError("the model sees the whole image, so its mask has no shape")
    if context.command.quick:
        raise UserError("skipped because of --quick; run `sightline shape RUN`")
    rows, split = context.rows, context.command.split
    labels = rows.labels[rows.split_indices("train")]
    counts = np.bincount(labels, minlength=2)[np.unique(rows.labels)]
    if min(counts, default=0) < MIN_PER_CLASS or not len(rows.split_indices("val")):
        raise UserError(f"the probe needs {MIN_PER_CLASS} training images of every class, and validation images")
    shapes = {}
    for name in dict.fromkeys(["train", "val", split]):
        with context.batches(f"mask shapes of {name} data", rows.split_indices(name)) as batches:
            shapes[name] = mask_shapes(context.method, batches, context.accelerator)
    predictions, linear = fit_shape_probe(rows, shapes, split)
    return ShapeProbe(predictions, measure(predictions, context.model.run), linear.c, shapes["train"].shape[1])


@dataclass(frozen=True)
class LocalizationTable:
    sight: list[tuple[str, Estimate]]
    maps: list[tuple[str, Estimate]]
    notes: Sequence[str]
    source: str


def localization(context: ReportContext) -> LocalizationTable:
    """From the run's localization.json if it is about these weights; otherwise measured now."""
    found, source = stored_localization(context), "from localization.json of the run"
    if found is None:
        command, source = context.command, "measured for this report"
        found = localize(
            context.method, context.rows, context.indices, context.model.expects, context.accelerator,
            batch=command.batch, workers=command.workers, cache=command.cache, seed=command.seed,
        )  # fmt: skip
    sight = [(LOCALIZATION_LABELS[name], one) for name, one in found.figures.items()]
    maps = [(f"{name}: {MAP_LABELS[figure]}", one) for name, some in found.maps.items() for figure, one in some.items()]
    return LocalizationTable(sight, maps, found.notes, source)


def stored_localization(context: ReportContext) -> Localization | None:
    path = results_folder(context) / "localization.json"
    true_masks = context.dataset.own and not context.masks_from
    if not true_masks or not path.exists() or path.stat().st_mtime < context.model.run.best.stat().st_mtime:
        return None
    stored = previous_results(path, context.dataset).get("splits", {}).get(context.command.split)
    return None if stored is None else Localization.from_dict(stored)


def stress_results(context: ReportContext) -> StressResults:
    """What `sightline stress` found for these weights."""
    path = results_folder(context) / "stress" / f"{context.command.split}.json"
    if not path.exists() or path.stat().st_mtime < context.model.run.best.stat().st_mtime:
        raise UserError(f"these tests take long and have not been run; run `{command_for(context, 'stress')}`")
    return StressResults.from_dict(previous_results(path, context.dataset))


# ---- the page --------------------------------------------------------------------------------------------------------


def render(values: dict[str, Any]) -> str:
    """The page; all names that come from the user are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sightline", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"percent": text.percent, "points": text.points, "minus": text.minus}
    environment.filters |= {"code": text.mark_code, "breakable": text.breakable}
    labels = {"max_rows": MAX_ROWS, "max_matrix": MAX_MATRIX, "segmentation_labels": SEGMENTATION_LABELS}
    return text.keep_together(environment.get_template("report.html.j2").render(values | labels))


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Audit) -> int:
    path, headline = audit(command)

    def show() -> None:
        print(headline)
        print(f"Report saved to {path}; open it in a browser.")

    present(command, {"report": str(path), "headline": headline}, show)
    return 0
