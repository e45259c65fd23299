"""What interventions do to a trained run, in its folder `interventions/`.

found.json   what the search selected on validation data: parts, a quantile, both; which part has the object; noise
test.csv     of every test image whether its prediction is correct, as trained and under every intervention
sight.json   where it looks then: IoU, coverage, key points; sight.csv: image by image
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence import FOUND, SIGHT, SIGHTS, TEST
from measure import BATCH
from packing import as_csv
from rows import Row
from rows.interventions import NOISE_ROWS, QUANTILES, WITH_OBJECTS
from sightline.config import Evaluate
from sightline.data.batches import Batches
from sightline.data.rows import Rows, attribute_of
from sightline.datasets.birds import read_birds
from sightline.explain.localize import localize
from sightline.interventions.apply import QUANTILES as SEARCHED
from sightline.interventions.apply import CachedLook, apply_intervention, calibrate
from sightline.interventions.file import DistanceSketch, Intervention
from sightline.interventions.search import Search, search
from sightline.load import Model, evaluation_data, open_model
from sightline.methods.base import PartMethod, part_method
from sightline.metrics.inference import inference_batches
from sightline.metrics.predictions import Predictions
from sightline.report.survey import part_of_pixels
from study import Context

PER_IMAGE = "pixel_iou"
Predicting = Callable[[Sequence[Intervention]], list[Predictions]]


def is_measured(folder: Path) -> bool:
    return all((folder / name).exists() for name in (FOUND, TEST, SIGHT, SIGHTS))


def measure_interventions(context: Context, row: Row) -> None:
    """All that is missing."""
    folder = context.folder(row)
    noise = context.noise if row.name in NOISE_ROWS and not row.seed and row.set in WITH_OBJECTS else 0
    accelerator, model = open_model(folder, context.device)
    rows = evaluation_data(Evaluate(folder), model.run).rows
    run = MeasuredRun(context, row.set, noise, model, part_method(model.method, folder.name), rows, accelerator)
    if not (folder / FOUND).exists():
        save(folder / FOUND, as_json(run.found()))
    changes = run.interventions(json.loads((folder / FOUND).read_text(encoding="utf-8")))
    if not (folder / TEST).exists():
        save(folder / TEST, run.outcomes(changes))
    if not (folder / SIGHT).exists() or not (folder / SIGHTS).exists():
        figures, images = run.sights({name: changes[name] for name in ("plain", *(f"q{q:g}" for q in QUANTILES))})
        save(folder / SIGHTS, images)
        save(folder / SIGHT, as_json(figures))


def save(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def as_json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    context: Context
    set: str
    noise: int  # searches on shuffled labels
    model: Model
    method: PartMethod
    rows: Rows
    accelerator: Any

    @property
    def parts(self) -> int:
        return self.method.where.parts

    def batches(self, indices: np.ndarray, rows: Rows | None = None, *, masks: bool = False) -> closing[Batches]:
        return closing(
            inference_batches(
                rows or self.rows, indices, self.model.expects, self.accelerator,
                batch=BATCH, workers=self.context.workers, cache=self.context.cache, masks=masks,
            )
        )  # fmt: skip

    @cached_property
    def sketch(self) -> DistanceSketch:
        with self.batches(self.rows.split_indices("train")) as batches:
            return calibrate(self.method, batches, self.accelerator)

    # ---- on validation data ------------------------------------------------------------------------------------------

    def found(self) -> dict[str, Any]:
        """With 200 species there are four validation images each: too few for a search."""
        thresholds = {str(q): self.sketch.quantile(q) for q in {*QUANTILES, *SEARCHED}}
        if len(self.rows.classes) > 12:
            return {"thresholds": thresholds, "searches": {}}
        far = {q: self.sketch.quantile(q) for q in SEARCHED}
        with self.batches(self.rows.split_indices("val")) as batches:
            predictions = cached(CachedLook(self.method, self.rows, batches, self.accelerator))
            searches = {
                "parts": search(predictions, self.parts, {}),
                "quantile": search(predictions, 1, far),
                "both": search(predictions, self.parts, far),
            }
            noise = on_noise(predictions, self.parts, far, self.noise) if self.noise else None
        said = {"thresholds": thresholds, "searches": {name: in_words(one) for name, one in searches.items()}}
        return said | {"objects": self.parts_of_objects(), "noise": noise}

    @torch.no_grad()
    def parts_of_objects(self) -> dict[str, Any] | None:
        """By drawn object: of its pixels on validation images, the share of each part; and of each part's pixels."""
        masks = column_of(self.rows, "object_mask")
        val = np.array([i for i in self.rows.split_indices("val").tolist() if masks and masks[i]])
        if not len(val):
            return None
        rows = replace(self.rows, masks=masks)
        return {name: self.parts_on(rows, some) for name, some in by_attribute(rows, val).items()}

    def parts_on(self, rows: Rows, indices: np.ndarray) -> dict[str, Any]:
        on_object, own, pixels = torch.zeros(self.parts), torch.zeros(self.parts), 0
        with self.batches(indices, rows, masks=True) as batches:
            for batch in batches.epoch(0):
                batch = batch.to(self.accelerator.device)
                images = batch.images.float() / 255
                with self.accelerator.autocast():
                    sight = self.method.sight_from(images, self.method.detect(images))
                part = part_of_pixels(sight, (images.shape[2], images.shape[3]))
                assert batch.masks is not None
                counts = [torch.bincount((some + 1).flatten(), minlength=self.parts + 1)[1:] for some in
                          (part.where(batch.masks, -1), part)]  # fmt: skip
                on_object, own = on_object + counts[0].cpu(), own + counts[1].cpu()
                pixels += int(batch.masks.sum())
        shares = (on_object / max(pixels, 1)).tolist()
        return {
            "part": int(np.argmax(shares)),
            "share_of_the_object": shares,
            "share_of_the_part": (on_object / own.clamp(min=1)).tolist(),
            "n": len(indices),
        }

    # ---- on test data ------------------------------------------------------------------------------------------------

    def interventions(self, found: dict[str, Any]) -> dict[str, Intervention]:
        """None, fixed quantiles, and those selected on validation data."""

        def change(drop: Sequence[int], q: float | None) -> Intervention:
            return Intervention(tuple(drop), q, None if q is None else tuple(found["thresholds"][str(q)]))

        changes = {"plain": Intervention()} | {f"q{q:g}": change((), q) for q in QUANTILES}
        for name, one in found["searches"].items():
            changes[name] = change(one["drop"], one["quantile"])
        if "parts" in changes:
            changes["parts, q0.99"] = change(changes["parts"].drop, 0.99)
        return changes

    def outcomes(self, changes: dict[str, Intervention]) -> str:
        with self.batches(self.rows.split_indices("test")) as batches:
            looked = CachedLook(self.method, self.rows, batches, self.accelerator, most_bytes=0)
            every = dict(zip(changes, looked(list(changes.values())), strict=True))
        first = every["plain"]
        groups = [""] * len(first) if first.groups is None else [first.group_names[g] for g in first.groups]
        labels = [first.classes[label] for label in first.labels]
        columns = {"image": first.images, "label": labels, "group": groups}
        return as_csv(columns | {name: answers.correct.astype(int).tolist() for name, answers in every.items()})

    def sights(self, changes: dict[str, Intervention]) -> tuple[dict[str, Any], str]:
        """By part of the test images and intervention: the figures; and those of every image."""
        rows, figures, columns = self.rows, {}, {}
        test, fit = rows.split_indices("test"), None
        if self.set == "cub":
            rows = replace(rows, **keypoints_of(rows, self.context.packs)) if self.context.packs else rows
            fit = rows.split_indices("train") if self.context.packs else None
        for part, indices in by_attribute(rows, test).items() if self.set == "cub" else {"all": test}.items():
            for name, change in changes.items():
                found = localize(
                    apply_intervention(self.method, change), rows, indices, self.model.expects, self.accelerator,
                    fit=fit if part == "swapped" else None, batch=BATCH, workers=self.context.workers,
                    cache=self.context.cache,
                )  # fmt: skip
                figures.setdefault(part, {})[name] = {key: asdict(one) for key, one in found.figures.items()}
                values = zip(found.per_image["image"], found.per_image[PER_IMAGE], strict=True)
                columns.setdefault(f"{name} {PER_IMAGE}", {}).update(values)
        images = list(next(iter(columns.values())))
        table = {"image": images} | {
            name: ["" if values[image] is None else f"{values[image]:.4g}" for image in images]
            for name, values in columns.items()
        }
        return figures, as_csv(table)


