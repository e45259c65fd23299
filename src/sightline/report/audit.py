"""The report: one HTML file that opens offline. A person sees where a model fails, what it looks at, what is proved,
and what happens if it stops looking there.

What cannot be made is named with its reason. Nothing here chooses anything: what is measured on test data describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from torch import nn

from ..config import Audit
from ..console.files import make_folder, make_way, write
from ..console.terminal import bar
from ..errors import UserError
from ..explain.background_swaps import MOST, THOUSAND, Swaps, swaps
from ..explain.localize import figures_before, localize
from ..explain.segmentation import FIGURES as OUTLINES
from ..explain.shape import FromShape, label_from_shape
from ..explain.stress_results import Stressed
from ..interventions.apply import SEARCH_FILE
from ..interventions.search import WORDS, objective_of
from ..load import measure
from ..metrics.estimates import FIGURES as NAMES
from ..metrics.estimates import Estimate, Metrics
from ..metrics.groups import evaluate, score
from ..metrics.inference import map_batches, sight_for
from ..metrics.localization import FIGURES, MAP_FIGURES, Localization
from ..sight import cell_share
from ..vit.weights import weights_sha256
from . import text as wording
from .case import Case, counting, open_case
from .gallery import Shown, css_colour, examples_of_swaps, galleries, jpeg_uri
from .proof import prove
from .provenance import command_for, counts, facts
from .survey import LeftOut, Presence, Survey, left_out, presence, survey

T = TypeVar("T")
QUICKLY = 200  # pictures whose backgrounds are swapped
FEWEST = 20  # training pictures of every class, for a probe of the shape
MOST_COLUMNS = 8
MOST_ROWS = 20


@dataclass(frozen=True)
class Section(Generic[T]):
    """What was found, or why nothing could be."""

    content: T | None = None
    missing: str = ""


def section(make: Callable[[], T]) -> Section[T]:
    try:
        return Section(make())
    except UserError as error:
        return Section(missing=str(error))


def audit(command: Audit) -> tuple[Path, str]:
    """The file, and its headline."""
    make_way(command.out)
    case = open_case(command)
    path = command.out or default_path(case)
    make_way(path)
    found = survey(case)
    metrics = measure(found.answers, case.model.run)
    context = {
        "case": case,
        "facts": facts(case),
        "counts": counts(case),
        "metrics": metrics,
        "figures": [(label, one) for name, label in NAMES.items() if (one := getattr(metrics, name)) is not None],
        "headline": wording.headline(metrics),
        "overall": wording.overall(metrics, command.split),
        "kind": wording.cells_of(metrics)[0],
        "cells": wording.cells_of(metrics)[1],
        "coverage": float(found.coverage.mean()),
        "proof": section(lambda: prove(case)),
        "galleries": section(lambda: galleries(case, found)),
        "parts": parts_of(case, found),
        "leave_one_out": section(lambda: leave_one_out(case, found)),
        "curve": section(lambda: removal(case, found)),
        "swaps": section(lambda: swapped(case)),
        "shape": section(lambda: shape_of_sight(case, found)),
        "localization": section(lambda: localization(case)),
        "stressed": section(lambda: stressed(case)),
    }
    write(path, render(context))
    return path, context["headline"]


def default_path(case: Case) -> Path:
    folder, split = folder_of(case), case.command.split
    make_folder(folder)
    return folder / ("audit.html" if split == "test" else f"audit-{split}.html")


def folder_of(case: Case) -> Path:
    """The run's, or the one inside it that is for what was asked about other data, or of the corrected model."""
    changed = case.model.run.facts.get("intervention", {}).get("folder", "")
    option = (case.command.layout or "").partition(":")[2]
    other = () if case.asked.own else ("on", case.asked.path.resolve().stem, option, case.asked.fingerprint[:8])
    return case.model.run.folder / "-".join(filter(None, (*other, changed)))


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    number: int
    name: str
    colour: str
    dropped: bool
    presence: Presence


def parts_of(case: Case, found: Survey) -> list[Part]:
    if found.areas is None:
        return []
    K, said = found.areas.shape[1], case.intervention
    return [Part(k, said.part(k), css_colour(k, K), k in said.drop, presence(found, k)) for k in range(K)]


