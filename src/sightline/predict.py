"""`sightline predict`: predictions for images without labels, and images of what was seen."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .config import Predict
from .console.files import as_csv, make_folder, prepare_output, write
from .console.terminal import counted, fail
from .data.drawing import grey_out_hidden, to_pil_images
from .data.images import find_images, read_image, to_tensor
from .errors import UserError
from .load import load_and_announce
from .sight import Sight
from .training.distributed import make_accelerator


@dataclass(frozen=True)
class PredictionTable:
    """Predictions for many images, as a file."""

    text: str  # CSV or JSON, an entry per readable image
    images: int
    unreadable: int
    unseen: tuple[Path, ...] = ()  # images with an empty sight


def predict(command: Predict) -> PredictionTable:
    """For every image the predicted class and the probability of every class."""
    device = make_accelerator(command.device).device
    apply_saved = command.intervention and command.mask is None  # a mask replaces the sight, and interventions on it
    model = load_and_announce(command.run, str(device), apply_saved)
    if command.overlay is not None and (model.method.sees_everything or not model.method.blind):
        raise UserError("--overlay: this method sees the whole image, so there is nothing to draw; leave it out")
    paths = find_images(command.images)
    names = overlay_names(paths, command.images)
    columns = ["image", "predicted", *(f"p_{name}" for name in model.classes)]
    lines: list[dict[str, Any]] = []
    unseen: list[Path] = []
    for start in range(0, len(paths), command.batch):
        images = read_readable(paths, range(start, min(start + command.batch, len(paths))))
        if not images:
            continue
        prediction = model.predict(list(images.values()), *filter(None, [command.mask]))
        for i, probabilities in zip(images, prediction.probabilities.cpu().tolist(), strict=True):
            values = [str(paths[i]), model.classes[int(np.argmax(probabilities))], *probabilities]
            lines.append(dict(zip(columns, values, strict=True)))
        seen = prediction.sight.visible(model.expects.size).flatten(1).any(dim=1).tolist()
        unseen += [paths[i] for i, is_seen in zip(images, seen, strict=True) if not is_seen]
        if command.overlay is not None:
            tensors = torch.stack([to_tensor(image, model.expects) for image in images.values()]).to(device)
            draw_overlays(command.overlay, [names[i] for i in images], tensors, prediction.sight)
    as_json = command.out is not None and command.out.suffix == ".json"
    text = json.dumps(lines, indent=1, ensure_ascii=False) + "\n" if as_json else as_csv(columns, lines)
    return PredictionTable(text, len(paths), len(paths) - len(lines), tuple(unseen))


def check_replaceable(path: Path | None) -> None:
    """Only earlier predictions are overwritten: a typing error must not cost somebody's table."""
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = json.load(file) if path.suffix == ".json" else [next(csv.reader(file), [])]
        known = not lines or "predicted" in lines[0]
    except (OSError, ValueError, LookupError, TypeError, csv.Error):
        known = False
    if not known:
        raise UserError(f"{path}: exists, and holds no predictions of `sightline predict`; choose another --out")


def read_readable(paths: Sequence[Path], which: Sequence[int]) -> dict[int, Image.Image]:
    """Damaged images are reported and skipped."""
    images = {}
    for i in which:
        try:
            images[i] = read_image(paths[i])
        except UserError as error:
            print(f"sightline: {error}", file=sys.stderr)
    return images


def overlay_names(paths: Sequence[Path], given: Sequence[Path]) -> list[Path]:
    """The file of each image's overlay: folders under the given one are kept, and no name is used twice."""
    names, taken = [], set()
    folders = [path.parent if path.suffix.lower() == ".csv" else path for path in given]
    for path in paths:
        folder = next((f for f in folders if f.is_dir() and path.is_relative_to(f)), path.parent)
        stem = path.relative_to(folder).with_suffix("")
        name, number = stem, 1
        while str(name).lower() in taken:
            number += 1
            name = stem.with_name(f"{stem.name}-{number}")
        taken.add(str(name).lower())
        names.append(name.with_name(f"{name.name}.png"))
    return names


def draw_overlays(folder: Path, names: Sequence[Path], images: torch.Tensor, sight: Sight) -> None:
    for name, image in zip(names, to_pil_images(grey_out_hidden(images, sight)), strict=True):
        make_folder((folder / name).parent)
        try:
            image.save(folder / name)
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be written ({error.strerror or error})") from error


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(command: Predict) -> int:
    prepare_output(command.out)
    check_replaceable(command.out)
    table = predict(command)
    if command.out is None:
        sys.stdout.write(table.text)
    else:
        write(command.out, table.text)
        print(f"Predictions: {command.out}")
    if table.unseen:
        count, first = counted(len(table.unseen)), table.unseen[0]
        print(
            f"note: empty sight for {count} (such as {first}): these predictions carry no information", file=sys.stderr
        )
    if table.unreadable:
        return fail(f"{table.unreadable:,} of {table.images:,} images could not be read", 1)
    return 0
