"""What is measured of a trained run, and the file that it is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence import FOUND, SIGHT, SIGHTS, TEST
from packing import as_csv
from rows import Row
from sightline import config as commands
from study import Context

BATCH = 256  # small models leave a GPU idle with less
STRESS = ("curves", "masks", "neighbours", "subsets")
STEPS = 100  # in which the pixels of an image are removed, when sufficient ones are searched for


@dataclass(frozen=True)
class Measure:
    name: str
    files: tuple[str, ...]
    take: Callable[[], object]


def missing_measures(context: Context, row: Row) -> list[Measure]:
    folder = context.folder(row)
    return [one for one in measures(context, row) if not all((folder / file).exists() for file in one.files)]


def measures(context: Context, row: Row) -> list[Measure]:
    folder, found, seen = context.folder(row), [], {}
    for split in context.splits if "localize" in row.measures else ():
        found += [
            Measure("localize", (f"localization/{split}.csv",), partial(localize, context, folder, split)),
            Measure("shape", (f"shape/{split}.csv",), partial(shape, context, folder, split, seen)),
        ]
    if "sight" in row.measures:
        found.append(Measure("sight", ("localization/test.csv",), partial(localize, context, folder, "test")))
    if "certify" in row.measures:
        found.append(Measure("certify", ("certificate.json",), partial(save_certificate, context, folder)))
    if tests := tuple(name for name in row.measures if name in STRESS):
        found.append(Measure("stress", ("stress/test.csv",), partial(stress, context, folder, tests)))
    if "interventions" in row.measures:
        files = tuple(file.as_posix() for file in (FOUND, TEST, SIGHT, SIGHTS))
        found.append(Measure("interventions", files, partial(interventions, context, row)))
    if "displaced" in row.measures and "displaced" in context.data:
        found.append(Measure("displaced", ("predictions/displaced.csv",), partial(displaced, context, folder)))
    return found


def localize(context: Context, folder: Path, split: str) -> None:
    from sightline.explain.localize import localize_run

    localize_run(commands.Localize(folder, cache=context.cache, **_asked(context, split)))


def shape(context: Context, folder: Path, split: str, seen: dict[Any, Any]) -> None:
    from sightline.explain.shape import shape_run

    shape_run(commands.Shape(folder, cache=context.cache, **_asked(context, split)), seen)


def _asked(context: Context, split: str) -> dict[str, Any]:
    return {"split": split, "batch": BATCH, "workers": context.workers, "device": context.device}


def stress(context: Context, folder: Path, tests: tuple[str, ...]) -> None:
    from sightline.explain.stress import stress

    asked: Any = {"tests": tests, "maps": ("gae",), "limit": context.limit, "figures": False}
    asked |= {"subset_images": context.subsets, "subset_steps": STEPS}
    asked |= {"batch": BATCH, "workers": context.workers, "device": context.device}
    stress(commands.Stress(folder, cache=context.cache, **asked))


def interventions(context: Context, row: Row) -> None:
    from measure_interventions import measure_interventions

    measure_interventions(context, row)


def displaced(context: Context, folder: Path) -> None:
    """Predictions of the same birds on the same scenes, away from the centre and in it."""
    from sightline.data.cache import Cache
    from sightline.data.images import Preprocess
    from sightline.data.rows import read_rows
    from sightline.load import match_classes, open_model
    from sightline.metrics.inference import predict_rows

    data = context.data["displaced"]
    accelerator, model = open_model(folder, context.device)
    rows = match_classes(model, read_rows(data), data)
    at = rows.split_indices("test")
    cache = Cache.open(rows, Preprocess.of(model.expects), context.cache, at, workers=max(1, context.workers))
    found = predict_rows(model.method, rows, at, model.expects, accelerator, batch=BATCH, cache=cache)
    found.save_csv(folder / "predictions" / "displaced.csv")


def save_certificate(context: Context, folder: Path) -> None:
    certify(folder, context.splits[-1], device=context.device).save(folder / "certificate.json")


@torch.no_grad()
def certify(folder: Path, split: str, *, images: int = 32, device: str = "auto") -> Any:
    """The certificate of blindness on images of the run's own data, evenly spread over the split."""
    from sightline.load import evaluation_data, open_model
    from sightline.metrics.inference import inference_batches, sight_for
    from sightline.verify.verify import verify

    accelerator, model = open_model(folder, device)
    rows = model.method.with_masks(evaluation_data(commands.Evaluate(folder), model.run).rows)
    there = rows.split_indices(split)
    chosen = there[np.linspace(0, len(there) - 1, min(images, len(there))).astype(int)]
    given = model.method.needs_masks
    batches = inference_batches(rows, chosen, model.expects, accelerator, batch=len(chosen), workers=0, masks=given)
    try:
        batch = next(iter(batches.epoch(0))).to(accelerator.device)
    finally:
        batches.close()
    pixels = batch.images.float() / 255
    with torch.enable_grad(), accelerator.autocast():
        sight = sight_for(model.method, pixels, batch.masks) if given else None  # verify looks for itself
        return verify(model.method, pixels, sight, draws=2)


def cost_of(folder: Path, device: str) -> dict[str, Any]:
    """Of a prediction, on some test images, at the share of patches that it really sees."""
    from sightline.load import evaluation_data, open_model
    from sightline.metrics.cost import measure_cost_on_rows

    accelerator, model = open_model(folder, device)
    rows = evaluation_data(commands.Evaluate(folder), model.run).rows
    return asdict(
        measure_cost_on_rows(model.method, rows, rows.split_indices("test"), model.expects, accelerator.device)
    )


def sees_of(folder: Path, device: str) -> dict[str, Any]:
    """Whether the method is blind outside its sight, whether that is always the whole image, and its parameters."""
    from sightline.load import open_model

    method = open_model(folder, device)[1].method
    parameters = sum(p.numel() for p in method.parameters()) if isinstance(method, torch.nn.Module) else None
    return {"blind": bool(method.blind), "everything": bool(method.sees_everything), "parameters": parameters}


def write_columns(folder: Path, images: Sequence[str], columns: dict[str, np.ndarray], split: str = "test") -> None:
    """What was measured of each image, to localization/SPLIT.csv."""
    path = folder / "localization" / f"{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {name: [f"{value:.5g}" for value in values] for name, values in columns.items()}
    path.with_suffix(".part").write_text(as_csv({"image": images} | texts), encoding="utf-8")
    path.with_suffix(".part").replace(path)