@dataclass(frozen=True)
class LeaveOneOut:
    trials: list[LeftOut]
    objective: str
    before: float
    columns: list[str]  # groups or classes to show; none where they are too many
    chosen: str  # what validation data said


def leave_one_out(case: Case, found: Survey) -> LeaveOneOut:
    if found.areas is None:
        raise UserError("this method discovers no parts that could be left out")
    if not found.without:
        raise UserError("there is only one part left, and without any there is nothing to answer from")
    trials, objective = left_out(found, case.command.seed), objective_of(found.answers, None)
    names = list(trials[0].cells)
    columns = names if len(names) <= MOST_COLUMNS else []
    return LeaveOneOut(trials, WORDS[objective], score(found.answers, objective), columns, chosen_before(case))


def chosen_before(case: Case) -> str:
    """What `intervene --find` found on validation data, if it was asked."""
    found = case.intervention.facts.get("found")
    if case.intervention.changes and found and found.get("gain"):
        gain = Estimate(**found["gain"])
        return f"The {found['split']} data chose: {case.intervention.words} ({gain}). That is applied here."
    said = "To choose, use validation data: sightline intervene RUN --find."
    path = case.model.run.folder / SEARCH_FILE
    try:
        measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        return said
    if not measured.get("steps") or measured.get("weights") != weights_sha256(cast(nn.Module, case.parts)):
        return said
    best = measured["steps"][0]
    return (
        f"On validation data ({measured['split']}, n {measured['n']:,}) the best of {best['tried']} changes, "
        f"{best['step']}, gained {100 * (best['after'] - best['before']):+.1f} points of the "
        f"{WORDS[measured['objective']]}, which {'exceeds' if best['taken'] else 'may be'} chance."
        + (f" {measured['suspect']['sentence']}" if measured.get("suspect") else "")
    )


# ---- patches unlike training's ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy and worst group against the share of training patches that would be kept."""

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
        every = list(enumerate(self.series[name]))
        there = [f"{self.x(k)},{self.y(one.high)}" for k, one in every]
        return " ".join([*there, *(f"{self.x(k)},{self.y(one.low)}" for k, one in reversed(every))])


def removal(case: Case, found: Survey) -> Curve:
    if found.areas is None:
        raise UserError("this method discovers no parts, so that no patch is far from one")
    if not found.removed:
        raise UserError("there are no training pictures to measure distances on")
    runs = {"none": found.answers} | {f"{100 * q:g} %": answers for q, answers in found.removed.items()}
    if case.intervention.quantile is not None:
        runs = {f"as kept, {100 * case.intervention.quantile:g} %": found.answers} | dict(list(runs.items())[1:])
    metrics = [evaluate(answers, seed=case.command.seed) for answers in runs.values()]
    worst = [one.worst_group or one.worst_class for one in metrics]
    kind = "worst group" if found.answers.groups is not None else "worst class"
    return Curve(list(runs), {"accuracy": [one.accuracy for one in metrics], kind: worst}, found.calibrated_on)


# ---- backgrounds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swapped:
    found: Swaps
    metrics: dict[str, Metrics]
    names: dict[str, str]
    columns: list[str]
    sentence: str
    gap: Estimate | None
    examples: list[list[Shown]]


def swapped(case: Case) -> Swapped:
    said, model = case.command, case.model
    with bar("swapping backgrounds", THOUSAND) as progress:
        found = swaps(
            case.method, case.rows, case.indices, model.expects, case.accelerator,
            most=QUICKLY if said.quick else MOST, seed=said.seed, batch=said.batch, workers=said.workers,
            cache=said.cache, progress=progress,
        )  # fmt: skip
    metrics = {kind: evaluate(answers, seed=said.seed) for kind, answers in found.answers.items()}
    names = {kind: wording.CONDITIONS[kind] for kind in found.answers}
    cells = list(wording.cells_of(metrics["original"])[1])
    examples = min(len(found.examples["original"]), examples_of_swaps(said.pictures))
    drawn = [
        [
            Shown(jpeg_uri(pictures[k].float() / 255), f"example {k + 1}: {names[kind]}", names[kind], *side(pictures))
            for kind, pictures in found.examples.items()
        ]
        for k in range(examples)
    ]
    columns = cells if len(cells) <= MOST_COLUMNS else []
    return Swapped(found, metrics, names, columns, wording.of_swaps(found, case.masks_from), found.gap, drawn)


