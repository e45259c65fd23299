"""What interventions do to a trained run, in its folder `interventions/`.

found.json   what the search chose on validation data: parts, a quantile, both; which part took the object; pure noise
test.csv     of every test picture whether it is answered rightly, as trained and under every intervention
sight.json   where it looks then: IoU, coverage, key points; sight.csv: picture by picture
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interventions_rows import QUANTILES
from sightline.config import Evaluate
from sightline.data.batches import Batches
from sightline.data.rows import Rows, attribute_of
from sightline.datasets.birds import read_birds
from sightline.evaluate import data_asked_for, opened
from sightline.explain.localize import localize
from sightline.interventions.apply import QUANTILES as SEARCHED
from sightline.interventions.apply import Looked, calibrate, intervened, with_parts
from sightline.interventions.file import Intervention, Sketch
from sightline.interventions.search import Search, search
from sightline.load import Model
from sightline.methods.pdiscoformer import PartLearner
from sightline.metrics.inference import answering_batches
from sightline.metrics.predictions import Answers
from sightline.report.survey import part_of_pixels

FOLDER = Path("interventions")
FOUND, TEST, SIGHT, SIGHTS = (FOLDER / name for name in ("found.json", "test.csv", "sight.json", "sight.csv"))
PER_PICTURE = "pixel_iou"
Answering = Callable[[Sequence[Intervention]], list[Answers]]


def is_measured(folder: Path) -> bool:
    return all((folder / name).exists() for name in (FOUND, TEST, SIGHT, SIGHTS))


@dataclass(frozen=True)
class How:
    """What measuring needs to be told."""

    kind: str  # the set
    packs: Path | None = None  # where CUB's key points are
    noise: int = 0  # searches on shuffled labels
    batch: int = 256
    workers: int = 2
    cache: Path | None = None
    device: str = "auto"


def measure(folder: Path, how: How) -> None:
    """All that is lacking."""
    accelerator, model = opened(folder, how.device)
    rows = data_asked_for(Evaluate(folder), model.run).rows
    desk = Desk(folder, how, model, with_parts(model.method, folder.name), rows, accelerator)
    if not (folder / FOUND).exists():
        save(folder / FOUND, as_json(desk.found()))
    changes = desk.interventions(json.loads((folder / FOUND).read_text(encoding="utf-8")))
    if not (folder / TEST).exists():
        save(folder / TEST, desk.outcomes(changes))
    if not (folder / SIGHT).exists() or not (folder / SIGHTS).exists():
        figures, pictures = desk.sights({name: changes[name] for name in ("plain", *(f"q{q:g}" for q in QUANTILES))})
        save(folder / SIGHTS, pictures)
        save(folder / SIGHT, as_json(figures))


def save(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def as_json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, eq=False)
class Desk:
    folder: Path
    how: How
    model: Model
    method: PartLearner
    rows: Rows
    accelerator: Any

    @property
    def parts(self) -> int:
        return self.method.where.parts

    def batches(self, indices: np.ndarray, rows: Rows | None = None, *, masks: bool = False) -> closing[Batches]:
        how = self.how
        return closing(
            answering_batches(
                rows or self.rows, indices, self.model.expects, self.accelerator,
                batch=how.batch, workers=how.workers, cache=how.cache, masks=masks,
            )
        )  # fmt: skip

    @cached_property
    def sketch(self) -> Sketch:
        with self.batches(self.rows.where("train")) as batches:
            return calibrate(self.method, batches, self.accelerator)

    # ---- on validation data ------------------------------------------------------------------------------------------

    def found(self) -> dict[str, Any]:
        """Of 200 species there are four validation pictures each: too few for a search to be sure of anything."""
        thresholds = {str(q): self.sketch.quantile(q) for q in {*QUANTILES, *SEARCHED}}
        if len(self.rows.classes) > 12:
            return {"thresholds": thresholds, "searches": {}}
        far = {q: self.sketch.quantile(q) for q in SEARCHED}
        with self.batches(self.rows.where("val")) as batches:
            answers = remembered(Looked(self.method, self.rows, batches, self.accelerator))
            searches = {
                "parts": search(answers, self.parts, {}),
                "quantile": search(answers, 1, far),
                "both": search(answers, self.parts, far),
            }
            noise = on_noise(answers, self.parts, far, self.how.noise) if self.how.noise else None
        said = {"thresholds": thresholds, "searches": {name: in_words(one) for name, one in searches.items()}}
        return said | {"objects": self.parts_of_objects(), "noise": noise}

    @torch.no_grad()
    def parts_of_objects(self) -> dict[str, Any] | None:
        """By drawn thing: of its pixels on validation pictures, the share that each part has; and of each part's."""
        masks = column_of(self.rows, "object_mask")
        val = np.array([i for i in self.rows.where("val").tolist() if masks and masks[i]])
        if not len(val):
            return None
        rows = replace(self.rows, masks=masks)
        return {thing: self.parts_on(rows, some) for thing, some in by_attribute(rows, val).items()}

    def parts_on(self, rows: Rows, indices: np.ndarray) -> dict[str, Any]:
        on_object, own, pixels = torch.zeros(self.parts), torch.zeros(self.parts), 0
        with self.batches(indices, rows, masks=True) as batches:
            for batch in batches.epoch(0):
                batch = batch.to(self.accelerator.device)
                images = batch.images.float() / 255
                with self.accelerator.autocast():
                    sight = self.method.decide(images, self.method.find(images))
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
        """As trained, with fixed quantiles, and with what was chosen on validation data."""

        def change(drop: Sequence[int], q: float | None) -> Intervention:
            return Intervention(tuple(drop), q, None if q is None else tuple(found["thresholds"][str(q)]))

        changes = {"plain": Intervention()} | {f"q{q:g}": change((), q) for q in QUANTILES}
        for name, one in found["searches"].items():
            changes[name] = change(one["drop"], one["quantile"])
        if "parts" in changes:
            changes["parts, q0.99"] = change(changes["parts"].drop, 0.99)
        return changes

    def outcomes(self, changes: dict[str, Intervention]) -> str:
        with self.batches(self.rows.where("test")) as batches:
            looked = Looked(self.method, self.rows, batches, self.accelerator, most_bytes=0)
            every = dict(zip(changes, looked(list(changes.values())), strict=True))
        first = every["plain"]
        groups = [""] * len(first) if first.groups is None else [first.group_names[g] for g in first.groups]
        labels = [first.classes[label] for label in first.labels]
        columns = {"image": first.images, "label": labels, "group": groups}
        return as_csv(columns | {name: answers.correct.astype(int).tolist() for name, answers in every.items()})

    def sights(self, changes: dict[str, Intervention]) -> tuple[dict[str, Any], str]:
        """By part of the test pictures and intervention: the figures; and those of every picture."""
        rows, figures, columns = self.rows, {}, {}
        test, fit = rows.where("test"), None
        if self.how.kind == "cub":
            rows = replace(rows, **keypoints_of(rows, self.how.packs)) if self.how.packs else rows
            fit = rows.where("train") if self.how.packs else None
        for part, indices in by_attribute(rows, test).items() if self.how.kind == "cub" else {"all": test}.items():
            for name, change in changes.items():
                found = localize(
                    intervened(self.method, change), rows, indices, self.model.expects, self.accelerator,
                    fit=fit if part == "swapped" else None, batch=self.how.batch, workers=self.how.workers,
                    cache=self.how.cache,
                )  # fmt: skip
                figures.setdefault(part, {})[name] = {key: asdict(one) for key, one in found.figures.items()}
                values = zip(found.pictures["image"], found.pictures[PER_PICTURE], strict=True)
                columns.setdefault(f"{name} {PER_PICTURE}", {}).update(values)
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