def by_attribute(rows: Rows, indices: np.ndarray) -> dict[str, np.ndarray]:
    assert rows.groups is not None
    names = [attribute_of(rows.group_names[rows.groups[i]], rows.classes[rows.labels[i]]) for i in indices]
    return {name: indices[np.array(names) == name] for name in sorted(set(names))}


def cached(predict: Predicting) -> Predicting:
    """Each intervention is predicted once."""
    known: dict[tuple[Any, ...], Predictions] = {}

    def predictions(interventions: Sequence[Intervention]) -> list[Predictions]:
        keys = [(one.drop, one.quantile) for one in interventions]
        new = {key: one for key, one in zip(keys, interventions, strict=True) if key not in known}
        known.update(zip(new, predict(list(new.values())) if new else [], strict=True))
        return [known[key] for key in keys]

    return predictions


def on_noise(predictions: Predicting, parts: int, far: dict[float, tuple[float, ...]], times: int) -> dict[str, int]:
    """With shuffled labels and groups whatever the search finds is chance."""
    gains = 0
    for seed in range(times):

        def shuffled(interventions: Sequence[Intervention], seed: int = seed) -> list[Predictions]:
            found = predictions(interventions)
            order = np.random.default_rng(seed).permutation(len(found[0]))
            return [
                replace(one, labels=one.labels[order], groups=None if one.groups is None else one.groups[order])
                for one in found
            ]

        gains += search(shuffled, parts, far, seed=seed).gain is not None
    return {"searches": times, "found_something": gains}