def side(pictures: Any) -> tuple[int, int]:
    return pictures.shape[3], pictures.shape[2]


# ---- the sight -------------------------------------------------------------------------------------------------------


def shape_of_sight(case: Case, found: Survey) -> FromShape:
    """What a probe makes of nothing but the outline of the sight."""
    if not case.blind or (found.coverage == 1).all():
        raise UserError("the answer is made from the whole picture, so that no sight has a shape to give anything away")
    if case.command.quick:
        raise UserError("left out, as --quick says; `sightline shape RUN` measures it")
    rows, split = case.rows, case.command.split
    labels = rows.labels[rows.where("train")]
    if min(np.bincount(labels, minlength=2)[np.unique(rows.labels)], default=0) < FEWEST or not len(rows.where("val")):
        raise UserError(f"a probe needs at least {FEWEST} training pictures of every class, and validation pictures")
    from ..metrics.overlap import patch_grid

    def shape(images, masks):
        sight, size = sight_for(case.method, images, masks), tuple(images.shape[2:])
        return cell_share(sight.visible(size), patch_grid(sight, {}, size)).flatten(1)

    seen = {}
    for name in dict.fromkeys(["train", "val", split]):
        with case.batches(f"shapes of the {name} data", rows.where(name)) as batches:
            seen[name] = map_batches(shape, batches, case.accelerator)
    answers, linear = label_from_shape(rows, seen, split)
    return FromShape(answers, measure(answers, case.model.run), linear.c, seen["train"].shape[1])


@dataclass(frozen=True)
class Localized:
    sight: list[tuple[str, Estimate]]
    maps: list[tuple[str, Estimate]]
    notes: Sequence[str]
    source: str


def localization(case: Case) -> Localized:
    """From the run's own file where that is about these weights; otherwise measured now."""
    found, source = known_localization(case), "localization.json of the run"
    if found is None:
        said, source = case.command, "measured for this report"
        with bar("comparing with masks", len(case.indices)) as tick:
            found = localize(
                counting(case.method, tick), case.rows, case.indices, case.model.expects, case.accelerator,
                batch=said.batch, workers=said.workers, cache=said.cache, seed=said.seed,
            )  # fmt: skip
    sight = [(FIGURES[name], one) for name, one in found.figures.items()]
    maps = [
        (f"{name}: {MAP_FIGURES[figure]}", one) for name, some in found.maps.items() for figure, one in some.items()
    ]
    return Localized(sight, maps, found.notes, source)


def known_localization(case: Case) -> Localization | None:
    path = folder_of(case) / "localization.json"
    true = case.asked.own and not case.masks_from
    if not true or not path.exists() or path.stat().st_mtime < case.model.run.best.stat().st_mtime:
        return None
    said = figures_before(path, case.asked).get("splits", {}).get(case.command.split)
    return None if said is None else Localization.from_dict(said)


def stressed(case: Case) -> Stressed:
    """What `sightline stress` found of these weights."""
    path = folder_of(case) / "stress" / f"{case.command.split}.json"
    if not path.exists() or path.stat().st_mtime < case.model.run.best.stat().st_mtime:
        raise UserError(f"tests of its maps take long, and were not made: `{command_for(case, 'stress')}`")
    return Stressed.from_dict(figures_before(path, case.asked))


# ---- the page --------------------------------------------------------------------------------------------------------


def render(context: dict[str, Any]) -> str:
    """Everything that a user wrote is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sightline", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"percent": wording.percent, "points": wording.points, "minus": wording.minus}
    return environment.get_template("report.html.j2").render(context | {"most_rows": MOST_ROWS, "outlines": OUTLINES})


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Audit) -> int:
    path, headline = audit(command)
    print(headline)
    print(f"The report is {path}: open it in a browser.")
    return 0