def remembered(looked: Answering) -> Answering:
    """Asked twice for the same intervention, it answers once."""
    known: dict[tuple[Any, ...], Answers] = {}

    def answers(interventions: Sequence[Intervention]) -> list[Answers]:
        keys = [(one.drop, one.quantile) for one in interventions]
        new = {key: one for key, one in zip(keys, interventions, strict=True) if key not in known}
        known.update(zip(new, looked(list(new.values())) if new else [], strict=True))
        return [known[key] for key in keys]

    return answers


def on_noise(answers: Answering, parts: int, far: dict[float, tuple[float, ...]], times: int) -> dict[str, int]:
    """Labels and groups are dealt out anew: whatever the search then finds is chance."""
    gains = 0
    for seed in range(times):

        def shuffled(interventions: Sequence[Intervention], seed: int = seed) -> list[Answers]:
            found = answers(interventions)
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
    """CUB's key points of birds that were not moved, by their numbers."""
    numbers = column_of(rows, "bird")
    assert numbers is not None, "birds are numbered in the sets that are built of them"
    table = list(csv.DictReader(io.StringIO(read_birds(packs).files.text("parts.csv"), newline="")))
    names = list(dict.fromkeys(line["part_name"] for line in table))
    place = {name: k for k, name in enumerate(names)}
    of_bird: dict[str, np.ndarray] = {}
    for line in table:
        points = of_bird.setdefault(line["id"], np.zeros((len(names), 3), np.float32))
        points[place[line["part_name"]]] = [float(line[key]) for key in ("x", "y", "visible")]
    return {"keypoints": np.stack([of_bird[number] for number in numbers]), "keypoint_names": tuple(names)}


def as_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