def in_words(found: Search) -> dict[str, Any]:
    chosen = {"drop": list(found.chosen.drop), "quantile": found.chosen.quantile}
    return chosen | {"sentence": found.sentence} | found.to_dict()


def column_of(rows: Rows, name: str) -> list[str] | None:
    """Of rows.csv, in the order of the rows; None if there is none."""
    path = rows.root / "rows.csv"
    with path.open(newline="", encoding="utf-8") as file:
        lines = {line["image"]: line.get(name) for line in csv.DictReader(file)}
    found = [lines.get(image) for image in rows.images]
    return None if all(one is None for one in found) else [one or "" for one in found]


def keypoints_of(rows: Rows, packs: Path) -> dict[str, Any]:
    """CUB's key points of birds that were not moved, joined by bird number."""
    numbers = column_of(rows, "bird")
    assert numbers is not None, "the datasets built of birds number them"
    table = list(csv.DictReader(io.StringIO(read_birds(packs).files.text("parts.csv"), newline="")))
    names = list(dict.fromkeys(line["part_name"] for line in table))
    column = {name: k for k, name in enumerate(names)}
    of_bird: dict[str, np.ndarray] = {}
    for line in table:
        points = of_bird.setdefault(line["id"], np.zeros((len(names), 3), np.float32))
        points[column[line["part_name"]]] = [float(line[key]) for key in ("x", "y", "visible")]
    return {"keypoints": np.stack([of_bird[number] for number in numbers]), "keypoint_names": tuple(names)}
